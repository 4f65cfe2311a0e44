"""Tokens on disk with the ends of their documents, and the samples cut from them."""

import os
from array import array
from collections.abc import Iterable, Sequence
from pathlib import Path

import numpy as np

from titan_moe.data.packing import Sample

TOKENS_FILE = "tokens.bin"
DOCUMENTS_FILE = "documents.idx"


class Corpus:
    """One long run of tokens, memory-mapped from one or more files, with where each document ends.

    `document_ends[i]` is the position after the last token of document i, its end-of-document token included.
    """

    def __init__(self, parts: Sequence[np.ndarray], document_ends: np.ndarray, vocab_size: int) -> None:
        self.document_ends = document_ends
        self._parts = parts
        self._part_ends = np.cumsum([len(part) for part in parts])
        self._vocab_size = vocab_size

    @property
    def num_tokens(self) -> int:
        return int(self._part_ends[-1])

    def read(self, start: int, stop: int) -> Sample:
        """Read tokens [start, stop) across file borders, with their documents counted from 0."""
        tokens = np.concatenate([part.astype(np.int64) for part in self._pieces(start, stop)])
        if tokens.max() >= self._vocab_size:
            raise ValueError(
                f"data.path holds the token id {tokens.max()}, but data.tokenizer has ids below {self._vocab_size} "
                "only; name the folder of the tokenizer that made the files, or check data.token_dtype"
            )
        first = np.searchsorted(self.document_ends, start, side="right")
        last = np.searchsorted(self.document_ends, stop - 1, side="right")
        borders = self.document_ends[first:last]
        document_ids = np.searchsorted(borders, np.arange(start, stop), side="right").astype(np.int32)
        return Sample(tokens, document_ids)

    def _pieces(self, start: int, stop: int) -> Iterable[np.ndarray]:
        number = int(np.searchsorted(self._part_ends, start, side="right"))
        while start < stop:
            part, part_end = self._parts[number], int(self._part_ends[number])
            part_start = part_end - len(part)
            yield part[start - part_start : min(stop, part_end) - part_start]
            start, number = min(stop, part_end), number + 1


class CorpusSamples:
    """Cut [start, stop) of a corpus into samples of N + 1 tokens that share their border token.

    Sample i covers tokens [i*N, i*N + N]: every token but the first is a label exactly once. What is left at the end,
    less than one sequence, is not used.
    """

    def __init__(self, corpus: Corpus, start: int, stop: int, seq_len_tokens: int) -> None:
        self._corpus = corpus
        self._start = start
        self._seq_len_tokens = seq_len_tokens
        self._num_samples = max(0, (stop - start - 1) // seq_len_tokens)

    def __len__(self) -> int:
        return self._num_samples

    def __getitem__(self, index: int) -> Sample:
        if not 0 <= index < self._num_samples:
            raise IndexError(f"sample {index} of {self._num_samples}")
        start = self._start + index * self._seq_len_tokens
        return self._corpus.read(start, start + self._seq_len_tokens + 1)


def split_holdout(corpus: Corpus, holdout_fraction: float, seq_len_tokens: int) -> tuple[CorpusSamples, CorpusSamples]:
    """Part the corpus into training samples and held-out ones: the last documents, whole, at least one of them.

    Raises: ValueError where no document, or less than one sequence, is left for training.
    """
    border = _holdout_border(corpus, holdout_fraction)
    training = CorpusSamples(corpus, 0, border, seq_len_tokens)
    if len(training) == 0:
        raise ValueError(
            f"data.path gives {border} training tokens, fewer than one sequence needs: train.seq_len_tokens + 1 = "
            f"{seq_len_tokens + 1}; add files or shorten train.seq_len_tokens"
        )
    return training, CorpusSamples(corpus, border, corpus.num_tokens, seq_len_tokens)


def _holdout_border(corpus: Corpus, holdout_fraction: float) -> int:
    if holdout_fraction <= 0:
        return corpus.num_tokens
    num_documents = len(corpus.document_ends)
    num_held_out = max(1, round(holdout_fraction * num_documents))
    if num_held_out >= num_documents:
        raise ValueError(
            f"data.holdout_fraction = {holdout_fraction} holds out {num_held_out} of {num_documents} documents "
            "and leaves none for training; lower it, add documents, or set it to 0"
        )
    return int(corpus.document_ends[num_documents - num_held_out - 1])


def write_corpus(folder: Path, documents: Iterable[np.ndarray], dtype: np.dtype) -> None:
    """Write tokenised documents one after another, and where they end; documents without a token leave no trace."""
    ends = array("q")
    num_tokens = 0
    with open(folder / TOKENS_FILE, "wb") as file:
        for document in documents:
            if len(document) > 0:
                file.write(document.astype(dtype).tobytes())
                num_tokens += len(document)
                ends.append(num_tokens)
        file.flush()
        os.fsync(file.fileno())
    write_document_ends(folder, np.frombuffer(ends, dtype=np.int64))


def write_document_ends(folder: Path, ends: np.ndarray) -> None:
    """Write where documents end, as a .npy file that can be memory-mapped."""
    with open(folder / DOCUMENTS_FILE, "wb") as file:
        np.save(file, ends, allow_pickle=False)
        file.flush()
        os.fsync(file.fileno())


def open_corpus(folder: Path, dtype: np.dtype, vocab_size: int) -> Corpus:
    """Map what `write_corpus` wrote.

    Raises: ValueError where there is no token in it.
    """
    document_ends = open_document_ends(folder)
    if len(document_ends) == 0:
        raise ValueError("data.path gives no token: every document is empty; name files or a column that hold text")
    return Corpus([np.memmap(folder / TOKENS_FILE, dtype=dtype, mode="r")], document_ends, vocab_size)


def open_document_ends(folder: Path) -> np.ndarray:
    """Map what `write_document_ends` wrote."""
    return np.load(folder / DOCUMENTS_FILE, mmap_mode="r", allow_pickle=False)
