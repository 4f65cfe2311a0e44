"""Training with clones of hot experts trains as one process does."""

from dataclasses import replace
from typing import Any
from unittest import mock

import pytest
from support import load

from titan_moe.config import Recipe
from titan_moe.config.parallel import ParallelConfig
from titan_moe.config.perf import CompileConfig, MemoryConfig
from titan_moe.config.precision import PrecisionConfig
from titan_moe.dispatch.cloning import CloningDispatcher
from titan_moe.kernels.clones.plan import ClonePlan
from titan_moe.parallel.unsharded_experts import CastCache

one_loss = load("distributed/test_one_loss")
STEPS = 3
CLONES = ParallelConfig(ep=4, dispatcher="alltoall", expert_clones=1)


@pytest.fixture(scope="module")
def alone(ranks: Any) -> dict[int, Any]:
    """One process, plain and skewed."""
    one = one_loss.recipe(ParallelConfig())
    return {starved: one_loss.Trace(**ranks(1, one_loss.train, one, starved, STEPS)[0]) for starved in (-1, 1, 4)}


def train_with_clones(run: Recipe, num_starved: int, num_steps: int = STEPS) -> tuple[dict[str, Any], int]:
    """The trace, and how many clones were planned in all exchanges."""
    planned: list[int] = []

    plan_of = CloningDispatcher._plan

    def plan(*args: Any) -> ClonePlan:
        made = plan_of(*args)
        planned.append(int((made.experts_Pc >= 0).sum()))
        return made

    with mock.patch.object(CloningDispatcher, "_plan", plan):
        fields = one_loss.train(run, num_starved, num_steps)
    return fields, sum(planned)


@pytest.mark.parametrize(
    ("num_ranks", "parallel", "what", "num_starved"),
    [
        pytest.param(4, CLONES, "none", 4, id="ranks_without_tokens"),
        pytest.param(4, replace(CLONES, dispatcher="allgather", expert_clones=2), "block", 1, id="allgather-block"),
        pytest.param(4, replace(CLONES, ep=2, expert_clones=3), "experts", -1, id="edp2-recompute_experts"),
        pytest.param(4, replace(CLONES, ep=2, dp_replicate=2), "none", -1, id="hsdp2x2"),
        pytest.param(2, replace(CLONES, ep=2, accumulate_unsharded=True), "none", 4, id="gathered_once"),
    ],
)
def test_clones_change_nothing(
    ranks, alone: dict[int, Any], num_ranks: int, parallel: ParallelConfig, what: str, num_starved: int
) -> None:
    candidate = one_loss.recipe(parallel, memory=MemoryConfig(what))
    for fields, num_clones in ranks(num_ranks, train_with_clones, candidate, num_starved):
        one_loss.assert_same(one_loss.Trace(**fields), alone[num_starved], 1e-9)
        assert num_clones > 0


@pytest.mark.parametrize(
    ("dispatcher", "extent", "what", "num_graphs"),
    [
        pytest.param("alltoall", "pieces", "none", 7, id="alltoall-pieces"),
        pytest.param("allgather", "block", "experts", 4, id="allgather-blocks-recompute_experts"),
    ],
)
def test_clones_inside_graphs_change_nothing(
    ranks, alone: dict[int, Any], dispatcher: str, extent: str, what: str, num_graphs: int
) -> None:
    parallel = replace(CLONES, ep=2, dispatcher=dispatcher)
    candidate = one_loss.recipe(parallel, compile=CompileConfig("on", extent=extent), memory=MemoryConfig(what))
    for fields in ranks(2, one_loss.train_compiled, candidate, 4, 2):
        trace = one_loss.Trace(**fields)
        one_loss.assert_same(trace, alone[4], 1e-9)
        assert trace.num_graphs == [num_graphs] * 2, "clones come and go without a new graph"


def train_with_room(run: Recipe, has_room: bool, num_steps: int = STEPS) -> tuple[dict[str, Any], int, set[int]]:
    """The trace, with room for clones behind the copies of own weights or without; how many clones were planned; and
    the lengths of the copies."""
    cast, lengths = CastCache.__call__, set()

    def of_a_length(self: CastCache, weight: Any) -> Any:
        self.room *= has_room
        copy = cast(self, weight)
        lengths.add(len(copy))
        return copy

    with mock.patch.object(CastCache, "__call__", of_a_length):
        return *train_with_clones(run, 4, num_steps), lengths


@pytest.mark.parametrize(
    ("dispatcher", "keeps", "what"),
    [
        ("alltoall", False, "none"),
        ("allgather", True, "none"),
        ("allgather", False, "experts"),
        ("alltoall", False, "block"),
    ],
)
def test_clones_behind_own_weights_train_as_apart(ranks, dispatcher: str, keeps: bool, what: str) -> None:
    parallel = replace(CLONES, ep=2, dispatcher=dispatcher, accumulate_unsharded=keeps, expert_clones=2)
    mixed = PrecisionConfig(compute="bf16", master="fp32", reduce="fp32")
    candidate = one_loss.recipe(parallel, precision=mixed, memory=MemoryConfig(what))
    apart, behind = (ranks(2, train_with_room, candidate, has_room) for has_room in (False, True))
    num_own = one_loss.MODEL.moe.num_experts // 2
    for (expected, num_clones, lengths), (fields, _, lengths_of_roomy) in zip(apart, behind, strict=True):
        assert num_clones > 0 and (lengths, lengths_of_roomy) == ({num_own}, {num_own + 2})
        one_loss.assert_same(one_loss.Trace(**fields), one_loss.Trace(**expected), 0.0)
