"""Pack whole conversations into sequences of a fixed length."""

from bisect import bisect_left, insort
from collections.abc import Iterator, Sequence

import numpy as np

from titan_moe.data.sample import Sample

WINDOW_SEQUENCES = 64
"""Conversations of so many sequences are packed together: little is left of each, and a stream is read only so far
ahead."""


def windows(lengths: np.ndarray, window_tokens: int) -> Iterator[tuple[int, int]]:
    """Divide conversations into windows of at least so many tokens: [first, last) of each, in order."""
    ends, first = np.cumsum(lengths), 0
    while first < len(lengths):
        start = int(ends[first - 1]) if first else 0
        last = int(np.searchsorted(ends, start + window_tokens)) + 1
        yield first, min(last, len(lengths))
        first = last


def assign(lengths: Sequence[int], max_tokens: int) -> list[list[int]]:
    """Assign conversations to sequences, none divided: the longest first, each to the fullest sequence that it fits
    (best fit decreasing, as in arXiv:2107.02027).

    Returns the conversations of each sequence; both are in the order of the first conversation.
    """
    sequences: list[list[int]] = []
    free: list[tuple[int, int]] = []  # (tokens left, sequence), sorted
    for number in sorted(range(len(lengths)), key=lambda number: -lengths[number]):
        at = bisect_left(free, (lengths[number], -1))
        left, sequence = free.pop(at) if at < len(free) else (max_tokens, len(sequences))
        if sequence == len(sequences):
            sequences.append([])
        sequences[sequence].append(number)
        if left > lengths[number]:
            insort(free, (left - lengths[number], sequence))
    return sorted(sorted(sequence) for sequence in sequences)


def fill(conversations: Sequence[np.ndarray], num_tokens: int) -> Sample:
    """Put the codes of conversations into one sample.

    The rest is one more document, without labels, of tokens from the start of the sample. Equal padding tokens would
    all be sent to the same experts.
    """
    codes = np.concatenate(conversations).astype(np.int64)
    padding = np.resize(codes & ~1, num_tokens - len(codes))
    lengths = [*map(len, conversations), len(padding)]
    codes = np.concatenate([codes, padding])
    document_ids = np.repeat(np.arange(len(lengths), dtype=np.int32), lengths)
    return Sample(codes >> 1, document_ids, is_learned=(codes & 1).astype(bool))
