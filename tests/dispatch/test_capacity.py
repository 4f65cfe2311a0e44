"""Expert capacity: number of slots, bounds, the overflow flag."""

import copy
import gc

import pytest
import torch
from torch._dynamo.testing import CompileCounter

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


@pytest.mark.parametrize(("layer_factor", "number"), [(0.0, 1), (2.0, 2)])
def test_compiled_sizes_of_an_arena_ask_for_a_lifted_bound_only_of_bounded_layers(
    layer_factor: float, number: int
) -> None:
    capacity, counter = with_bounded_layers(layer_factor), CompileCounter()
    permute = torch.compile(lambda ids: ids + capacity.num_slots(ids, 200, 1600), fullgraph=True, backend=counter)
    permute(IDS_SK)
    with capacity.unbounded():
        permute(IDS_SK)
    assert counter.frame_count == number


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


def with_bounded_layers(factor: float) -> ExpertCapacity:
    """Of an arena, in which a balanced layer has 100 rows and 200 slots."""
    capacity = ExpertCapacity(1.5, layer_factor=factor)
    capacity.use_arena(Arena(8, 4, torch.float32, "cpu"), LayerLoads(4, 100.0, 200, 256, 1600))
    return capacity


def test_layers_of_an_arena_have_their_own_bound_up_to_the_worst_case() -> None:
    capacity = with_bounded_layers(2.0)
    assert capacity.num_rows(expected=100, worst=256) == 256 and capacity.num_rows(expected=200, worst=1600) == 512
    assert capacity.loads == LayerLoads(4, 100.0, 200, 256, 512) and capacity.arena.room == (600, 1200)
    assert capacity.is_bounded and capacity.sizes == (0, False)
    capacity.resize(0.0)
    assert capacity.arena.room == (256, 512), "one layer of its bound"
    assert capacity.is_bounded, "a layer may still overflow"
    with capacity.unbounded():
        assert not capacity.is_bounded and capacity.sizes == (0, True) and capacity.arena.backward_recomputes
        assert capacity.num_rows(expected=200, worst=1600) == 1600
    capacity.resize_layers(8.0)
    assert capacity.layer_factor == 0 and not capacity.is_bounded and capacity.sizes == (1, False), "the worst case"
    assert capacity.num_rows(expected=200, worst=1600) == 1600


def test_pieces_have_room_within_the_bound_of_a_layer() -> None:
    capacity = with_bounded_layers(2.0)
    sizes = (100.0, 256), (200, 1600)
    assert capacity.tokens_at_a_time(64, *sizes) == 64, "all while layers are bounded"
    with capacity.unbounded():
        assert capacity.tokens_at_a_time(64, *sizes) == 16 and 16 * 1600 // 64 <= 512
        assert capacity.tokens_at_a_time(0, *sizes) == 0
        assert capacity.tokens_at_a_time(10, *sizes) == 3, "four pieces, the last of one token"
        assert capacity.tokens_at_a_time(1, *sizes) == 1
    without = with_bounded_layers(0.0)
    with without.unbounded():
        assert without.tokens_at_a_time(64, *sizes) == 64 and without.sizes == (0, False)


def test_the_overflow_of_a_layer_of_an_arena_is_recorded_unless_its_bound_is_lifted() -> None:
    capacity = with_bounded_layers(2.0)
    with capacity.unbounded():
        capacity.record_load(torch.tensor(900), 200, torch.tensor(1))
    assert not bool(capacity.invalidates_step)
    capacity.record_load(torch.tensor(512), 200, torch.tensor(1))
    capacity.record_load(torch.tensor(9), 200, torch.tensor(0))
    assert bool(capacity.invalidates_step) and bool(capacity.layer_overflowed)
    assert float(capacity.needed_factor()) == 0, "the need is that of all layers"
    other = ExpertCapacity(1.5)
    other.record_load(torch.tensor(900), 200, torch.tensor(1))
    assert bool(other.overflowed) and not bool(other.layer_overflowed), "there is no arena"


def test_recompute_of_blocks_leaves_the_bound_of_a_layer() -> None:
    capacity, arena = ExpertCapacity(1.5, layer_factor=2.0), Arena(8, 4, torch.float32, "cpu", is_checkpointed=True)
    capacity.use_arena(arena, LayerLoads(4, 100.0, 200, 256, 1600))
    assert arena.room == (256, 512) and capacity.is_bounded and not capacity.bounds_all_layers
    assert not arena.backward_recomputes, "a recomputed forward precedes each backward"
    with capacity.unbounded():
        assert arena.backward_recomputes, "the last piece of a layer has overwritten the others"
    assert not arena.backward_recomputes


def test_a_handle_finds_its_arena_as_long_as_it_lives() -> None:
    arena = Arena(8, 4, torch.float32, "cpu")
    assert Arena.of(arena.handle) is arena and Arena.of(0) is None and copy.deepcopy(arena) is arena
    handle = arena.handle
    del arena
    gc.collect()
    with pytest.raises(KeyError):
        Arena.of(handle)
