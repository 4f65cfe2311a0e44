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
    arena.resize(*room)
    arena.keeps = keeps
    expected, need, overflowed = take_reference(sizes, room, keeps)
    for repeats in (1, 2):  # a second microbatch takes the same
        arena.start_forward()
        taken = []
        for rows, slots in sizes:
            last = torch.tensor([0, rows, slots], dtype=torch.int32, device=device)
            *place, number = arena.take(last[1:2], last[2:]).tolist()
            assert number == repeats
            taken.append(tuple(place))
        assert taken == expected and bool(arena.overflowed) == overflowed
        assert tuple(arena.need.tolist()) == need, repeats
    arena.reset()
    assert not bool(arena.overflowed) and arena.need.tolist() == [0, 0]


@pytest.mark.parametrize("keeps", [True, False])
@pytest.mark.parametrize("device", DEVICES)
def test_a_forward_that_another_has_overwritten_voids_the_step(device: str, keeps: bool) -> None:
    arena = Arena(2, 2, torch.float32, device)
    arena.resize(10, 10)
    arena.keeps = keeps
    one = torch.ones(1, dtype=torch.int32, device=device)
    arena.start_forward()
    base = arena.take(one, one)
    arena.verify(base)
    assert not bool(arena.overflowed)
    arena.start_forward()  # of a teacher, say, before the first one's backward
    arena.verify(base)
    assert bool(arena.overflowed) == keeps, "without keeping, backward computes its rows again"
