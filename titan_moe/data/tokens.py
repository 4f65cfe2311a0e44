"""Pre-tokenised corpora: flat binary files of token ids."""

from collections.abc import Iterator
from pathlib import Path

import numpy as np

from titan_moe.config.train import DataConfig
from titan_moe.data.bad_rows import BadRows
from titan_moe.data.cache import Cache, describe_files
from titan_moe.data.corpus import Corpus, open_document_ends, write_document_ends
from titan_moe.data.text import find_files
from titan_moe.data.token_file import TokenFile
from titan_moe.data.tokenizer import Tokenizer

_PROBE_TOKENS = 4096
_MIN_PROBE_TOKENS = 16
_MOST_BAD_IDS = 0.5
"""A file with a larger share of ids outside the vocabulary is of another tokenizer: not skipped as bad rows."""
_SCAN_TOKENS = 1 << 24


def open_token_files(data: DataConfig, tokenizer: Tokenizer, cache: Cache, bad_rows: BadRows | None = None) -> Corpus:
    """Open the files of `data.path` as one corpus, in sorted order.

    A document ends after the tokenizer's end-of-document id and at the end of its file. The ends are needed only for
    document attention and for a holdout; finding them reads every byte once, and the result is cached.

    Raises: FileNotFoundError if no file matches; ValueError for files of another dtype or vocabulary.
    """
    files = find_files(data.path, "data.path", "*.bin")
    parts = [_open_file(file, data, tokenizer) for file in files]
    if not (data.document_attention or data.holdout_fraction > 0):
        return Corpus(parts, np.cumsum([len(part) for part in parts]), tokenizer.vocab_size, bad_rows=bad_rows)
    key = [describe_files(files), data.token_dtype, tokenizer.end_of_document]

    def build(folder: Path) -> None:
        write_document_ends(folder, np.concatenate(list(_find_document_ends(parts, tokenizer.end_of_document))))

    document_ends = cache.get("tokens", key, build, open_document_ends)
    return Corpus(parts, document_ends, tokenizer.vocab_size, bad_rows=bad_rows)


def _open_file(file: Path, data: DataConfig, tokenizer: Tokenizer) -> TokenFile:
    dtype = np.dtype(data.token_dtype).newbyteorder("<")
    size_bytes = file.stat().st_size
    if size_bytes == 0:
        raise ValueError(f"data.path: {file} is empty; remove it, or leave it out of the glob")
    if size_bytes % dtype.itemsize != 0:
        raise ValueError(
            f"data.path: {file} has {size_bytes} bytes, not a multiple of the {dtype.itemsize} bytes of an id of "
            f"data.token_dtype = {data.token_dtype!r}; remove the file or correct data.token_dtype"
        )
    tokens = TokenFile(file, dtype)
    _check_dtype(tokens[:_PROBE_TOKENS], file, data, tokenizer)
    return tokens


def _check_dtype(tokens: np.ndarray, file: Path, data: DataConfig, tokenizer: Tokenizer) -> None:
    """Check a file's first ids. 32-bit ids read as 16-bit ones have zeros at every odd position."""
    is_long_enough = len(tokens) >= _MIN_PROBE_TOKENS
    if data.token_dtype == "uint16" and is_long_enough and tokens.any() and not tokens[1::2].any():
        raise ValueError(
            f"data.path: every second id of {file} is 0 when read as data.token_dtype = 'uint16', as in a file of "
            "32-bit ids; set data.token_dtype to 'uint32'"
        )
    is_outside = tokens >= tokenizer.vocab_size
    if is_outside.any() and (data.bad_rows == "refuse" or is_outside.mean() > _MOST_BAD_IDS):
        rule = f"not below model.vocab_size = {tokenizer.vocab_size}; increase it, or correct data.token_dtype"
        if data.tokenizer:
            rule = (
                f"but data.tokenizer = {data.tokenizer!r} has only ids below {tokenizer.vocab_size}; correct "
                "data.token_dtype, give the folder of the tokenizer that made the file, or set data.tokenizer to '' if "
                "it is unknown"
            )
        found = f"{file} contains the id {tokens.max()} when read as data.token_dtype = {data.token_dtype!r}"
        raise ValueError(f"data.path: {found}, {rule}")


def _find_document_ends(parts: list[TokenFile], end_of_document: int | None) -> Iterator[np.ndarray]:
    start = 0
    for part in parts:
        for offset in range(0, len(part) if end_of_document is not None else 0, _SCAN_TOKENS):
            yield np.flatnonzero(part[offset : offset + _SCAN_TOKENS] == end_of_document) + (start + offset + 1)
        start += len(part)
        if part[-1:][0] != end_of_document:
            yield np.array([start])
