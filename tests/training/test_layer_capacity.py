"""The bound of each layer is doubled, or lifted, once layers exceed it again and again."""

import logging
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from support import load

from titan_moe.compile.cudagraph import NUM_WARM_UPS
from titan_moe.data.packing import Batch
from titan_moe.dispatch.capacity import ExpertCapacity
from titan_moe.dispatch.clones.optional import ReplicaSlots
from titan_moe.kernels.experts.arena import Arena
from titan_moe.plan.cost.loads import LayerLoads
from titan_moe.training.capacity_control import (
    MANY_OVERFLOWS,
    RESERVED_SHARE,
    WINDOW_STEPS,
    CapacityControl,
    FixedCapacity,
)
from titan_moe.training.controller import Changes
from titan_moe.training.layer_capacity import LayerCapacity, has_room
from titan_moe.training.peak_memory import PeakMemory
from titan_moe.training.step import StepResult
from titan_moe.training.step_runner import StepRunner

step_runner = load("training/test_step_runner")


def temporary_bytes(factor: float) -> int:
    return round(1000 * factor)


def follow(control: LayerCapacity, overflows: list[bool]) -> list[float | None]:
    """The factors after each step."""
    return [control.follow({"has_overflowed_layer": float(has)}).layer_factor for has in overflows]


def test_many_overflows_double_the_bound_once() -> None:
    control = LayerCapacity(2.0)
    factors = follow(control, [True] * MANY_OVERFLOWS + [False] + [True] * (MANY_OVERFLOWS - 1))
    assert factors == [2.0] * (MANY_OVERFLOWS - 1) + [4.0] * (MANY_OVERFLOWS + 1)
    assert follow(control, [True]) == [8.0]


def test_overflows_far_apart_leave_the_bound() -> None:
    seldom = ([True] * (MANY_OVERFLOWS - 1) + [False] * WINDOW_STEPS) * 3
    assert set(follow(LayerCapacity(2.0), seldom)) == {2.0}


def test_a_bound_without_room_for_more_is_lifted_and_the_run_says_so(caplog: pytest.LogCaptureFixture) -> None:
    asked: list[float] = []
    control = LayerCapacity(2.0, lambda factor: bool(asked.append(factor)))
    with caplog.at_level(logging.WARNING):
        assert follow(control, [True] * MANY_OVERFLOWS + [False] * 9)[-1] == 0.0
    assert asked == [4.0] and len(caplog.messages) == 1
    assert "no room for parallel.expert_layer_capacity_factor = 4. Steps take layers in pieces" in caplog.text
    control.load_state_dict(LayerCapacity(8.0).state_dict())
    assert control.changes.layer_factor == 0.0, "that of an earlier run is no reason for another"


@pytest.mark.parametrize(("spare", "fits"), [(1, True), (-1, False)])
def test_a_larger_bound_needs_room_for_temporaries_and_an_arena_of_one_layer(
    monkeypatch: pytest.MonkeyPatch, spare: int, fits: bool
) -> None:
    """On a GPU that has a byte more than that, or a byte less. All ranks agree."""
    arena = Arena(8, 4, torch.float32, "cpu")
    capacity = ExpertCapacity(0.0, layer_factor=2.0)
    capacity.use_arena(arena, LayerLoads(4, 128.0, 256, 1024, 8192))
    assert arena.room == (256, 512)
    of_arena, of_temporaries = 4 * (256 * 8 + 512 * 8), 2000  # twice the room of a layer
    beside, to_come, of_others = 5000, 700, 3000
    total = (arena.num_bytes + of_arena + of_temporaries + beside + to_come + of_others + spare) / (1 - RESERVED_SHARE)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda _: (total - of_others - 900, total))
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda _: 900)
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda _: arena.num_bytes + beside)
    agreed: list[object] = []
    monkeypatch.setattr(dist, "all_reduce", lambda left, op: agreed.append(op))
    memory = PeakMemory(capacity, to_come)
    assert has_room(memory, temporary_bytes, 4.0) and not agreed, "a CPU has room"
    memory.device = torch.device("cuda")
    assert has_room(memory, temporary_bytes, 4.0) == fits and agreed == [dist.ReduceOp.MIN]


def test_a_layer_that_has_no_room_leaves_the_bound_of_all_layers() -> None:
    """Unless all layers together need more, too."""
    metrics = {"has_overflowed": 1.0, "has_overflowed_layer": 1.0, "needed_factor": 1.2}
    control, fixed = CapacityControl(), FixedCapacity(1.25)
    control.factor = 1.25
    for _ in range(MANY_OVERFLOWS):
        assert control.follow(metrics).capacity_factor == 1.375, "it grows ahead, as of any need"
        fixed.follow(metrics)
    assert not control.overflows and fixed.num_reruns == 0
    assert control.follow(metrics | {"needed_factor": 1.5}).capacity_factor > 1.5 and len(control.overflows) == 1
    fixed.follow(metrics | {"needed_factor": 1.5})
    assert fixed.num_reruns == 1


@pytest.mark.parametrize("is_captured", [False, True], ids=["launched", "captured"])
@pytest.mark.parametrize("has_room", [False, True], ids=["no_room", "room"])
def test_steps_in_which_a_layer_overflows_are_taken_in_pieces_and_recorded_anew(
    is_captured: bool, has_room: bool
) -> None:
    """Until the bound is doubled, or all bounds are lifted. The bound of all layers then changes no more."""
    capacity = ExpertCapacity(1.5, layer_factor=2.0)
    capacity.use_arena(Arena(8, 4, torch.float32, "cpu"), LayerLoads(4, 100.0, 200, 256, 1600))
    layers, recorder, in_pieces = LayerCapacity(2.0, lambda _: has_room), step_runner.CountingRecorder(), []
    num_before, num_after = NUM_WARM_UPS + 1, NUM_WARM_UPS + 2

    class Step(SimpleNamespace):
        def __call__(self, batch: Batch) -> StepResult:
            in_pieces.append(capacity.takes_pieces)
            need = 1.0 if len(in_pieces) <= num_before else 3.0
            overflows = float(need > capacity.layer_factor and not in_pieces[-1])
            void = {"has_overflowed": overflows, "has_overflowed_layer": overflows}
            return step_runner.result_of(grad_norm=1.0, needed_factor=1.0, **void)

    of_all = SimpleNamespace(changes=Changes(1.5), follow=lambda _: Changes(1.5 if layers.factor else 2.0))
    step: Any = Step(capacity=capacity, replicas=ReplicaSlots(0, are_used=False))
    options: Any = {"is_captured": is_captured, "make_recorder": lambda: recorder, "controllers": [of_all, layers]}
    take, taken = StepRunner(step, SimpleNamespace(step=lambda: None), **options), []  # type: ignore[arg-type]
    batch = Batch(torch.zeros(1, 1, 4, dtype=torch.int64), torch.zeros(1, 1, 4, dtype=torch.int64), None)
    for _ in range(num_before + MANY_OVERFLOWS + num_after):
        take(batch)
        taken.append((*take.manner[:3], take.is_steady))

    assert in_pieces == [False] * num_before + [False, True] * MANY_OVERFLOWS + [not has_room] * num_after
    begin = [("launched", 1.5, 2.0, not is_captured)] * NUM_WARM_UPS
    begin += [("recorded" if is_captured else "launched", 1.5, 2.0, not is_captured)]
    assert taken[:num_before] == begin and [kind for kind, *_ in taken[num_before:-num_after]] == ["repeated"] * 4
    once = ["warm-up"] * NUM_WARM_UPS + ["record"]
    again = [*once, *["release", "record"] * (MANY_OVERFLOWS - 1), "release"]
    assert recorder.events == ((again + once if has_room else again) if is_captured else [])
    if has_room:
        assert taken[-1] == ("replayed" if is_captured else "launched", 1.5, 4.0, True), "another program"
        assert capacity.arena.room == (600, 1200)
    else:
        assert taken[-num_after:] == [("launched", 0.0, 0, True)] * num_after
        assert capacity.arena.room == (256, 512), "nothing is kept"
