"""Batch sizes that grow, against a loop over steps."""

import pytest

from titan_moe.config.batch_schedule import BatchPhase, BatchSizes
from titan_moe.config.run_length import known_steps
from titan_moe.config.train import TrainConfig

SIZES = BatchSizes((BatchPhase(100, 2), BatchPhase(130, 3), BatchPhase(131, 4), BatchPhase(1000, 5)), 8, 7)


def by_hand(steps: int) -> list[int]:
    read, sizes = 0, []
    for _ in range(steps):
        sizes.append(next((p.global_batch_sequences for p in SIZES.phases if read * 7 < p.until_tokens), 8))
        read += sizes[-1]
    return sizes


def test_sizes_follow_from_what_was_read() -> None:
    sizes = by_hand(50)
    assert set(sizes) == {2, 3, 5, 8}, "a phase may be passed over"
    for step, size in enumerate(sizes):
        assert SIZES.next(sum(sizes[:step])) == size
        assert SIZES.total(step) == sum(sizes[:step])
        assert SIZES.steps(sum(sizes[:step])) == SIZES.steps(7 * sum(sizes[:step]), 7) == step


@pytest.mark.parametrize("tokens", [1, 4000, 6143, 6144, 6145, 10**6])
def test_a_run_without_phases_has_the_steps_of_before(tokens: int) -> None:
    train = TrainConfig(tokens=tokens, seq_len_tokens=256)
    assert known_steps(train) == max(int(tokens / (8 * 256) + 0.5), 1)
    assert known_steps(TrainConfig(epochs=1.5), 123) == int(1.5 * 123 / 8 + 0.5)
