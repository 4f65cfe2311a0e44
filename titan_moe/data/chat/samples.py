"""Conversations on the disk, packed whole into samples."""

import json
import logging
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from titan_moe.data.chat.encoder import DTYPE, Counts
from titan_moe.data.chat.whole import WINDOW_SEQUENCES, assign, fill, windows
from titan_moe.data.checked_file import CheckedFile, CheckedWriter
from titan_moe.data.corpus import Corpus, open_corpus, write_corpus
from titan_moe.data.sample import Sample

COUNTS_FILE = "counts.json"

logger = logging.getLogger(__name__)


class WholeSamples:
    """Samples of N + 1 tokens with the conversations [first, last) of a corpus, none divided."""

    def __init__(self, corpus: Corpus, first: int, last: int, num_tokens: int) -> None:
        self._corpus, self._num_tokens = corpus, num_tokens
        lengths = np.diff(corpus.document_ends[first:last], prepend=_start(corpus, first))
        order: list[int] = []
        ends: list[int] = []
        for start, stop in windows(lengths, WINDOW_SEQUENCES * num_tokens):
            for sequence in assign(lengths[start:stop].tolist(), num_tokens):
                order += [first + start + number for number in sequence]
                ends.append(len(order))
        self._order, self._ends = np.array(order, dtype=np.int64), np.array([0, *ends], dtype=np.int64)
        self.num_tokens = int(lengths.sum())

    def __len__(self) -> int:
        return len(self._ends) - 1

    def __getitem__(self, index: int) -> Sample:
        if not 0 <= index < len(self):
            raise IndexError(f"sample {index} of {len(self)}")
        numbers = self._order[self._ends[index] : self._ends[index + 1]].tolist()
        return fill([self._read(number) for number in numbers], self._num_tokens)

    def _read(self, number: int) -> np.ndarray:
        return self._corpus.read(_start(self._corpus, number), int(self._corpus.document_ends[number])).tokens


def split_conversations(
    corpus: Corpus, holdout_fraction: float, seq_len_tokens: int
) -> tuple[WholeSamples, WholeSamples]:
    """Pack training and held-out conversations into samples. The last ones are held out, at least one.

    Raises: ValueError if none is left for training.
    """
    total, num_held_out = len(corpus.document_ends), 0
    if holdout_fraction > 0:
        num_held_out = max(1, round(holdout_fraction * total))
    if num_held_out >= total:
        raise ValueError(
            f"data.holdout_fraction = {holdout_fraction} holds out {num_held_out} of {total} conversations and leaves "
            "none for training; lower it, add conversations, or set it to 0"
        )
    bounds = ((0, total - num_held_out), (total - num_held_out, total))
    training, held_out = (WholeSamples(corpus, *bound, seq_len_tokens + 1) for bound in bounds)
    share = 100 * training.num_tokens / (len(training) * (seq_len_tokens + 1))
    logger.info("%d sequences an epoch, %.1f %% of them conversations", len(training), share)
    return training, held_out


def write_conversations(folder: Path, conversations: Iterator[np.ndarray], counts: Counts) -> None:
    """Write codes as a corpus, and `counts` as they are at its end."""
    write_corpus(folder, conversations, DTYPE)
    with CheckedWriter(folder / COUNTS_FILE) as file:
        file.write(counts.to_json().encode())


def open_conversations(folder: Path, vocab_size: int) -> tuple[Corpus, Counts]:
    """Open the files of `write_conversations`.

    Raises: ValueError if there is no conversation; DamagedFileError for a damaged file.
    """
    file = CheckedFile(folder / COUNTS_FILE)
    counts = Counts(**json.loads(file.read(0, file.num_bytes)))
    if counts.conversations == counts.num_too_long == 0:
        raise ValueError("data.path gives no conversation: it has no rows, or all of them are bad; give more rows")
    if counts.conversations == 0:
        raise ValueError(
            f"data.path gives no conversation to learn from: {counts.describe()}; give more rows, raise "
            'train.seq_len_tokens, or set data.chat.too_long = "cut"'
        )
    return open_corpus(folder, DTYPE, 2 * vocab_size), counts


def _start(corpus: Corpus, number: int) -> int:
    return int(corpus.document_ends[number - 1]) if number else 0
