"""A rehearsal compiles what a step needs, before any message, and leaves nothing behind."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from itertools import product
from typing import Any
from unittest import mock

import pytest
import torch
from support import load
from torch import nn

from titan_moe.config import Recipe
from titan_moe.config.kernels import PRESETS
from titan_moe.config.parallel import ParallelConfig
from titan_moe.config.perf import CompileConfig, MemoryConfig, PerfConfig
from titan_moe.dispatch import capacity
from titan_moe.dispatch.capacity import ExpertCapacity
from titan_moe.kernels.experts.arena import Arena
from titan_moe.parallel.pipeline import forward_backward
from titan_moe.parallel.pipeline.messages import Messages
from titan_moe.parallel.pipeline.rehearsal import Rehearsals, StandIns, first_microbatches, unchanged
from titan_moe.plan.pipeline.action import flat
from titan_moe.plan.pipeline.orders import ORDERS_WITH_PAIRS
from titan_moe.plan.pipeline.schedules import actions_of_recipe
from titan_moe.plan.resolved import Resolved
from titan_moe.profile import compile_trace
from titan_moe.training.step_runner import StepRunner

one_loss, pipelines = load("distributed/test_one_loss"), load("distributed/test_pipelines")
CPU, CUDA = torch.device("cpu"), torch.device("cuda")
SCHEDULES, STEPS = pipelines.SCHEDULES, 2
BOUND = 1.0
"""A capacity factor by which steps overflow."""


@contextmanager
def counting_compilations(before: list[int]) -> Iterator[None]:
    """Append the number of compilations before the messages of each step."""

    def start(*args: Any) -> Messages:
        before.append(num_compilations())
        return Messages(*args)

    with mock.patch.object(forward_backward, "Messages", start):
        yield


def num_compilations() -> int:
    return len(compile_trace.compile_report().started_unix_us)


def train(recipe: Recipe, num_starved: int, rehearses: bool, backend: str = "aot_eager") -> dict[str, Any]:
    """The trace of a compiled run, its random state, its compilations, rehearsals and steps taken again."""
    received: list[torch.Tensor] = []
    receive, before, is_due = StandIns.receive, list[int](), Rehearsals.is_due

    def receive_noted(self: StandIns, rank: int) -> Any:
        got = receive(self, rank)
        received.append(got.tensor)
        return got

    torch.manual_seed(7)
    compile_trace.start_records()
    with (
        mock.patch.object(capacity, "SLOTS_ALIGNMENT", 1),  # so that a small model overflows
        mock.patch.object(StandIns, "receive", receive_noted),
        mock.patch.object(Rehearsals, "is_due", is_due if rehearses else lambda *_: False),
        mock.patch.object(StepRunner, "_take_again", autospec=True, side_effect=StepRunner._take_again) as again,
        counting_compilations(before),
    ):
        trace = one_loss.train_compiled(recipe, num_starved, STEPS, backend)
    return {
        "trace": trace,
        "random": torch.get_rng_state(),
        "before": before,
        "compilations": num_compilations(),
        "received": len(received),
        "again": again.call_count,
    }


EP2 = {"ep": 2, "dispatcher": "alltoall"}
LOOP, LOOPS, ZBV, _ = (replace(schedule, pp=2) for schedule in SCHEDULES.values())
GATHERED = replace(LOOP, ep=2, dispatcher="allgather", expert_rank_capacity_factor=0.0)
CASES: dict[str, tuple[Any, ...]] = {
    "1f1b_recompute": ("mla", MemoryConfig(("block",)), -1, GATHERED),
    "interleaved_tp": ("mla-latent-gate", MemoryConfig(), -1, replace(LOOPS, tp=2)),
    "zbv_tied_recompute": ("gqa-tied", MemoryConfig(("norms", "dense_mlp")), -1, ZBV),
    "zbv_tied_skew_recompute": ("gqa-tied", MemoryConfig(("norms", "dense_mlp")), 4, replace(ZBV, **EP2)),
    "pairs": ("gqa", MemoryConfig(), -1, pipelines.PAIRS),
    "overflow": ("gqa", MemoryConfig(), 4, replace(GATHERED, expert_rank_capacity_factor=BOUND)),
}
WITH_AUTOGRAD_GRAPHS = {"1f1b_recompute", "pairs"}
"""Those whose graphs are also made for backward; of the others Dynamo makes the graphs, and they run as they
are: what is compiled, when, and what it leaves behind is the same."""


@pytest.mark.few("zbv_tied_recompute")
@pytest.mark.slow
@pytest.mark.parametrize("case", CASES)
def test_run_has_the_bits_of_one_without_rehearsal_and_compiles_before_its_messages(ranks: Any, case: str) -> None:
    model, memory, num_starved, parallel = CASES[case]
    backend = "aot_eager" if case in WITH_AUTOGRAD_GRAPHS else "eager"
    recipe = replace(pipelines.recipe_of(parallel, model, memory), compile=CompileConfig("on"))
    num_ranks = 2 * max(parallel.ep, parallel.tp, parallel.dp_shard)
    plain, rehearsed = (ranks(num_ranks, train, recipe, num_starved, rehearses, backend) for rehearses in (False, True))
    for rank, (one, other) in enumerate(zip(plain, rehearsed, strict=True)):
        for name in ("losses", "aux_losses", "grad_norms", "counts"):
            assert other["trace"][name] == one["trace"][name], (rank, name)
        assert other["trace"]["grads"].keys() == one["trace"]["grads"].keys()
        for name, grad in one["trace"]["grads"].items():
            assert torch.equal(other["trace"]["grads"][name], grad), (rank, name)
        assert torch.equal(other["random"], one["random"]), rank
        assert other["again"] == one["again"]
        assert (other["again"] > 0) == (parallel.expert_rank_capacity_factor == BOUND)
        assert one["received"] == 0 and one["before"][0] == 0 and one["compilations"] >= 2
        assert other["received"] > 0
        if not other["again"]:
            assert set(other["before"]) == {other["compilations"]}, "nothing is compiled where a rank may wait"


@pytest.mark.slow
def test_eager_run_has_no_rehearsal(ranks: Any) -> None:
    recipe = pipelines.recipe_of(ParallelConfig(pp=2))
    for seen in ranks(2, train, recipe, -1, True):
        assert seen["received"] == 0 and seen["compilations"] == 0


def test_rehearsal_is_due_where_something_compiles_and_for_each_new_size() -> None:
    base = pipelines.recipe_of(ParallelConfig(pp=2))
    bound = ExpertCapacity(2.0)
    compiled = Rehearsals(Resolved(replace(base, compile=CompileConfig("on_cuda")), 2), bound)
    assert not compiled.is_due(CPU)
    assert [compiled.is_due(CUDA) for _ in range(2)] == [True, False]
    with bound.unbounded():
        assert [compiled.is_due(CUDA) for _ in range(2)] == [True, False]
    assert not compiled.is_due(CUDA)
    for factor in (3.0, 2.0, 2.0):  # graphs are dropped even where the factor comes back
        bound.resize(factor)
        assert [compiled.is_due(CUDA) for _ in range(2)] == [True, False]
    in_arena = ExpertCapacity(2.0)
    in_arena.arena = Arena(8, 8, torch.float32, "cpu")
    graphs = Rehearsals(Resolved(replace(base, compile=CompileConfig("on")), 2), in_arena)
    assert [graphs.is_due(CPU) for _ in range(2)] == [True, False]
    in_arena.resize(3.0)
    assert not graphs.is_due(CPU), "no graph has the size of an arena, and a captured step follows"
    zbv = pipelines.recipe_of(ZBV)
    splits = Rehearsals(Resolved(replace(zbv, compile=CompileConfig("on")), 2), in_arena)
    with in_arena.unbounded():
        assert [splits.is_due(CPU) for _ in range(2)] == [True, False]
    assert not in_arena.arena.can_delay, "a rank without experts"
    assert [splits.is_due(CPU) for _ in range(2)] == [True, False], "other ranks write delayed slabs"
    for kernels in PRESETS:
        perf, eager = PerfConfig(kernels=kernels), CompileConfig("off")
        launched = Rehearsals(Resolved(replace(base, compile=eager, perf=perf), 2), ExpertCapacity())
        assert not launched.is_due(CPU)
        assert launched.is_due(CUDA) == (kernels == "fused"), "Triton compiles at the first launch"


@pytest.mark.parametrize(
    ("schedule", "overlap"), [*product(SCHEDULES, ["none"]), *product(ORDERS_WITH_PAIRS, ["microbatch"])]
)
def test_rehearsal_has_two_microbatches_of_every_stage_in_the_schedules_order(schedule: str, overlap: Any) -> None:
    parallel = replace(SCHEDULES[schedule], pp=4, overlap=overlap)
    for entries in actions_of_recipe(parallel, 8):
        rehearsed = first_microbatches(entries)
        assert rehearsed == [action for action in flat(entries) if action.microbatch in (0, 1)]
        for kinds in (("forward",), ("backward", "backward_input")):
            ran = [action[1:] for action in rehearsed if action.kind in kinds]
            assert len(ran) == len(set(ran)) == 2 * parallel.vpp


def test_unchanged_puts_back_gradients_buffers_loads_and_random_states() -> None:
    model, loads = nn.Sequential(nn.Linear(3, 3), nn.Dropout(), nn.BatchNorm1d(3)), ExpertCapacity()
    model[0].weight.grad = torch.full((3, 3), 5.0)
    loads.need.fill_(1.5)
    buffers = {name: own.clone() for name, own in model.named_buffers()}
    before, grad = torch.get_rng_state(), model[0].weight.grad
    with unchanged([model], loads, CPU):
        assert model[0].weight.grad is None
        model(torch.randn(4, 3)).sum().backward()
        model[2].register_buffer("running_mean", torch.ones(3))
        loads.need.fill_(9.0)
        loads.overflowed.fill_(True)
        assert not torch.equal(torch.get_rng_state(), before)
    assert model[0].weight.grad is grad and torch.equal(grad, torch.full((3, 3), 5.0))
    assert all(other.grad is None for name, other in model.named_parameters() if name != "0.weight")
    assert buffers.keys() == dict(model.named_buffers()).keys()
    for name, own in model.named_buffers():
        assert torch.equal(own, buffers[name]), name
    assert loads.need == 1.5 and not loads.overflowed
    assert torch.equal(torch.get_rng_state(), before)
