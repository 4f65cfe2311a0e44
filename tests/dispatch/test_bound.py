"""How many slots are laid out, and when a step must be looked at."""

import torch

from titan_moe.dispatch.bound import SlotBound


def test_without_a_factor_the_worst_case_is_laid_out() -> None:
    bound = SlotBound()
    assert bound.num_slots(balanced=1000, worst=8000) == 8000 and not bound.can_overflow


def test_a_factor_bounds_in_whole_tiles_and_never_above_the_worst() -> None:
    bound = SlotBound(1.5)
    assert bound.can_overflow
    assert bound.num_slots(balanced=1000, worst=8000) == 1536
    assert bound.num_slots(balanced=100, worst=128) == 128
    assert bound.num_slots(balanced=10, worst=20) == 20


def test_lifted_for_a_while() -> None:
    bound = SlotBound(1.5)
    with bound.lifted():
        assert bound.num_slots(balanced=1000, worst=8000) == 8000 and not bound.can_overflow
        with bound.lifted():
            pass
        assert not bound.can_overflow
    assert bound.can_overflow


def test_one_layer_that_overflows_is_enough() -> None:
    bound = SlotBound(1.5)
    for overflowed in (False, True, False):
        bound.book(torch.tensor(overflowed))
    assert bool(bound.overflowed)
    bound.reset()
    assert not bool(bound.overflowed)
