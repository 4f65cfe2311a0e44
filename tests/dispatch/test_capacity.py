"""Expert capacity: number of slots, bounds, the overflow flag."""

import copy
import gc

import pytest
import torch

from titan_moe.dispatch.capacity import ExpertCapacity
from titan_moe.kernels.experts.arena import Arena
from titan_moe.plan.cost.loads import LayerLoads

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


def test_lifted_capacity_is_exact() -> None:
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


def test_lifted_capacity_reads_nothing_under_compile() -> None:
    capacity = ExpertCapacity(1.5)
    permute = torch.compile(
        lambda ids: ids.new_empty(capacity.num_slots(ids, 1000, 8000)), fullgraph=True, backend="eager"
    )
    with capacity.unbounded():
        assert len(permute(IDS_SK)) == 8000


def test_overflow_and_need_of_layers_are_recorded_until_reset() -> None:
    capacity = ExpertCapacity(1.5)
    for used, overflowed in ((40, False), (150, True), (90, False)):
        capacity.record_load(torch.tensor(used), 100, torch.tensor(overflowed))
    assert bool(capacity.overflowed) and float(capacity.needed_factor()) == 1.5
    capacity.reset()
    assert not bool(capacity.overflowed) and float(capacity.needed_factor()) == 0
    with capacity.unbounded():
        capacity.record_load(torch.tensor(220), 100, torch.tensor(True))
    assert not bool(capacity.overflowed) and float(capacity.needed_factor()) == pytest.approx(2.2)


def test_room_of_an_arena_is_at_least_one_layer() -> None:
    loads = LayerLoads(4, rows=10.5, slots=20, worst_rows=16, worst_slots=80)
    assert loads.room(0.0) == (16, 80)
    assert loads.room(1.5) == (63, 120)


@pytest.mark.parametrize(
    ("number", "slots", "least"), [(None, 120, 80), (4, 120, 80), (9, 120, 80), (3, 90, 80), (1, 80, 80), (0, 0, 0)]
)
def test_room_of_an_arena_has_no_slots_for_hidden_states_that_are_not_kept(
    number: int | None, slots: int, least: int
) -> None:
    loads = LayerLoads(4, rows=10.5, slots=20, worst_rows=16, worst_slots=80, num_hidden_layers=number)
    assert loads.room(1.5) == (63, slots) and loads.room(0.0) == (16, least) and loads.room(99.0)[0] == 64
    assert loads.of_all_layers() == (42, 20 * min(4 if number is None else number, 4))


def test_layers_without_hidden_states_take_no_slots() -> None:
    capacity, arena = ExpertCapacity(1.5), Arena(8, 4, torch.float32, "cpu")
    capacity.use_arena(arena, LayerLoads(4, 10.0, 20, 16, 40, num_hidden_layers=0))
    assert (arena.rows_AW.shape, arena.hidden_BH.shape) == ((60, 8), (0, 8)) and arena.num_bytes == 4 * 8 * 60
    arena.need.copy_(torch.tensor([50, 0]))
    assert float(capacity.needed_factor()) == pytest.approx(1.25), "slots that nothing takes need no room"


def test_an_arena_is_resized_with_the_factor_and_sizes_of_layers_are_the_worst_case() -> None:
    capacity = ExpertCapacity()
    arena = Arena(8, 4, torch.float32, "cpu")
    capacity.use_arena(arena, LayerLoads(4, 10.0, 20, 16, 40))
    assert (arena.rows_AW.shape, arena.hidden_BH.shape) == ((16, 8), (40, 8))
    capacity.resize(1.5)
    assert (arena.rows_AW.shape, arena.hidden_BH.shape) == ((60, 8), (120, 8))
    assert arena.num_bytes == 4 * 8 * 180 and capacity.is_bounded
    assert capacity.num_rows(expected=10, worst=16) == 16
    arena.need.copy_(torch.tensor([50, 90]))
    assert float(capacity.needed_factor()) == pytest.approx(1.25)
    with capacity.unbounded():
        assert not capacity.is_bounded and not capacity.is_suspended and arena.backward_recomputes
    assert not arena.backward_recomputes


def test_an_arena_of_recomputed_layers_has_room_for_one() -> None:
    capacity, arena = ExpertCapacity(1.5), Arena(8, 4, torch.float32, "cpu", is_checkpointed=True)
    capacity.use_arena(arena, LayerLoads(4, 10.0, 20, 16, 40))
    assert len(arena.rows_AW) == 16 and not arena.keeps and not arena.backward_recomputes
    with capacity.unbounded():
        assert not arena.backward_recomputes
    assert not arena.keeps


def test_a_handle_finds_its_arena_as_long_as_it_lives() -> None:
    arena = Arena(8, 4, torch.float32, "cpu")
    assert Arena.of(arena.handle) is arena and Arena.of(0) is None and copy.deepcopy(arena) is arena
    handle = arena.handle
    del arena
    gc.collect()
    with pytest.raises(KeyError):
        Arena.of(handle)
