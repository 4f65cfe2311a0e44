"""How many slots are laid out, and when a step must be looked at."""

import torch

from titan_moe.dispatch.capacity import ExpertCapacity

IDS_SK = torch.tensor([[0, 3], [-1, 2], [-1, -1]])


def test_without_a_factor_the_worst_case_is_laid_out() -> None:
    capacity = ExpertCapacity()
    assert capacity.num_slots(IDS_SK, balanced=1000, worst=8000) == 8000 and not capacity.is_bounded


def test_a_factor_bounds_in_whole_tiles_and_never_above_the_worst() -> None:
    capacity = ExpertCapacity(1.5)
    assert capacity.is_bounded
    assert capacity.num_slots(IDS_SK, balanced=1000, worst=8000) == 1536
    assert capacity.num_slots(IDS_SK, balanced=100, worst=128) == 128
    assert capacity.num_slots(IDS_SK, balanced=10, worst=20) == 20


def test_lifted_for_a_while() -> None:
    capacity = ExpertCapacity(1.5)
    with capacity.unbounded():
        assert capacity.num_slots(IDS_SK, balanced=1000, worst=8000) == 3 and not capacity.is_bounded, "those there are"
        assert capacity.num_rows(expected=1000, worst=8000) == 8000
        with capacity.unbounded():
            pass
        assert not capacity.is_bounded
    assert capacity.is_bounded


def test_a_graph_of_a_compiler_asks_nothing_of_the_device() -> None:
    capacity = ExpertCapacity(1.5)
    permute = torch.compile(
        lambda ids: ids.new_empty(capacity.num_slots(ids, 1000, 8000)), fullgraph=True, backend="eager"
    )
    with capacity.unbounded():
        assert len(permute(IDS_SK)) == 8000


def test_one_layer_that_overflows_is_enough() -> None:
    capacity = ExpertCapacity(1.5)
    for overflowed in (False, True, False):
        capacity.book(torch.tensor(overflowed))
    assert bool(capacity.overflowed)
    capacity.reset()
    assert not bool(capacity.overflowed)
