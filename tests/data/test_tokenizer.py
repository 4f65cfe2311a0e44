"""Tokenizers: bytes, numbers, and a Hugging Face folder made by the test."""

import hashlib
import json
from pathlib import Path

import numpy as np
import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers

from titan_moe.data.tokenizer import ByteTokenizer, FolderTokenizer, NumberTokenizer, build_tokenizer

TEXT = "def encode(text):\n    return text.encode()\n"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    inner = Tokenizer(models.BPE())
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    inner.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=300, special_tokens=["<begin>", "<end>"], initial_alphabet=alphabet)
    inner.train_from_iterator([TEXT] * 4, trainer)
    inner.save(str(tmp_path / "tokenizer.json"))
    _configure(tmp_path, eos_token="<end>")
    return tmp_path


def _configure(folder: Path, **config: object) -> None:
    (folder / "tokenizer_config.json").write_text(json.dumps(config))


def test_byte_tokenizer_round_trip() -> None:
    tokenizer = ByteTokenizer()
    text = "naïve → 数"
    assert tokenizer.decode(tokenizer.encode(text)) == text
    assert tokenizer.encode("ab") == [97, 98]
    assert tokenizer.decode([97, 0, 98, 300]) == "ab"


def test_byte_tokenizer_zero_only_ends_documents() -> None:
    documents = list(ByteTokenizer().encode_documents(["a\0b", "", "\0", "c"]))
    assert [document.tolist() for document in documents] == [[97, 98, 0], [], [], [99, 0]]
    assert ByteTokenizer().dtype == np.uint8


def test_byte_tokenizer_replaces_a_lone_surrogate() -> None:
    assert ByteTokenizer().encode("a\ud800") == [97, ord("?")]


def test_number_tokenizer_round_trip() -> None:
    tokenizer = NumberTokenizer(70000)
    assert tokenizer.decode(tokenizer.encode("3 69999")) == "3 69999"
    assert tokenizer.end_of_document is None
    assert tokenizer.dtype == np.uint32


def test_folder_tokenizer_appends_end_of_document(folder: Path) -> None:
    tokenizer = FolderTokenizer(str(folder))
    inner = Tokenizer.from_file(str(folder / "tokenizer.json"))
    assert tokenizer.encode(TEXT) == inner.encode(TEXT).ids
    assert len(tokenizer.encode(TEXT)) < len(TEXT)
    assert tokenizer.decode(tokenizer.encode(TEXT)) == TEXT
    assert tokenizer.end_of_document == inner.token_to_id("<end>")
    assert tokenizer.vocab_size == inner.get_vocab_size()
    texts = [TEXT, "", "x"] * 200
    documents = [document.tolist() for document in tokenizer.encode_documents(texts)]
    assert documents == [[*tokenizer.encode(text), tokenizer.end_of_document] if text else [] for text in texts]


def test_folder_tokenizer_prepends_bos_if_configured(folder: Path) -> None:
    plain = FolderTokenizer(str(folder)).encode("x")
    _configure(folder, eos_token="<end>", bos_token="<begin>", add_bos_token=True, add_eos_token=True)
    tokenizer = FolderTokenizer(str(folder))
    assert tokenizer.encode("x") == [0, *plain]
    assert next(tokenizer.encode_documents(["x"])).tolist() == [0, *plain, tokenizer.end_of_document]


def test_folder_tokenizer_adds_bos_and_eos_only_once(folder: Path) -> None:
    plain = FolderTokenizer(str(folder)).encode("x")
    inner = Tokenizer.from_file(str(folder / "tokenizer.json"))
    inner.post_processor = processors.TemplateProcessing(
        single="<begin> $A <end>", special_tokens=[("<begin>", 0), ("<end>", 1)]
    )
    inner.save(str(folder / "tokenizer.json"))
    _configure(folder, eos_token="<end>", bos_token="<begin>", add_bos_token=True)
    tokenizer = FolderTokenizer(str(folder))
    assert tokenizer.encode("x") == [0, *plain]
    assert next(tokenizer.encode_documents(["x"])).tolist() == [0, *plain, 1]


def test_folder_tokenizer_fingerprint_changes_with_its_files(folder: Path) -> None:
    before = FolderTokenizer(str(folder)).fingerprint
    assert FolderTokenizer(str(folder)).fingerprint == before
    _configure(folder, eos_token="<end>", bos_token="<begin>")
    assert FolderTokenizer(str(folder)).fingerprint != before


def test_folder_tokenizer_fingerprint_tells_which_ids_it_gives(folder: Path) -> None:
    """One without differences is that of earlier versions: the hash of the files."""
    digest = hashlib.sha256((folder / "tokenizer.json").read_bytes() + (folder / "tokenizer_config.json").read_bytes())
    assert FolderTokenizer(str(folder), split_special_tokens=False).fingerprint == digest.hexdigest()
    assert FolderTokenizer(str(folder)).fingerprint == f"{digest.hexdigest()}, control tokens in text are split"
    inner = Tokenizer.from_file(str(folder / "tokenizer.json"))
    inner.enable_truncation(8)
    inner.save(str(folder / "tokenizer.json"))
    found = FolderTokenizer(str(folder), split_special_tokens=False).fingerprint
    assert found.endswith(", without the saved truncation and padding")


def test_text_that_spells_the_end_token_is_text(folder: Path) -> None:
    texts = ["a<end>b", "<begin>"]
    split, parsed = (list(FolderTokenizer(str(folder), is_split).encode_documents(texts)) for is_split in (True, False))
    assert [document.tolist().count(1) for document in split] == [1, 1], "only the ends of the documents"
    assert [document.tolist().count(1) for document in parsed] == [2, 1]
    assert 0 not in split[1] and 0 in parsed[1]
    assert FolderTokenizer(str(folder)).decode(split[0][:-1]) == "a<end>b"


def test_half_of_a_pair_of_surrogates_becomes_a_question_mark(folder: Path) -> None:
    tokenizer = FolderTokenizer(str(folder))
    assert tokenizer.encode("a\ud83d") == tokenizer.encode("a?")
    whole, half = (list(tokenizer.encode_documents(["x", text])) for text in ("a?", "a\ud83d"))
    assert [document.tolist() for document in half] == [document.tolist() for document in whole]


def test_folder_tokenizer_without_eos_is_refused(folder: Path) -> None:
    _configure(folder)
    with pytest.raises(ValueError, match="set eos_token in its tokenizer_config.json"):
        FolderTokenizer(str(folder))


def test_folder_tokenizer_without_files_is_refused(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="data.tokenizer = .*tokenizer.json"):
        FolderTokenizer(str(tmp_path / "missing"))


@pytest.mark.parametrize("name", ["tokenizer.json", "tokenizer_config.json"])
def test_folder_tokenizer_broken_file_error_names_the_folder(folder: Path, name: str) -> None:
    _configure(folder, eos_token="</s>")
    (folder / name).write_text("{ broken")
    with pytest.raises(ValueError, match="data.tokenizer = '.*' cannot be read: .*repair its .*tokenizer"):
        FolderTokenizer(str(folder))


def test_tokenizer_larger_than_the_model_vocabulary_is_refused(folder: Path) -> None:
    with pytest.raises(ValueError, match="'bytes' has 256 ids, more than model.vocab_size = 255"):
        build_tokenizer("bytes", "text", 255)
    with pytest.raises(ValueError, match="set model.vocab_size to at least"):
        build_tokenizer(str(folder), "text", 256)
    assert isinstance(build_tokenizer("bytes", "text", 256), ByteTokenizer)


def test_tokenizer_of_id_sources_is_numeric() -> None:
    assert build_tokenizer("bytes", "synthetic", 60).vocab_size == 60
    assert build_tokenizer("", "tokens", 60).vocab_size == 60
