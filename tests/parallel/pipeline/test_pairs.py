"""Pairs of microbatches in a pipeline: each half hides the exchanges of the other, and sums have the same bits.

tests/distributed/test_pipelines.py compares whole runs with one process.
"""

from dataclasses import replace
from itertools import accumulate, pairwise
from typing import Any
from unittest import mock

import pytest
import torch
from support import load
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.profiler import ProfilerActivity, profile
from torch.utils._python_dispatch import TorchDispatchMode

from titan_moe.config import Recipe, check_rules
from titan_moe.config.parallel import ParallelConfig
from titan_moe.config.perf import KernelOverrides, PerfConfig
from titan_moe.config.precision import PrecisionConfig
from titan_moe.dispatch import async_collectives
from titan_moe.kernels.delayed_weight_grads import PendingWeightGrads
from titan_moe.parallel.microbatch_run import MicrobatchRun
from titan_moe.parallel.pipeline.forward_backward import StepRun
from titan_moe.parallel.pipeline.messages import Messages, Received
from titan_moe.plan.pipeline.action import Pair
from titan_moe.plan.pipeline.schedules import actions_of_recipe
from titan_moe.plan.pipeline.simulation import max_held
from titan_moe.training.build import assemble
from titan_moe.training.evaluate import validation_loss

pytestmark = pytest.mark.slow
one_loss, overlap = load("distributed/test_one_loss"), load("parallel/test_overlap")
CPU = torch.device("cpu")
WAYS = ("none", "microbatch")
PAIRS = ParallelConfig(
    pp=2,
    vpp=2,
    pp_schedule="dualpipev",
    accumulate_unsharded=True,
    ep=2,
    dispatcher="alltoall",
    overlap="microbatch",
    pp_layout="Et|t|t|tL",
)
SCHEDULES = {
    "dualpipev": PAIRS,
    "interleaved_1f1b": replace(PAIRS, pp_schedule="interleaved_1f1b"),
    "1f1b": replace(PAIRS, pp_schedule="1f1b", vpp=1, pp_layout="Ett|ttL"),
}
FP32, BF16 = PrecisionConfig("fp32", "fp32", "fp32"), PrecisionConfig("bf16", "fp32", "fp32")
GROUPED_MM = PerfConfig(kernels="grouped_mm", loss_chunk_tokens=5)
NUM_MICROBATCHES = 6


def recipe_of(
    parallel: ParallelConfig = PAIRS,
    *,
    num_dense_layers: int = 0,
    num_microbatches: int = NUM_MICROBATCHES,
    **changes: Any,
) -> Recipe:
    base = one_loss.recipe(parallel, **{"perf": GROUPED_MM, "precision": FP32, **changes})
    train = replace(base.train, global_batch_sequences=parallel.ep * num_microbatches, micro_batch_sequences=1)
    model = replace(base.model, num_layers=2 * parallel.pp, num_dense_layers=num_dense_layers)
    return replace(base, model=model, train=train)


def batch_of(step: int, meshes: Any, num_microbatches: int = NUM_MICROBATCHES) -> Any:
    return one_loss.batch_of(step, 1, meshes, has_documents=True, num_sequences=meshes.sizes.dp * num_microbatches)


class PairRecorder(overlap.OverlapRecorder):
    """Records the exchanges that begin in a pair: the operations until each is waited for."""

    def __init__(self) -> None:
        super().__init__()
        self.in_pairs: list[list[list[str]]] = []

    def run_pair(self, run: StepRun, pair: Pair) -> None:
        before = len(self.journeys)
        assert not self.traveling
        RUN_PAIR(run, pair)
        assert not self.traveling
        self.in_pairs.append(self.journeys[before:])


RUN_PAIR = StepRun._run_pair


def watch(recipe: Recipe) -> list[list[bool]]:
    """By pair, whether matrix products run during each of its exchanges."""
    built = assemble(recipe, CPU)
    with PairRecorder() as seen, mock.patch.object(StepRun, "_run_pair", lambda *args: seen.run_pair(*args)):
        built.step.step.forward_backward(batch_of(0, built.meshes), torch.tensor(0.1))
    return [["aten::mm" in under for under in journeys] for journeys in seen.in_pairs]


@pytest.mark.few("dualpipev-alltoall", "interleaved_1f1b-alltoall", "1f1b-alltoall")
@pytest.mark.parametrize(
    ("schedule", "dispatcher"),
    [("dualpipev", "alltoall"), ("dualpipev", "allgather"), ("interleaved_1f1b", "alltoall"), ("1f1b", "alltoall")],
)
def test_pairs_hide_every_exchange(ranks: Any, schedule: str, dispatcher: str) -> None:
    recipe = recipe_of(replace(SCHEDULES[schedule], dispatcher=dispatcher))
    assert check_rules(recipe, 4) == []
    lists = actions_of_recipe(recipe.parallel, NUM_MICROBATCHES)
    for rank, are_hidden in enumerate(ranks(4, watch, recipe)):
        assert len(are_hidden) == sum(isinstance(entry, Pair) for entry in lists[rank // 2]) > 0
        for of_pair in are_hidden:
            assert of_pair == [True] * layers_of_stage(recipe) * (4 + 3), "ids, scores, rows, results; gradients"


def layers_of_stage(recipe: Recipe) -> int:
    """All stages have as many; each exchanges ids, scores, rows and results, and gradients of all but ids."""
    return recipe.model.num_layers // (recipe.parallel.pp * recipe.parallel.vpp)


def record_order(recipe: Recipe) -> list[list[str]]:
    """By pair: its pieces, the exchanges over ep that start and that are waited for, and messages between stages."""
    built, pairs = assemble(recipe, CPU), []
    events: list[str] = []

    def noting(name: str, function: Any) -> Any:
        def wrapper(*args: Any, **options: Any) -> Any:
            if name != "receive" or args[0].work is not None:  # what is here already is no wait
                events.append(name)
            return function(*args, **options)

        return wrapper

    def run_pair(run: StepRun, pair: Pair) -> None:
        events.clear()
        RUN_PAIR(run, pair)
        pairs.append(list(events))

    with (
        mock.patch.object(async_collectives, "_exchange", noting("start", async_collectives._exchange)),
        mock.patch.object(async_collectives, "_wait", noting("wait", async_collectives._wait)),
        mock.patch.object(Received, "wait", noting("receive", Received.wait)),
        mock.patch.object(Messages, "send", noting("send", Messages.send)),
        mock.patch.object(MicrobatchRun, "forward", noting("forward", MicrobatchRun.forward)),
        mock.patch.object(MicrobatchRun, "backward", noting("backward", MicrobatchRun.backward)),
        mock.patch.object(StepRun, "_run_pair", run_pair),
    ):
        built.step.step.forward_backward(batch_of(0, built.meshes), torch.tensor(0.1))
    return pairs


@pytest.mark.few("dualpipev", "1f1b")
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_pairs_take_turns_where_an_exchange_starts(ranks: Any, schedule: str) -> None:
    seen: set[str] = set()
    recipe = recipe_of(SCHEDULES[schedule])
    for events in (events for pairs in ranks(4, record_order, recipe) for events in pairs):
        seen |= set(events)
        pieces = [index for index, event in enumerate(events) if event in ("forward", "backward")]
        assert not {"receive", "send"} & set(events[pieces[0] :]), "inputs are there before, results are sent after"
        assert events[pieces[0]] == "backward", "it frees memory"
        for piece, following in pairwise(pieces):
            assert ("start" in events[piece:following]) <= (events[piece] != events[following])
        assert events.count("start") == events.count("wait") == layers_of_stage(recipe) * (4 + 3)
    assert seen == {"receive", "forward", "backward", "start", "wait"}


class CallRecorder(TorchDispatchMode):
    """Records collectives, sends and receives, with the peers of those."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[tuple[Any, ...]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.overloadpacket._qualified_op_name
        if "c10d" in name:
            has_peer = name in ("c10d::send", "c10d::recv_")
            self.calls.append((name, *(arg for arg in args if has_peer and isinstance(arg, int))))
        return func(*args, **(kwargs or {}))


def record_calls(recipe: Recipe) -> list[tuple[Any, ...]]:
    built = assemble(recipe, CPU)
    with CallRecorder() as seen:
        built.step.step.forward_backward(batch_of(0, built.meshes), torch.tensor(0.1))
    return seen.calls


@pytest.mark.few("dualpipev", "1f1b")
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_ranks_of_an_ep_group_make_the_same_calls_in_the_same_order(ranks: Any, schedule: str) -> None:
    """Whatever their routing is; else an exchange would wait for ever."""
    recipe = recipe_of(SCHEDULES[schedule])
    by_rank = ranks(4, record_calls, recipe)
    for rank, calls in enumerate(by_rank):
        assert calls == by_rank[rank - rank % 2]
        of_exchanges = [name for name, *_ in calls if "all_to_all" in name or "alltoall" in name]
        num_layers = layers_of_stage(recipe) * recipe.parallel.vpp
        assert len(of_exchanges) >= 7 * num_layers * NUM_MICROBATCHES
        assert {name for name, *peers in calls if peers} == {"c10d::send", "c10d::recv_"}


def learn(recipe: Recipe, num_steps: int) -> tuple[list[float], list[Tensor]]:
    """Training and validation losses of a few steps, and the final weights."""
    built = assemble(recipe, CPU)
    losses, number = [], recipe.train.global_batch_sequences // built.meshes.sizes.dp
    for index in range(num_steps):
        losses.append(built.step(batch_of(index, built.meshes, number)).loss.item())
        assert all(isinstance(parameter, DTensor) for parameter in built.optimizers.parameters), "all is resharded"
        held_out = [batch_of(99, built.meshes, number)]
        losses.append(validation_loss(built.model, built.parts, held_out, CPU, built.meshes).item())
    return losses, [parameter.full_tensor() for parameter in built.optimizers.parameters]


def learn_both_ways(recipe: Recipe, num_steps: int = 3) -> list[tuple[list[float], list[Tensor]]]:
    return [learn(replace(recipe, parallel=replace(recipe.parallel, overlap=way)), num_steps) for way in WAYS]


THREE = {"pp": 3, "ep": 1, "pp_layout": "Et|t|t|t|t|tL"}


@pytest.mark.few("dualpipev_three_ranks")
@pytest.mark.parametrize(
    "parallel",
    [
        PAIRS,
        replace(PAIRS, **THREE),
        SCHEDULES["1f1b"],
        SCHEDULES["interleaved_1f1b"],
        replace(SCHEDULES["interleaved_1f1b"], **THREE),
    ],
    ids=["dualpipev", "dualpipev_three_ranks", "1f1b", "interleaved", "interleaved_three_ranks"],
)
def test_pairs_sum_rounded_gradients_alike_and_validate_new_weights(ranks: Any, parallel: ParallelConfig) -> None:
    """With 3 ranks some gradients of a microbatch of `dualpipev` come late, behind others of the next."""
    pp, ep = parallel.pp, parallel.ep
    for plain, paired in ranks(pp * ep, learn_both_ways, recipe_of(parallel, num_dense_layers=1, precision=BF16)):
        assert paired[0] == plain[0] and len(set(plain[0])) == 2 * 3
        assert all(torch.equal(a, b) for a, b in zip(paired[1], plain[1], strict=True))


def count_delayed(recipe: Recipe) -> list[list[int]]:
    """Each way, the operations whose weight gradients each `backward_weight` of a step computes."""
    counts = []
    for way in WAYS:
        built, of_step = assemble(replace(recipe, parallel=replace(recipe.parallel, overlap=way)), CPU), []

        def compute(pending: PendingWeightGrads, of_step: list[int] = of_step) -> None:
            of_step.append(sum(grads.pending is not None for _, grads in pending.uses))
            COMPUTE(pending)

        with mock.patch.object(PendingWeightGrads, "compute", compute):
            built.step.step.forward_backward(batch_of(0, built.meshes), torch.tensor(0.1))
        counts.append(of_step)
    return counts


COMPUTE = PendingWeightGrads.compute


def test_split_backwards_beside_pairs_delay_all_that_they_can(ranks: Any) -> None:
    for plain, paired in ranks(4, count_delayed, recipe_of()):
        assert paired == plain and min(plain) > 2


@pytest.mark.few()
@pytest.mark.interpreted
@pytest.mark.parametrize("schedule", ["dualpipev", "interleaved_1f1b"])
def test_pairs_delay_weight_gradients_of_experts_in_triton(ranks: Any, schedule: str) -> None:
    """Those that the schedule splits. In a pair they are computed while gradients of rows are sent. As few microbatches
    as fill the pipeline: each rank has three pairs and more."""
    perf = replace(GROUPED_MM, override=KernelOverrides(experts="fused"))
    recipe = recipe_of(SCHEDULES[schedule], num_microbatches=4, perf=perf)
    assert all(
        sum(isinstance(entry, Pair) for entry in entries) >= 3 for entries in actions_of_recipe(recipe.parallel, 4)
    )
    for plain, paired in ranks(4, learn_both_ways, recipe, 1):
        assert paired[0] == plain[0]
        assert all(torch.equal(a, b) for a, b in zip(paired[1], plain[1], strict=True))


def peaks(recipe: Recipe) -> dict[str, int]:
    """Bytes that forward and backward of a step hold at most, each way."""
    held = {}
    for way in WAYS:
        built = assemble(replace(recipe, parallel=replace(recipe.parallel, overlap=way)), CPU)
        args = batch_of(0, built.meshes), torch.tensor(0.1)
        built.step.step.forward_backward(*args)  # lays out the gradients
        with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as seen:
            built.step.step.forward_backward(*args)
        events = seen.profiler.kineto_results.events()
        held[way] = max(accumulate(event.nbytes() for event in events if event.name() == "[memory]"))
    return held


@pytest.mark.few()
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_pairs_keep_no_more_than_the_schedule(ranks: Any, schedule: str) -> None:
    """Of `dualpipev` no more than without pairs; of others as many microbatches more as `check` says."""
    recipe = recipe_of(SCHEDULES[schedule])
    for rank, held in enumerate(ranks(4, peaks, recipe)):
        number = {}
        for way in WAYS:
            entries = actions_of_recipe(replace(recipe.parallel, overlap=way), NUM_MICROBATCHES)[rank // 2]
            number[way] = max_held(entries, dict.fromkeys(range(4), 1.0))
        assert held["microbatch"] < 1.15 * held["none"] * number["microbatch"] / number["none"]
        assert schedule != "dualpipev" or number["microbatch"] == number["none"]
