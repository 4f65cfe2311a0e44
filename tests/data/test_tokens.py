"""Flat files of token ids: documents end at the end-of-document id and at the end of a file."""

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from titan_moe.config import Recipe
from titan_moe.data.cache import Cache
from titan_moe.data.corpus import Corpus
from titan_moe.data.tokenizer import ByteTokenizer, NumberTokenizer, Tokenizer
from titan_moe.data.tokens import open_token_files


@pytest.fixture
def open_files(tmp_path: Path, make_recipe: Callable[..., Recipe]) -> Callable[..., Corpus]:
    def open_(tokenizer: Tokenizer, /, **data: object) -> Corpus:
        recipe = make_recipe(data={"source": "tokens", "path": str(tmp_path / "*.bin"), **data})
        cache = Cache(tmp_path / "cache", is_builder=True, barrier=lambda: None)
        return open_token_files(recipe.data, tokenizer, cache)

    return open_


@pytest.mark.parametrize("dtype", ["uint16", "uint32"])
def test_token_files_are_one_corpus_in_sorted_order(
    tmp_path: Path, open_files: Callable[..., Corpus], dtype: str
) -> None:
    np.array([5, 0, 0, 6, 7], dtype=dtype).tofile(tmp_path / "b.bin")
    np.array([1, 2, 0, 3, 4, 0], dtype=dtype).tofile(tmp_path / "a.bin")
    corpus = open_files(ByteTokenizer(), token_dtype=dtype, document_attention=True)
    assert corpus.read(0, 11).tokens.tolist() == [1, 2, 0, 3, 4, 0, 5, 0, 0, 6, 7]
    assert corpus.document_ends.tolist() == [3, 6, 8, 9, 11]


def test_token_file_without_an_end_id_is_one_document(tmp_path: Path, open_files: Callable[..., Corpus]) -> None:
    np.array([1, 0, 2], dtype="u2").tofile(tmp_path / "a.bin")
    np.array([3, 0], dtype="u2").tofile(tmp_path / "b.bin")
    assert open_files(NumberTokenizer(10), document_attention=True).document_ends.tolist() == [3, 5]


def test_token_files_document_scan_is_cached_by_file(tmp_path: Path, open_files: Callable[..., Corpus]) -> None:
    np.array([1, 0, 2, 0], dtype="u2").tofile(tmp_path / "a.bin")
    assert open_files(ByteTokenizer(), holdout_fraction=0.1).document_ends.tolist() == [2, 4]
    assert open_files(ByteTokenizer(), holdout_fraction=0.1).document_ends.tolist() == [2, 4]
    assert len(list((tmp_path / "cache").iterdir())) == 1
    np.array([1, 2, 2, 0, 3], dtype="u2").tofile(tmp_path / "a.bin")
    assert open_files(ByteTokenizer(), holdout_fraction=0.1).document_ends.tolist() == [4, 5]


def test_token_files_are_not_scanned_without_need(tmp_path: Path, open_files: Callable[..., Corpus]) -> None:
    np.array([1, 0, 2, 0], dtype="u2").tofile(tmp_path / "a.bin")
    open_files(ByteTokenizer())
    assert not (tmp_path / "cache").exists()


def test_token_files_uint32_read_as_uint16_are_refused(tmp_path: Path, open_files: Callable[..., Corpus]) -> None:
    np.arange(50, dtype="u4").tofile(tmp_path / "a.bin")
    with pytest.raises(ValueError, match="set data.token_dtype to 'uint32'"):
        open_files(ByteTokenizer())


def test_token_files_uint16_read_as_uint32_are_refused(tmp_path: Path, open_files: Callable[..., Corpus]) -> None:
    np.array([1, 2, 3, 4], dtype="u2").tofile(tmp_path / "a.bin")
    with pytest.raises(ValueError, match="contains the id .*correct data.token_dtype"):
        open_files(ByteTokenizer(), token_dtype="uint32")
    with pytest.raises(ValueError, match=r"not below model.vocab_size = 9; increase it"):
        open_files(NumberTokenizer(9), tokenizer="", token_dtype="uint32")


@pytest.mark.parametrize(
    ("data", "words"), [(b"", "a.bin is empty; remove it"), (b"abc", "has 3 bytes.*data.token_dtype")]
)
def test_token_file_with_a_partial_id_is_refused(
    tmp_path: Path, open_files: Callable[..., Corpus], data: bytes, words: str
) -> None:
    (tmp_path / "a.bin").write_bytes(data)
    with pytest.raises(ValueError, match=words):
        open_files(ByteTokenizer())


def test_token_files_of_another_tokenizer_are_refused(tmp_path: Path, open_files: Callable[..., Corpus]) -> None:
    np.array([1, 50256], dtype="u2").tofile(tmp_path / "a.bin")
    with pytest.raises(ValueError, match="id 50256.*data.tokenizer = 'bytes'.*set data.tokenizer to ''"):
        open_files(ByteTokenizer())
