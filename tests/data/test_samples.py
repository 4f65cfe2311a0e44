"""Epochs of samples: each sample once an epoch, in an order that differs by epoch."""

import numpy as np
import pytest

from titan_moe.data.sample import Sample
from titan_moe.data.samples import EpochSamples


class _Numbered:
    def __len__(self) -> int:
        return 11

    def __getitem__(self, index: int) -> Sample:
        return Sample(np.array([index]), np.zeros(1, dtype=np.int32))


def _take(samples: EpochSamples, first: int, count: int) -> list[int]:
    return [int(sample.tokens[0]) for sample in samples.take(first, count, range(count))]


def test_epoch_samples_visit_each_once_in_another_order() -> None:
    order = _take(EpochSamples(_Numbered(), seed=4, is_shuffled=True), 0, 33)
    epochs = [order[:11], order[11:22], order[22:]]
    assert all(sorted(epoch) == list(range(11)) for epoch in epochs)
    assert len({tuple(epoch) for epoch in epochs}) == 3
    assert order != _take(EpochSamples(_Numbered(), seed=5, is_shuffled=True), 0, 33)


def test_epoch_samples_order_is_independent_of_step_size() -> None:
    samples = EpochSamples(_Numbered(), seed=4, is_shuffled=True)
    assert _take(samples, 0, 30) == _take(samples, 0, 7) + _take(samples, 7, 23)
    mine = samples.take(5, 10, range(3, 6))
    assert [int(sample.tokens[0]) for sample in mine] == _take(samples, 8, 3)


def test_epoch_samples_unshuffled_keep_the_corpus_order() -> None:
    assert _take(EpochSamples(_Numbered(), seed=4, is_shuffled=False), 9, 4) == [9, 10, 0, 1]


def test_epoch_samples_refuse_the_state_of_a_stream() -> None:
    with pytest.raises(ValueError, match="data.is_streamed"):
        EpochSamples(_Numbered(), seed=4, is_shuffled=True).load_state("{}")
