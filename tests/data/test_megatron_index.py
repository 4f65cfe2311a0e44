"""Megatron's index of a token file: dtype and document borders, as Megatron writes them."""

import struct
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from titan_moe.config import Recipe
from titan_moe.data.cache import Cache
from titan_moe.data.corpus import Corpus
from titan_moe.data.megatron_index import read_index
from titan_moe.data.tokenizer import NumberTokenizer
from titan_moe.data.tokens import open_token_files

DOCUMENTS = [[[70001, 2], [3]], [[4, 5, 6]], [], [[7], [], [8, 9]]]
"""Of sequences of ids."""
IDS = [70001, *range(2, 10)]
ENDS = [3, 6, 9]
CODES = {"int32": 4, "int64": 5}


def write(prefix: Path, dtype: str = "int32", borders: list[int] | None = None) -> None:
    """By the definition of the format. Borders are the sequence at which each document begins, and their number."""
    sequences = [sequence for document in DOCUMENTS for sequence in document]
    lengths = [len(sequence) for sequence in sequences]
    starts = [sum(lengths[:number]) * np.dtype(dtype).itemsize for number in range(len(lengths))]
    borders = [0, 2, 3, 3, 6] if borders is None else borders
    head = b"MMIDIDX\x00\x00" + struct.pack("<QBQQ", 1, CODES[dtype], len(lengths), len(borders))
    lists = np.array(lengths, "<i4").tobytes() + np.array(starts, "<i8").tobytes() + np.array(borders, "<i8").tobytes()
    prefix.with_suffix(".idx").write_bytes(head + lists)
    prefix.with_suffix(".bin").write_bytes(b"".join(np.array(sequence, dtype).tobytes() for sequence in sequences))


@pytest.fixture
def open_files(tmp_path: Path, make_recipe: Callable[..., Recipe]) -> Callable[..., Corpus]:
    def open_(pattern: str = "*", **data: object) -> Corpus:
        path = {"source": "tokens", "path": str(tmp_path / "data" / pattern), "tokenizer": ""}
        recipe = make_recipe(data={**path, "document_attention": True, **data})
        cache = Cache(tmp_path / "cache", is_builder=True, barrier=lambda: None)
        return open_token_files(recipe.data, NumberTokenizer(80000), cache)

    (tmp_path / "data").mkdir()
    return open_


@pytest.mark.parametrize("pattern", ["*", "*.bin"])
@pytest.mark.parametrize("dtype", CODES)
def test_ids_and_documents_are_those_of_the_index(
    open_files: Callable[..., Corpus], tmp_path: Path, pattern: str, dtype: str
) -> None:
    write(tmp_path / "data" / "a", dtype)
    write(tmp_path / "data" / "b", dtype)
    np.array([1, 0, 2], "<u2").tofile(tmp_path / "data" / "c.bin")
    corpus = open_files(pattern)
    assert corpus.read(0, corpus.num_tokens).tokens.tolist() == [*IDS, *IDS, 1, 0, 2]
    assert corpus.document_ends.tolist() == [*ENDS, *(9 + end for end in ENDS), 21]
    assert open_files(pattern, document_attention=False).num_tokens == 21


def test_fingerprint_has_the_documents(open_files: Callable[..., Corpus], tmp_path: Path) -> None:
    write(tmp_path / "data" / "a")
    found = open_files().fingerprint()
    write(tmp_path / "data" / "a", borders=[0, 6])
    assert open_files().document_ends.tolist() == [9]
    assert open_files().fingerprint() != found


def test_index_of_megatron_core(open_files: Callable[..., Corpus], tmp_path: Path) -> None:
    builder = pytest.importorskip("megatron.core.datasets.indexed_dataset")
    torch = pytest.importorskip("torch")
    written = builder.IndexedDatasetBuilder(str(tmp_path / "data" / "a.bin"), dtype=np.int32)
    for document in DOCUMENTS:
        written.add_document(torch.tensor(sum(document, [])), [len(sequence) for sequence in document])
    written.finalize(str(tmp_path / "data" / "a.idx"))
    corpus = open_files()
    assert corpus.read(0, 9).tokens.tolist() == IDS
    assert corpus.document_ends.tolist() == ENDS


def test_index_without_its_token_file_is_refused(open_files: Callable[..., Corpus], tmp_path: Path) -> None:
    write(tmp_path / "data" / "a")
    with pytest.raises(ValueError, match=r"a.idx is an index of Megatron, without its token file; give .*a.bin"):
        open_files("*.idx")


@pytest.mark.parametrize(
    ("at", "data", "words"),
    [
        (9, struct.pack("<Q", 2), "is not of version 1"),
        (17, b"\x07", "a dtype with the code 7"),
        (18, struct.pack("<Q", 2**40), "sequences need"),
        (0, b"TNTIDX\x00\x00", "is an index of an old format"),
        (34 + 6 * 12 + 8, struct.pack("<q", 5), "documents that are not in order"),
        (34 + 6 * 4, struct.pack("<q", 4), "do not lie one after the other"),
    ],
)
def test_damaged_index_is_named(
    open_files: Callable[..., Corpus], tmp_path: Path, at: int, data: bytes, words: str
) -> None:
    write(tmp_path / "data" / "a")
    file = tmp_path / "data" / "a.idx"
    content = bytearray(file.read_bytes())
    content[at : at + len(data)] = data
    file.write_bytes(content)
    with pytest.raises(ValueError, match=rf"data.path: .*a.idx .*{words}"):
        open_files("*.bin")


def test_token_file_of_another_size_than_its_index_says_is_refused(
    open_files: Callable[..., Corpus], tmp_path: Path
) -> None:
    write(tmp_path / "data" / "a")
    (tmp_path / "data" / "a.bin").write_bytes(b"\0" * 32)
    with pytest.raises(ValueError, match=r"a.bin has 32 bytes, and Megatron's index .*a.idx gives it 9 ids of int32"):
        open_files()


def test_index_may_have_no_sequence(tmp_path: Path) -> None:
    (tmp_path / "a.idx").write_bytes(b"MMIDIDX\x00\x00" + struct.pack("<QBQQ", 1, 4, 0, 0))
    index = read_index(tmp_path / "a.idx")
    assert index.num_bytes() == 0 and index.document_ends().tolist() == []
