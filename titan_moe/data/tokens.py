"""Pre-tokenised corpora: flat binary files of token ids."""

from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np

from titan_moe.config.data_files import find_files
from titan_moe.config.train import DataConfig
from titan_moe.data.bad_rows import BadRows
from titan_moe.data.cache import Cache
from titan_moe.data.content import describe_files
from titan_moe.data.corpus import Corpus, open_document_ends, write_document_ends
from titan_moe.data.megatron_index import MegatronIndex
from titan_moe.data.token_file import OpenFiles, TokenFile
from titan_moe.data.token_layout import PROBE_TOKENS, TokenLayout, leave_out_indexes, read_layout
from titan_moe.data.tokenizer import Tokenizer

_MOST_BAD_IDS = 0.5
"""A file with a larger share of ids outside the vocabulary is of another tokenizer: not skipped as bad rows."""
_SCAN_TOKENS = 1 << 24


def open_token_files(
    data: DataConfig,
    tokenizer: Tokenizer,
    cache: Cache,
    bad_rows: BadRows | None = None,
    found: Sequence[Path] = (),
) -> Corpus:
    """Open the files of `data.path`, or those found there, as one corpus, in sorted order.

    A document ends after the tokenizer's end-of-document id and at the end of its file, or where Megatron's index of
    the file says. The ends are needed only for document attention and for a holdout; finding them reads every byte
    once, or the index, and the result is cached.

    Raises: FileNotFoundError if no file matches; ValueError for files of another dtype or vocabulary.
    """
    files = leave_out_indexes([*found] or find_files(data.path, "data.path", "*.bin"))
    layouts, open_files = [read_layout(file, data) for file in files], OpenFiles()
    parts = [
        TokenFile(file, layout.dtype, layout.offset_bytes, layout.num_tokens, open_files)
        for file, layout in zip(files, layouts, strict=True)
    ]
    for part, layout in zip(parts, layouts, strict=True):
        _check_vocabulary(part, layout, data, tokenizer)
    if not (data.document_attention or data.holdout_fraction > 0):
        ends = np.cumsum([len(part) for part in parts])
        return Corpus(parts, ends, tokenizer.vocab_size, bad_rows=bad_rows, knows_documents=False)
    indexes = [layout.megatron_index.path for layout in layouts if layout.megatron_index]
    where = [(layout.dtype.str, layout.offset_bytes) for layout in layouts]
    key = [describe_files(files), where, describe_files(indexes), tokenizer.end_of_document]

    def build(folder: Path) -> None:
        ends = _find_document_ends(parts, [layout.megatron_index for layout in layouts], tokenizer.end_of_document)
        write_document_ends(folder, np.concatenate(list(ends)))

    document_ends = cache.get("tokens", key, build, open_document_ends)
    return Corpus(parts, document_ends, tokenizer.vocab_size, bad_rows=bad_rows, has_indexes=bool(indexes))


def _check_vocabulary(tokens: TokenFile, layout: TokenLayout, data: DataConfig, tokenizer: Tokenizer) -> None:
    """Check a file's first ids."""
    probe, is_raw = tokens[:PROBE_TOKENS], not layout.is_described
    share = float(((probe < 0) | (probe >= tokenizer.vocab_size)).mean())
    if share <= (_MOST_BAD_IDS if data.bad_rows == "skip" else 0.0):
        return
    correct = ", or correct data.token_dtype" if is_raw else ""
    rule = f"not below model.vocab_size = {tokenizer.vocab_size}; increase it{correct}"
    if data.tokenizer:
        correct = "correct data.token_dtype, " if is_raw else ""
        rule = (
            f"but data.tokenizer = {data.tokenizer!r} has only ids below {tokenizer.vocab_size}; {correct}give the "
            "folder of the tokenizer that made the file, or set data.tokenizer to '' if it is unknown"
        )
    read_as = f"when read as data.token_dtype = {data.token_dtype!r}" if is_raw else f"of {layout.dtype}"
    worst = probe.min() if probe.min() < 0 else probe.max()
    raise ValueError(f"data.path: {tokens.path} contains the id {worst} {read_as}, {rule}")


def _find_document_ends(
    parts: list[TokenFile], indexes: list[MegatronIndex | None], end_of_document: int | None
) -> Iterator[np.ndarray]:
    start = 0
    for part, index in zip(parts, indexes, strict=True):
        if index is not None:
            yield index.document_ends() + start
            start += len(part)
            continue
        for offset in range(0, len(part) if end_of_document is not None else 0, _SCAN_TOKENS):
            yield np.flatnonzero(part[offset : offset + _SCAN_TOKENS] == end_of_document) + (start + offset + 1)
        start += len(part)
        if part[-1:][0] != end_of_document:
            yield np.array([start])
