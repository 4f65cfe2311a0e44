"""Whole conversations in sequences: none is divided or lost, and little is left."""

import numpy as np
import pytest

from titan_moe.data.chat.whole import assign, fill, windows
from titan_moe.data.packing import IGNORE_LABEL, pack


def codes(*marked: tuple[int, int]) -> np.ndarray:
    return np.array([id << 1 | is_learned for id, is_learned in marked], dtype="<u4")


@pytest.mark.parametrize("seed", range(3))
def test_every_conversation_is_in_one_sequence(seed: int) -> None:
    lengths = np.random.default_rng(seed).integers(1, 60, 500)
    sequences = assign(lengths.tolist(), 100)
    assert sorted(number for sequence in sequences for number in sequence) == list(range(500))
    sizes = [int(lengths[sequence].sum()) for sequence in sequences]
    assert max(sizes) <= 100 and np.mean(sizes) > 97
    assert sequences == sorted(sorted(sequence) for sequence in sequences)


def test_best_fit_takes_the_fullest_sequence() -> None:
    assert assign([5, 3, 2, 7, 10], 10) == [[0, 2], [1, 3], [4]]
    assert assign([10, 10], 10) == [[0], [1]]
    assert assign([], 10) == []


def test_windows_have_at_least_so_many_tokens() -> None:
    assert list(windows(np.array([4, 4, 4, 9, 1, 1]), 8)) == [(0, 2), (2, 4), (4, 6)]
    assert list(windows(np.array([], dtype=np.int64), 8)) == []


def test_a_sequence_is_filled_with_its_own_tokens_without_labels() -> None:
    sample = fill([codes((5, 0), (6, 1)), codes((7, 1), (8, 1), (9, 0))], 8)
    assert sample.tokens.tolist() == [5, 6, 7, 8, 9, 5, 6, 7]
    assert sample.document_ids.tolist() == [0, 0, 1, 1, 1, 2, 2, 2]
    batch = pack([sample], 1, has_document_attention=True)
    none = IGNORE_LABEL
    assert batch.labels_MBN.tolist() == [[[6, none, 8, none, none, none, none]]]  # 7 begins a conversation
    assert fill([codes((5, 1), (6, 1))], 2).document_ids.tolist() == [0, 0]
    assert fill([codes((5, 1))], 4).tokens.tolist() == [5, 5, 5, 5]
