"""The arena hands out rows and slots layer by layer, as its reference does."""

import pytest
import torch

from titan_moe.kernels.experts.arena import Arena, take_reference

DEVICES = [pytest.param("cpu", marks=pytest.mark.interpreted), pytest.param("cuda", marks=pytest.mark.gpu)]
CASES = {
    "fits": [(3, 5), (0, 0), (4, 2)],
    "fits exactly": [(6, 4), (4, 8)],
    "rows overflow": [(6, 1), (5, 1), (2, 1)],
    "slots overflow": [(1, 7), (1, 6), (1, 1)],
}


@pytest.mark.parametrize("keeps", [True, False])
@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("device", DEVICES)
def test_arena_takes_as_the_reference(device: str, name: str, keeps: bool) -> None:
    sizes, room = CASES[name], (10, 12)
    arena = Arena(2, 2, torch.float32, device)
    arena.keeps = keeps
    arena.resize(*room)
    expected, need, overflowed = take_reference(sizes, room, keeps)
    for repeats in (1, 2):  # a second microbatch takes the same
        arena.start_forward()
        taken = []
        for rows, slots in sizes:
            *base, number, _ = take(arena, rows, slots)
            assert number == repeats
            taken.append(tuple(base))
        assert taken == expected and bool(arena.overflowed) == overflowed
        assert tuple(arena.need.tolist()) == need, repeats
    arena.reset()
    assert not bool(arena.overflowed) and arena.need.tolist() == [0, 0]


def take(arena: Arena, rows: int, slots: int, *, keeps_slots: bool = True) -> list[int]:
    last = torch.tensor([0, rows, slots], dtype=torch.int32, device=arena.need.device)
    return arena.take(last[1:2], last[2:], keeps_slots=keeps_slots).tolist()


@pytest.mark.parametrize("device", DEVICES)
def test_layers_without_hidden_states_take_rows_alone(device: str) -> None:
    """Among layers with them, in any slab; their slots are in memory of their own, from 0 on."""
    arena = Arena(2, 2, torch.float32, device, num_slabs=2)
    arena.resize(10, 12)
    for slab in (1, 0):
        arena.start_forward(slab)
        ways = [True, False, True, False]
        taken = [take(arena, 2, 5, keeps_slots=keeps)[:2] for keeps in ways]
        rows, slots = 10 * slab, 12 * slab
        assert taken == [[rows, slots], [rows + 2, 0], [rows + 4, slots + 5], [rows + 6, 0]]
        assert arena.need.tolist() == [8, 10] and not bool(arena.overflowed)
        assert (bases := take_reference([(2, 5)] * 4, (10, 0), True, slab, keeps_slots=False)[0])[3] == (rows + 6, 0)
        assert all(row == other for (row, _), (other, _) in zip(taken, bases, strict=True))
    assert take(arena, 3, 99, keeps_slots=False)[:2] == [0, 0] and bool(arena.overflowed), "rows that do not fit"


@pytest.mark.parametrize("keeps", [True, False])
@pytest.mark.parametrize("device", DEVICES)
def test_slabs_take_as_the_reference_and_do_not_overlap(device: str, keeps: bool) -> None:
    num_slabs, room, names = 3, (10, 12), list(CASES)
    arena = Arena(2, 2, torch.float32, device, num_slabs=num_slabs)
    arena.keeps = keeps
    arena.resize(*room)
    assert (len(arena.rows_AW), len(arena.hidden_BH)) == ((30, 36) if keeps else room), "one slab where nothing is kept"
    largest, has_overflowed = (0, 0), False
    for turn, slab in enumerate([0, 2, 1, 2, 0, 2]):
        sizes = CASES[names[turn % len(names)]]
        expected, need, overflowed = take_reference(sizes, room, keeps, slab)
        has_overflowed |= overflowed
        largest = tuple(map(max, need, largest))
        arena.start_forward(slab)
        for (rows, slots), (row, slot) in zip(sizes, expected, strict=True):
            assert take(arena, rows, slots)[:2] == [row, slot], (turn, slab)
            if keeps:
                assert slab * 10 <= row <= row + rows <= (slab + 1) * 10 or overflowed
                assert slab * 12 <= slot <= slot + slots <= (slab + 1) * 12 or overflowed
        assert bool(arena.overflowed) == has_overflowed
        assert tuple(arena.need.tolist()) == largest, "of a slab"
    with pytest.raises(IndexError):
        arena.start_forward(num_slabs)


@pytest.mark.parametrize("keeps", [True, False])
@pytest.mark.parametrize("device", DEVICES)
def test_a_forward_that_another_has_overwritten_voids_the_step(device: str, keeps: bool) -> None:
    arena = Arena(2, 2, torch.float32, device)
    arena.keeps = keeps
    arena.resize(10, 10)
    one = torch.ones(1, dtype=torch.int32, device=device)
    arena.start_forward()
    base = arena.take(one, one)
    arena.verify(base)
    assert not bool(arena.overflowed)
    arena.start_forward()  # of a teacher, say, before the first one's backward
    arena.verify(base)
    assert bool(arena.overflowed) == keeps, "without keeping, backward computes its rows again"


@pytest.mark.parametrize("device", DEVICES)
def test_a_forward_in_a_slab_in_use_voids_the_step(device: str) -> None:
    arena = Arena(2, 2, torch.float32, device, num_slabs=2)
    arena.resize(10, 10)
    one = torch.ones(1, dtype=torch.int32, device=device)
    bases = []
    for slab in (0, 1):
        arena.start_forward(slab)
        bases.append(arena.take(one, one))
    for base in bases:  # both are in flight
        arena.verify(base)
    assert not bool(arena.overflowed)
    arena.start_forward(1)  # a third
    arena.verify(bases[0])
    assert not bool(arena.overflowed), "its slab was left alone"
    arena.verify(bases[1])
    assert bool(arena.overflowed)


@pytest.mark.parametrize("device", DEVICES)
def test_delayed_slabs_follow_the_layers_of_a_slab(device: str) -> None:
    arena = Arena(2, 2, torch.float32, device, num_slabs=3, num_delayed_slabs=2)
    arena.resize(10, 12)
    assert (len(arena.dy_CW), len(arena.dactive_GF)) == (20, 24) and arena.dactive_GF.shape[1] == 2
    for slab, delayed_slab in ((2, 0), (0, 1), (1, 1)):
        arena.start_forward(slab)
        last = torch.tensor([3, 5], dtype=torch.int32, device=device)
        for first in ((0, 0), (3, 5), (6, 0)):  # the third does not fit
            base = arena.take(last[:1], last[1:])
            arena.delayed_slab = delayed_slab
            row, slot = (0, 0) if first == (6, 0) else first
            assert base.tolist()[:2] == [10 * slab + row, 12 * slab + slot]
            assert arena.delay(base).tolist() == [10 * delayed_slab + row, 12 * delayed_slab + slot]
