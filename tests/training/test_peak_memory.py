"""The reported peak of memory is that of all steps, also before an arena was resized."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from titan_moe.config import load_recipe
from titan_moe.data.packing import Batch
from titan_moe.dispatch.capacity import ExpertCapacity
from titan_moe.kernels.experts.arena import Arena
from titan_moe.plan.cost.loads import LayerLoads
from titan_moe.plan.cost.peak import graph_bytes
from titan_moe.plan.pipeline.parts import parts_of
from titan_moe.plan.resolved import Resolved
from titan_moe.training.build import _bytes_of_a_graph
from titan_moe.training.capacity_control import CALIBRATION_STEPS, RESERVED_SHARE, CapacityControl, bytes_beside_all
from titan_moe.training.peak_memory import PeakMemory
from titan_moe.training.step_runner import StepRunner

GIB = 2**30
RECIPES = Path(__file__).parents[2] / "recipes"
BATCH = Batch(torch.zeros(1, 1, 4, dtype=torch.int64), torch.zeros(1, 1, 4, dtype=torch.int64), None)


class Allocator:
    """Stands for a GPU's allocator: an arena, and what steps hold beside it."""

    def __init__(self, arena: Arena) -> None:
        self.arena, self.peak = arena, 0

    def hold(self, num_bytes: int) -> None:
        self.peak = max(self.peak, num_bytes + self.arena.num_bytes)

    def max_memory_allocated(self, device: torch.device) -> int:
        return self.peak

    def reset_peak_memory_stats(self, device: torch.device) -> None:
        self.peak = self.arena.num_bytes


class Step:
    """Holds `bytes_beside` beside the arena, in turn, and needs a factor."""

    def __init__(self, capacity: ExpertCapacity, allocator: Allocator) -> None:
        self.capacity, self.allocator = capacity, allocator
        self.bytes_beside: list[int] = []
        self.needs: list[float] = []

    def __call__(self, batch: Batch) -> Any:
        self.allocator.hold(self.bytes_beside.pop(0))
        need = self.needs.pop(0)
        overflows = self.capacity.is_bounded and need > self.capacity.capacity_factor
        metrics = {"needed_factor": torch.tensor(need), "grad_norm": torch.ones(())}
        return SimpleNamespace(metrics=metrics | {"has_overflowed": torch.tensor(overflows)})

    def plan(self, *calls: tuple[int, float]) -> None:
        self.bytes_beside, self.needs = [size for size, _ in calls], [need for _, need in calls]


@pytest.fixture
def step(monkeypatch: pytest.MonkeyPatch) -> Step:
    """A step with an arena of 64 layers of a row of 1 MiB, whose memory seems to be a GPU's."""
    arena = Arena(2**18, 1, torch.float32, "cpu")
    allocator = Allocator(arena)
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", allocator.max_memory_allocated)
    monkeypatch.setattr(torch.cuda, "reset_peak_memory_stats", allocator.reset_peak_memory_stats)
    capacity = ExpertCapacity()
    capacity.use_arena(arena, LayerLoads(64, rows=1, slots=1, worst_rows=4, worst_slots=4))
    return Step(capacity, allocator)


def runner_of(step: Step, **options: Any) -> Any:
    memory = PeakMemory(step.capacity)
    memory.device = torch.device("cuda")
    return StepRunner(step, SimpleNamespace(step=lambda: None), memory=memory, **options)  # type: ignore[arg-type]


def test_peak_of_steps_before_a_resized_arena_is_reported(step: Step) -> None:
    run = runner_of(step, controllers=[CapacityControl()])
    step.plan(*[(3 * GIB, 1.0)] * (CALIBRATION_STEPS - 1), (7 * GIB, 1.0))  # the last calibration step holds most
    small = step.capacity.arena.num_bytes
    for _ in range(CALIBRATION_STEPS):
        run(BATCH)
    assert step.capacity.arena.num_bytes > small, "the bound is chosen"
    assert run.memory.gib == (7 * GIB + small) / GIB
    assert step.allocator.peak < 7 * GIB, "the allocator has forgotten it"

    run.memory.reset()  # as benchmarks do after their warm-up
    chosen = step.capacity.arena.num_bytes
    step.plan((2 * GIB, 1.0))
    run(BATCH)
    assert run.memory.gib == (2 * GIB + chosen) / GIB
    step.plan((2 * GIB, 2.0), (5 * GIB, 2.0))  # overflows, and is taken again
    run(BATCH)
    assert run.num_reruns == 1 and step.capacity.arena.num_bytes > chosen
    assert run.memory.gib == (5 * GIB + chosen) / GIB
    assert run.memory.bytes_beside_arena == 7 * GIB, "what the next bound must leave room for"


def test_an_arena_that_shrinks_is_no_part_of_the_peak_beside_it(step: Step) -> None:
    run = runner_of(step, controllers=[CapacityControl()])
    step.plan(*[(2**20, 1.0)] * CALIBRATION_STEPS)
    for _ in range(CALIBRATION_STEPS):
        run(BATCH)
    assert step.capacity.arena.num_bytes > 64 * 2**20
    run._bound(0.0)
    assert step.capacity.arena.num_bytes < 8 * 2**20
    assert run.memory.bytes_beside_arena == 2**20


def test_peak_without_an_arena_is_the_allocators(step: Step) -> None:
    step.capacity.arena = None
    run = runner_of(step)
    step.plan((GIB, 1.0))
    run(BATCH)
    assert run.memory.gib == step.allocator.peak / GIB > 1
    run.memory.reset()
    assert run.memory.gib < 1


def test_pools_of_recordings_count_whole_until_they_are_released(step: Step, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("titan_moe.training.step_runner.idle_pool_bytes", lambda _: 4 * GIB)
    run = runner_of(step)
    arena = step.capacity.arena

    class Replayed(SimpleNamespace):
        def __call__(self, batch: Batch) -> Any:
            self.num_recordings = 1
            return step(batch)

    run.captured = Replayed(num_recordings=0, release=lambda: None)
    step.plan((5 * GIB, 1.0), (3 * GIB, 1.0))
    run(BATCH)  # the capture holds 5
    assert run.memory.gib == (5 * GIB + arena.num_bytes) / GIB, "what is captured is allocated while it is"
    run(BATCH)
    with_pools = (3 + 4) * GIB
    assert run.memory.gib == (with_pools + arena.num_bytes) / GIB and run.memory.bytes_beside_arena == with_pools
    run.memory.reset()
    assert run.memory.gib == (4 * GIB + arena.num_bytes) / GIB, "replays use the pools"
    step.plan((3 * GIB, 1.0), (2 * GIB, 1.0))
    run(BATCH)
    run.release()
    run(BATCH)
    assert run.memory.gib == (with_pools + arena.num_bytes) / GIB, "the peak of all steps"
    assert run.memory.bytes_beside_arena == with_pools and run.memory.idle_pool_bytes == 0


def test_the_pool_of_the_first_recording_is_expected_until_there_is_one(step: Step) -> None:
    memory = PeakMemory(step.capacity, 3 * GIB)
    memory.hold_in_pools(0)
    assert memory.bytes_of_first_recording == 3 * GIB
    memory.device = torch.device("cuda")
    memory.hold_in_pools(GIB)
    memory.hold_in_pools(0)
    assert memory.bytes_of_first_recording == 0, "the peak counts that of the first"


def test_the_first_bounded_step_is_expected_until_there_is_one(step: Step, monkeypatch: pytest.MonkeyPatch) -> None:
    """Steps without a bound on all layers are in pieces."""
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda _: (100 * GIB, 100 * GIB))
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda _: 0)
    run = runner_of(step, controllers=[CapacityControl()])
    memory, arena, largest = run.memory, step.capacity.arena, []
    memory.bytes_of_first_bounded_step = 3 * GIB
    step.plan(*[(2 * GIB, 1.0)] * CALIBRATION_STEPS, (5 * GIB, 1.0))
    for _ in range(CALIBRATION_STEPS):
        run(BATCH)
    largest.append(bytes_beside_all(memory) + arena.num_bytes)
    run(BATCH)
    largest.append(bytes_beside_all(memory) + arena.num_bytes)
    assert memory.bytes_of_first_bounded_step == 0 and memory.bytes_beside_arena == 5 * GIB
    assert largest == [pytest.approx(100 * GIB * (1 - RESERVED_SHARE) - 5 * GIB)] * 2, "the peak counts it once"


@pytest.mark.parametrize(("extent", "rank"), [("off", 0), ("step", 0), ("step", 1)])
def test_a_rank_expects_the_graph_of_its_own_stages(extent: str, rank: int) -> None:
    words = ["--parallel.pp=2", "--parallel.ep=1", "--parallel.dispatcher=local", "--parallel.overlap=none"]
    recipe = load_recipe(RECIPES / "qwen3_30b_a3b.toml", [*words, f"--compile.cudagraph={extent}"])
    dense = SimpleNamespace(get_local_rank={"pp": rank}.__getitem__)
    expected = _bytes_of_a_graph(Resolved(recipe, 2), SimpleNamespace(dense=dense))  # type: ignore[arg-type]
    assert expected == graph_bytes(parts_of(recipe, 2)[rank], 2.5)
    assert (expected > 2**30) == (extent == "step")
