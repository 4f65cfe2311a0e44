"""Tokenizers: text to token ids and back."""

import hashlib
import json
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Sequence
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np

_TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "vocab.json", "vocab.txt", "merges.txt")
_BATCH_DOCUMENTS = 256


class Tokenizer(ABC):
    """The interface of tokenizers, for the data pipeline and for text generation."""

    vocab_size: int
    """One more than the largest id."""
    end_of_document: int | None
    """Id appended to each document; None if documents have no end token."""
    fingerprint: str
    """Identifies the tokenizer in cache keys of tokenised text."""

    @abstractmethod
    def encode(self, text: str) -> list[int]:
        """Encode a text, without the end-of-document id."""

    @abstractmethod
    def decode(self, ids: Sequence[int]) -> str:
        """Decode ids into text."""

    @abstractmethod
    def encode_documents(self, texts: Iterable[str]) -> Iterator[np.ndarray]:
        """Encode documents, each with `end_of_document` appended. An empty text gives an empty array."""

    def count_bytes(self, ids: Sequence[int]) -> int:
        """The bytes of UTF-8 of the text of ids, without control tokens. Where ids begin or end inside a character, up
        to 3 too many. 0 if ids have no text."""
        return len(self.decode(ids).encode())

    @property
    def dtype(self) -> np.dtype:
        """The smallest unsigned integer dtype for every id."""
        return np.dtype(np.min_scalar_type(self.vocab_size - 1)).newbyteorder("<")


class ByteTokenizer(Tokenizer):
    """UTF-8 bytes as ids; needs no download. Byte 0, which does not occur in text, ends a document."""

    vocab_size = 256
    end_of_document = 0
    fingerprint = "bytes"

    def encode(self, text: str) -> list[int]:
        return list(_utf8(text))

    def decode(self, ids: Sequence[int]) -> str:
        return bytes(id for id in ids if self.end_of_document < id < self.vocab_size).decode("utf-8", errors="replace")

    def count_bytes(self, ids: Sequence[int]) -> int:
        return sum(self.end_of_document < id < self.vocab_size for id in ids)

    def encode_documents(self, texts: Iterable[str]) -> Iterator[np.ndarray]:
        for text in texts:
            data = _utf8(text)
            yield np.frombuffer(data + b"\0" if data else b"", dtype=np.uint8)


class NumberTokenizer(Tokenizer):
    """For ids whose tokenizer is unknown or does not exist. Their text is the ids in decimal."""

    end_of_document = None
    fingerprint = "numbers"

    def __init__(self, vocab_size: int) -> None:
        self.vocab_size = vocab_size

    def encode(self, text: str) -> list[int]:
        return [int(word) for word in text.split()]

    def decode(self, ids: Sequence[int]) -> str:
        return " ".join(str(id) for id in ids)

    def count_bytes(self, ids: Sequence[int]) -> int:
        return 0

    def encode_documents(self, texts: Iterable[str]) -> Iterator[np.ndarray]:
        return (np.array(self.encode(text), dtype=self.dtype) for text in texts)


class FolderTokenizer(Tokenizer):
    """A Hugging Face tokenizer from a folder, through torchtitan. Its configuration decides about a leading BOS.

    A text that spells a control token is split into tokens of text, unless `split_special_tokens` is False.

    Raises: FileNotFoundError for a folder without tokenizer files; ValueError for unreadable ones or a missing EOS.
    """

    def __init__(self, folder: str, split_special_tokens: bool = True) -> None:
        files = [Path(folder) / name for name in _TOKENIZER_FILES if (Path(folder) / name).is_file()]
        if not files:
            raise FileNotFoundError(
                f"data.tokenizer = {folder!r} is not a folder with a tokenizer.json; "
                "give the path of such a folder, or 'bytes'"
            )
        from titan_moe.titan import load_tokenizer  # imported here: byte tokenizers do not need torchtitan

        try:
            self._inner: Any = load_tokenizer(folder, split_special_tokens=split_special_tokens)
        except Exception as error:  # the library raises no narrower type
            names = " or ".join(file.name for file in files)
            raise ValueError(f"data.tokenizer = {folder!r} cannot be read: {error}; repair its {names}") from error
        if self._inner.eos_id is None:
            raise ValueError(
                f"data.tokenizer = {folder!r} has no end-of-sequence token, which must end documents; "
                "set eos_token in its tokenizer_config.json"
            )
        self.end_of_document: int = self._inner.eos_id
        self.vocab_size = max(self._inner.get_vocab().values()) + 1
        digest = hashlib.sha256(b"".join(file.read_bytes() for file in files)).hexdigest()
        self.fingerprint = ", ".join([digest, *_differences(files[0], split_special_tokens)])

    def encode(self, text: str) -> list[int]:
        return self._with_bos_only(self._inner.tokenizer.encode(_of_unicode(text)).ids)

    def decode(self, ids: Sequence[int]) -> str:
        return self._inner.decode(list(ids))

    def encode_documents(self, texts: Iterable[str]) -> Iterator[np.ndarray]:
        texts = iter(texts)
        while batch := list(islice(texts, _BATCH_DOCUMENTS)):  # `encode_batch` uses every core
            try:
                encodings = self._inner.tokenizer.encode_batch(batch)
            except TypeError:  # half of a pair of surrogates, which JSON may have
                encodings = self._inner.tokenizer.encode_batch([_of_unicode(text) for text in batch])
            for text, encoding in zip(batch, encodings, strict=True):
                ids = [*self._with_bos_only(encoding.ids), self.end_of_document] if text else []
                yield np.array(ids, dtype=self.dtype)

    def _with_bos_only(self, ids: list[int]) -> list[int]:
        """Prepend BOS if the folder's configuration says so, and remove an EOS. The caller appends the EOS."""
        if self._inner.hf_adds_eos:
            ids = ids[:-1]
        if self._inner.default_add_bos and not self._inner.hf_adds_bos and self._inner.bos_id is not None:
            ids = [self._inner.bos_id, *ids]
        return ids


def build_tokenizer(name: str, source: str, model_vocab_size: int, *, split_special_tokens: bool = True) -> Tokenizer:
    """Make the tokenizer of `data.tokenizer`.

    Raises: ValueError if it has more ids than the model's embedding has rows.
    """
    tokenizer: Tokenizer
    if source == "synthetic" or (source in ("auto", "tokens", "mixture") and name == ""):
        tokenizer = NumberTokenizer(model_vocab_size)
    elif name == "bytes":
        tokenizer = ByteTokenizer()
    else:
        tokenizer = FolderTokenizer(name, split_special_tokens)
    if tokenizer.vocab_size > model_vocab_size:
        raise ValueError(
            f"data.tokenizer = {name!r} has {tokenizer.vocab_size} ids, more than model.vocab_size = "
            f"{model_vocab_size}; set model.vocab_size to at least {tokenizer.vocab_size}"
        )
    return tokenizer


def _differences(file: Path, split_special_tokens: bool) -> list[str]:
    """What makes ids other than those of the files as earlier versions of this package read them. Without a difference
    a fingerprint is as theirs, and a checkpoint of theirs goes on."""
    differences = ["control tokens in text are split"] if split_special_tokens else []
    saved = json.loads(file.read_bytes()) if file.name == "tokenizer.json" else {}
    if saved.get("truncation") or saved.get("padding"):
        differences.append("without the saved truncation and padding")
    return differences


def _of_unicode(text: str) -> str:
    """A text with `?` for what is no character."""
    return text.encode("utf-8", errors="replace").decode()


def _utf8(text: str) -> bytes:
    return text.encode("utf-8", errors="replace").replace(b"\0", b"")
