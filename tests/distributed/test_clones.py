"""Training with clones of hot experts trains as one process does."""

from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
from support import load
from torch._dynamo.utils import counters

from titan_moe.config import Recipe, clones
from titan_moe.config.parallel import ParallelConfig
from titan_moe.config.perf import CompileConfig, MemoryConfig
from titan_moe.config.precision import PrecisionConfig
from titan_moe.dispatch.clones.dispatcher import CloningDispatcher, CloningExchange
from titan_moe.dispatch.clones.optional import ReplicaSlots
from titan_moe.dispatch.clones.weights import CloneWeights
from titan_moe.kernels.clones.plan import ClonePlan
from titan_moe.kernels.experts.weights import ExpertUse
from titan_moe.layers.forced_loads import draw_ids
from titan_moe.layers.forced_routing import ForcedBalance, ForcedTable
from titan_moe.layers.moe import MoE
from titan_moe.parallel.unsharded_experts import UnshardedWeights
from titan_moe.parameters import full_tensor
from titan_moe.training import build, clone_control
from titan_moe.training.build import assemble

one_loss = load("distributed/test_one_loss")
STEPS = 2
CLONES = ParallelConfig(ep=4, dispatcher="alltoall", expert_clones="auto")


@pytest.fixture(scope="module")
def alone(ranks: Any) -> dict[int, Any]:
    """One process, plain and skewed."""
    one = one_loss.recipe(ParallelConfig(), micro_batch_sequences=4)
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
        pytest.param(4, replace(CLONES, dispatcher="allgather"), "block", 1, id="allgather-block"),
        pytest.param(4, replace(CLONES, ep=2), "experts", -1, id="edp2-recompute_experts"),
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


@pytest.mark.few()
@pytest.mark.parametrize(("dispatcher", "what"), [("alltoall", "none"), ("allgather", "experts")])
def test_clones_beside_graphs_change_nothing(ranks, alone: dict[int, Any], dispatcher: str, what: str) -> None:
    parallel = replace(CLONES, ep=2, dispatcher=dispatcher)
    options = {"compile": CompileConfig("on"), "memory": MemoryConfig(what)}
    candidate = one_loss.recipe(parallel, micro_batch_sequences=2, **options)
    for fields in ranks(2, one_loss.train_compiled, candidate, 4, 2):
        trace = one_loss.Trace(**fields)
        one_loss.assert_same(trace, alone[4], 1e-9)
        assert len(set(trace.num_graphs)) == 1, "clones come and go without a new graph"


def train_with_room(run: Recipe, has_room: bool, num_steps: int = STEPS) -> tuple[dict[str, Any], int, set[int]]:
    """The trace, with room for clones behind the copies of own weights or without; how many clones were planned; and
    the lengths of the copies."""
    cast, lengths = UnshardedWeights.cast, set()

    def of_a_length(self: UnshardedWeights, weight: Any) -> Any:
        self.room = self.room if has_room else ReplicaSlots()
        copy = cast(self, weight)
        lengths.add(len(copy))
        return copy

    with mock.patch.object(UnshardedWeights, "cast", of_a_length):
        return *train_with_clones(run, 4, num_steps), lengths


@pytest.mark.few("alltoall-False-block", "allgather-True-none")
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
    parallel = replace(CLONES, ep=2, dispatcher=dispatcher, accumulate_unsharded=keeps)
    mixed = PrecisionConfig(compute="bf16", master="fp32", reduce="fp32")
    candidate = one_loss.recipe(parallel, precision=mixed, memory=MemoryConfig(what), micro_batch_sequences=2)
    apart, behind = (ranks(2, train_with_room, candidate, has_room) for has_room in (False, True))
    num_own = one_loss.MODEL.moe.num_experts // 2
    for (expected, num_clones, lengths), (fields, _, lengths_of_roomy) in zip(apart, behind, strict=True):
        assert num_clones > 0 and (lengths, lengths_of_roomy) == ({num_own}, {num_own + 2})
        one_loss.assert_same(one_loss.Trace(**fields), one_loss.Trace(**expected), 0.0)


# Clones that are switched on and off

PHASES = "even even hot hot hot even even even hot hot".split()
"""Clones are switched on, off and on again, each time after a window."""
WINDOW = 2
DEAR = 10**6
"""Slots that a clone costs, more than any rank has."""


def in_two(parallel: ParallelConfig, **changes: Any) -> Recipe:
    """Of two microbatches a step, of two data-parallel ranks."""
    return one_loss.recipe(parallel, micro_batch_sequences=2, **changes)


def train_in_phases(run: Recipe, phases: list[str], cost: int = 0) -> SimpleNamespace:
    """Steps of a forced load each: losses, norms and parameters, and for every step the replica slots in use, how many
    clones were planned, how often layers got weights of clones, and the graphs that were compiled by then. A clone is
    taken to cost so many slots where exchanges are planned, and none where replica slots are switched."""
    quick = {"WINDOW_STEPS": WINDOW, "STEPS_BETWEEN_CHANGES": WINDOW}
    trace = SimpleNamespace(losses=[], norms=[], in_use=[], planned=[], exchanged=[], num_graphs=[])
    calls = SimpleNamespace(planned=0, exchanged=0)
    plan_of, exchange = CloningDispatcher._plan, CloneWeights.__call__

    def plan(*args: Any) -> ClonePlan:
        made = plan_of(*args)
        calls.planned += int((made.experts_Pc >= 0).sum())
        return made

    def exchange_weights(self: CloneWeights, use: ExpertUse) -> ExpertUse:
        calls.exchanged += isinstance(use.exchange, CloningExchange)
        return exchange(self, use)

    is_compiled = run.compile.compiles("cpu")
    with (
        mock.patch.multiple(clone_control, **quick),
        mock.patch.object(clones, "COST_SLOTS", 0),
        mock.patch.object(build, "cost_slots", lambda recipe: cost),
        nullcontext() if is_compiled else mock.patch.object(CloningDispatcher, "_plan", plan),
        nullcontext() if is_compiled else mock.patch.object(CloneWeights, "__call__", exchange_weights),
    ):
        meshes, _, parts, _, _, runner = assemble(run, torch.device("cpu"))
        moe, generator = run.model.moe, torch.Generator().manual_seed(0)
        of_ranks = {"num_experts": moe.num_experts, "top_k": moe.top_k, "num_ranks": run.parallel.ep}
        even_TK = ForcedBalance(moe, torch.device("cpu")).table_TK
        hot_TK = draw_ids("hot_rank", num_tokens=len(even_TK), **of_ranks, layer=0, step=0, generator=generator)
        forces = {"hot": ForcedTable(hot_TK), "even": ForcedTable(even_TK)}  # equal for the compiler
        for index, phase in enumerate(phases):
            for router in runner.step.balancer.routers.values():
                router.force = forces[phase]
            calls.planned = calls.exchanged = 0
            trace.in_use.append(runner.step.replicas.number_in_use)
            result = runner(one_loss.batch_of(index, run.train.micro_batch_sequences, meshes))
            trace.losses.append(result.loss.item())
            trace.norms.append(result.grad_norm.item())
            trace.planned.append(calls.planned)
            trace.exchanged.append(calls.exchanged)
            trace.num_graphs.append(counters["stats"]["unique_graphs"])
    trace.parameters = {name: full_tensor(p).detach() for part in parts for name, p in part.named_parameters()}
    return trace


def train_compiled_in_phases(run: Recipe, phases: list[str]) -> SimpleNamespace:
    torch._dynamo.reset()
    counters.clear()
    with mock.patch.object(torch, "compile", partial(torch.compile, backend="eager")):
        return train_in_phases(run, phases)


def assert_used_while_imbalanced(trace: SimpleNamespace, phases: list[str], *, pays: bool = True) -> None:
    """After a window with a hot step both replica slots are in use, and there are clones where they are needed, if they
    pay."""
    for step, (number, phase) in enumerate(zip(trace.in_use, phases, strict=True)):
        window = phases[step - WINDOW : step] if step >= WINDOW else []
        assert number == (2 if "hot" in window else 0), trace.in_use
        assert (trace.exchanged[step] > 0) == (number > 0)
        assert (trace.planned[step] > 0) == (pays and number > 0 and phase == "hot")


AUTO = ParallelConfig(ep=2, expert_clones="auto", expert_rank_capacity_factor=0.0, dispatcher="allgather")
MIXED = PrecisionConfig(compute="fp32", master="fp64", reduce="fp64")


@pytest.mark.few("allgather-follows_need")
@pytest.mark.parametrize(
    ("parallel", "changes"),
    [
        pytest.param(replace(AUTO, dispatcher="alltoall"), {}, id="alltoall"),
        pytest.param(replace(AUTO, expert_rank_capacity_factor="auto"), {}, id="allgather-follows_need"),
        pytest.param(replace(AUTO, etp=2), {"memory": MemoryConfig("experts")}, id="etp2-recompute_experts"),
        pytest.param(replace(AUTO, accumulate_unsharded=True), {"precision": MIXED}, id="kept_copies"),
    ],
)
def test_clones_are_used_while_ranks_are_imbalanced(ranks: Any, parallel: ParallelConfig, changes: Any) -> None:
    num_ranks, plain = 2 * parallel.etp, replace(parallel, expert_clones="off")
    without, followed = (ranks(num_ranks, train_in_phases, in_two(p, **changes), PHASES) for p in (plain, parallel))
    tolerance = 1e-5 if "precision" in changes else 1e-9
    for expected, trace in zip(without, followed, strict=True):
        assert_used_while_imbalanced(trace, PHASES)
        torch.testing.assert_close(trace.losses, expected.losses, rtol=tolerance, atol=tolerance)
        torch.testing.assert_close(trace.norms, expected.norms, rtol=tolerance, atol=tolerance)
        num_off = trace.in_use.index(2)
        assert trace.losses[:num_off] == expected.losses[:num_off]
        assert trace.norms[:num_off] == expected.norms[:num_off]


def test_no_expert_is_cloned_that_costs_more_than_its_rank_has_too_much(ranks: Any) -> None:
    phases, candidate = ["hot"] * 4, in_two(AUTO)
    without = ranks(2, train_in_phases, in_two(replace(AUTO, expert_clones="off")), phases)
    for expected, trace in zip(without, ranks(2, train_in_phases, candidate, phases, DEAR), strict=True):
        assert_used_while_imbalanced(trace, phases, pays=False)
        torch.testing.assert_close(trace.losses, expected.losses, rtol=1e-9, atol=1e-9)


def costs_in(run: Recipe) -> tuple[int, list[int], float]:
    """The cost of a clone by the replica slots and by dispatchers, and the load from which clones pay."""
    _, _, parts, _, _, runner = assemble(run, torch.device("cpu"))
    dispatchers = [module.dispatcher for part in parts for module in part.modules() if isinstance(module, MoE)]
    costs = [dispatcher.cloning.cost for dispatcher in dispatchers]
    (control,) = (each for each in runner.controllers if isinstance(each, clone_control.CloneControl))
    return runner.step.replicas.cost, costs, control.pays_from


def test_auto_counts_what_a_clone_costs(ranks: Any) -> None:
    run = in_two(AUTO)
    num_slots = run.train.micro_batch_sequences * run.train.seq_len_tokens * run.model.moe.top_k
    expected = clones.COST_SLOTS, [clones.COST_SLOTS] * run.model.num_moe_layers, clones.clones_pay_from(run)
    assert expected[-1] == pytest.approx(1.1 + 700 / num_slots)
    assert ranks(2, costs_in, run) == [expected] * 2


@pytest.mark.few("mixed")
@pytest.mark.parametrize("precision", [one_loss.FP64, MIXED], ids=["fp64", "mixed"])
def test_replica_slots_that_are_not_used_change_no_bit(ranks: Any, precision: PrecisionConfig) -> None:
    runs = (in_two(p, precision=precision) for p in (replace(AUTO, expert_clones="off"), AUTO))
    for expected, trace in zip(*(ranks(2, train_in_phases, run, ["even"] * 4) for run in runs), strict=True):
        assert trace.in_use == [0] * 4
        assert (trace.losses, trace.norms) == (expected.losses, expected.norms)
        torch.testing.assert_close(trace.parameters, expected.parameters, rtol=0, atol=0)


@pytest.fixture(scope="module")
def eager_phases(ranks: Any) -> list[SimpleNamespace]:
    return ranks(2, train_in_phases, in_two(AUTO), PHASES)


def test_layers_are_compiled_once_with_clones_and_once_without(ranks: Any, eager_phases: list[SimpleNamespace]) -> None:
    compiled = ranks(2, train_compiled_in_phases, in_two(AUTO, compile=CompileConfig("on")), PHASES)
    for expected, trace in zip(eager_phases, compiled, strict=True):
        assert trace.in_use == expected.in_use
        torch.testing.assert_close(trace.losses, expected.losses, rtol=1e-9, atol=1e-9)
        first, second = trace.in_use.index(0), trace.in_use.index(2)
        off, on = trace.num_graphs[first], trace.num_graphs[second]
        assert off < on and trace.num_graphs == [off] * second + [on] * (len(PHASES) - second)
