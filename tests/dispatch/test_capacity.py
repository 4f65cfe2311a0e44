"""Expert capacity: number of slots, bounds, the overflow flag."""

import torch

from titan_moe.dispatch.capacity import ExpertCapacity

IDS_SK = torch.tensor([[0, 3], [-1, 2], [-1, -1]])


def test_capacity_without_factor_is_worst_case() -> None:
    capacity = ExpertCapacity()
    assert capacity.num_slots(IDS_SK, balanced=1000, worst=8000) == 8000 and not capacity.is_bounded


def test_capacity_is_a_multiple_of_tiles_up_to_worst_case() -> None:
    capacity = ExpertCapacity(1.5)
    assert capacity.is_bounded
    assert capacity.num_slots(IDS_SK, balanced=1000, worst=8000) == 1536
    assert capacity.num_slots(IDS_SK, balanced=100, worst=128) == 128
    assert capacity.num_slots(IDS_SK, balanced=10, worst=20) == 20


def test_unbounded_capacity_is_exact() -> None:
    capacity = ExpertCapacity(1.5)
    with capacity.unbounded():
        assert capacity.num_slots(IDS_SK, balanced=1000, worst=8000) == 3 and not capacity.is_bounded, (
            "the exact number"
        )
        assert capacity.num_rows(expected=1000, worst=8000) == 8000
        with capacity.unbounded():
            pass
        assert not capacity.is_bounded
    assert capacity.is_bounded


def test_unbounded_capacity_reads_nothing_under_compile() -> None:
    capacity = ExpertCapacity(1.5)
    permute = torch.compile(
        lambda ids: ids.new_empty(capacity.num_slots(ids, 1000, 8000)), fullgraph=True, backend="eager"
    )
    with capacity.unbounded():
        assert len(permute(IDS_SK)) == 8000


def test_overflow_of_one_layer_is_recorded_until_reset() -> None:
    capacity = ExpertCapacity(1.5)
    for overflowed in (False, True, False):
        capacity.record_overflow(torch.tensor(overflowed))
    assert bool(capacity.overflowed)
    capacity.reset()
    assert not bool(capacity.overflowed)
