"""How many slots are laid out, and when a step must be looked at."""

import torch

from titan_moe.dispatch.bound import SlotBound

IDS_SK = torch.tensor([[0, 3], [-1, 2], [-1, -1]])


def test_without_a_factor_the_worst_case_is_laid_out() -> None:
    bound = SlotBound()
    assert bound.num_slots(IDS_SK, balanced=1000, worst=8000) == 8000 and not bound.can_overflow


def test_a_factor_bounds_in_whole_tiles_and_never_above_the_worst() -> None:
    bound = SlotBound(1.5)
    assert bound.can_overflow
    assert bound.num_slots(IDS_SK, balanced=1000, worst=8000) == 1536
    assert bound.num_slots(IDS_SK, balanced=100, worst=128) == 128
    assert bound.num_slots(IDS_SK, balanced=10, worst=20) == 20


def test_lifted_for_a_while() -> None:
    bound = SlotBound(1.5)
    with bound.lifted():
        assert bound.num_slots(IDS_SK, balanced=1000, worst=8000) == 3 and not bound.can_overflow, "those there are"
        assert bound.num_rows(expected=1000, worst=8000) == 8000
        with bound.lifted():
            pass
        assert not bound.can_overflow
    assert bound.can_overflow


def test_a_graph_of_a_compiler_asks_nothing_of_the_device() -> None:
    bound = SlotBound(1.5)
    lay_out = torch.compile(
        lambda ids: ids.new_empty(bound.num_slots(ids, 1000, 8000)), fullgraph=True, backend="eager"
    )
    with bound.lifted():
        assert len(lay_out(IDS_SK)) == 8000


def test_one_layer_that_overflows_is_enough() -> None:
    bound = SlotBound(1.5)
    for overflowed in (False, True, False):
        bound.book(torch.tensor(overflowed))
    assert bool(bound.overflowed)
    bound.reset()
    assert not bool(bound.overflowed)
