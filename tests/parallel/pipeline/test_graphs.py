"""Replayed actions of a pipeline are the launched ones, with a recorder that stands for CUDA graphs and their pools.

All cases: python -m pytest tests/parallel/pipeline/test_graphs.py --all-cases
"""

import gc
import math
import weakref
from collections.abc import Callable
from dataclasses import replace
from typing import Any
from unittest import mock

import pytest
import torch
from support import load
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.utils import _pytree as pytree

from titan_moe.compile.cudagraph import Recording
from titan_moe.config import Recipe
from titan_moe.config.parallel import ParallelConfig
from titan_moe.config.perf import MemoryConfig
from titan_moe.config.precision import PrecisionConfig
from titan_moe.dispatch import capacity
from titan_moe.kernels.delayed_weight_grads import WeightGradQueue
from titan_moe.parallel import fsdp, unsharded_experts
from titan_moe.parallel.pipeline import runs
from titan_moe.parallel.pipeline.graphs import OF_STEP, PipelineGraphs
from titan_moe.train import step_runner
from titan_moe.train.build import assemble

one_loss = load("distributed/test_one_loss")

STEPS, RELEASED_BEFORE = 4, 3
"""A launched step, a recording, a replay, another recording."""


class Part(nn.Linear):
    """A stage."""

    def forward(self, x: Tensor, labels_BN: Tensor, document_ids_BN: Tensor | None) -> Tensor:
        return super().forward(x)


def test_released_graphs_are_freed_without_the_collector_of_cycles() -> None:
    """With their input buffers: training disables it for objects that are not young."""

    class Once:
        """A graph that is never replayed."""

        def new_pool(self) -> int:
            return 0

        def record(self, function: Callable[[], Any], pool: int) -> Recording:
            return Recording(lambda: None, lambda: None, function())

    recorder: Any = Once()
    graphs = PipelineGraphs({0: Part(4, 4)}, frozenset(), recorder, WeightGradQueue(), keeps_unsharded=True)
    gc.disable()
    try:
        with mock.patch.object(runs, "fsdp"):
            run = graphs.run_of(0, 0, is_split=True)
            run.forward(torch.ones(2, 4), torch.ones(2, dtype=torch.int64), None, None)
            run.backward(torch.ones(2, 4))
            run.compute()
        held: list[Any] = [run, *graphs.graphs, *(leaf for graph in graphs.graphs for leaf in tensors(graph.inputs))]
        assert len(held) == 7
        held = [weakref.ref(one) for one in held]
        del run
        graphs.release()
        assert [one() for one in held] == [None] * 7
    finally:
        gc.enable()


class StandIn:
    """Runs a function when it is recorded, as a capture does on the host, and its results are those of the first
    replay. Every other replay runs it again, overwrites its results, and makes those of other graphs of its pool NaN.
    """

    def __init__(self, parts: list[nn.Module]) -> None:
        self.parts = parts
        self.replays: list[tuple[int, int]] = []  # by pool and recording
        self.num_pools = 0
        self.pools_of_changes: list[int] = []
        """Of each recording that left parameters or casts otherwise than it found them."""
        self.results: dict[int, list[tuple[int, Tensor]]] = {}  # by pool
        self.recordings: list[Recording] = []

    def run(self, function: Callable[[], Any]) -> Any:
        return function()

    def new_pool(self) -> int:
        self.num_pools += 1
        self.results[self.num_pools] = []
        return self.num_pools

    def record(self, function: Callable[[], Any], pool: int) -> Recording:
        before = states_of(self.parts)
        outputs = function()
        self.pools_of_changes += [pool] if states_of(self.parts) != before else []
        number = len(self.recordings)
        own = tensors(outputs)
        self.results[pool] += [(number, leaf) for leaf in own]
        is_first = True

        def replay() -> None:
            nonlocal is_first
            self.replays.append((pool, number))
            if not is_first:
                for leaf, result in zip(own, tensors(function()), strict=True):
                    leaf.data.copy_(result)
            is_first = False
            for other, leaf in self.results[pool]:
                if other != number:
                    leaf.data.fill_(math.nan)

        self.recordings.append(Recording(replay, lambda: None, outputs))
        return self.recordings[-1]


def states_of(parts: list[nn.Module]) -> list[Any]:
    """Which parameters are sharded, where their gradients are summed, and which casts are kept."""
    groups = [group for part in parts for group in fsdp._groups(part)]
    sums = [[id(parameter.unsharded_accumulated_grad) for parameter in group.fsdp_params] for group in groups]
    casts = [list(cache.copies) for part in parts for cache in unsharded_experts._caches(part)]
    return [*((group.is_sharded, of_group) for group, of_group in zip(groups, sums, strict=True)), *casts]


def tensors(tree: Any) -> list[Tensor]:
    return [leaf for leaf in pytree.tree_leaves(tree) if isinstance(leaf, Tensor)]


def assert_one_at_a_time(graphs: PipelineGraphs, recorder: StandIn) -> None:
    """In each pool of a place, all graphs of a run follow its forward, before any other forward."""
    numbers = {id(recording.replay): number for number, recording in enumerate(recorder.recordings)}
    followed_by = {}
    for (stage, place, is_split), run in graphs.runs.items():
        kinds = [kind for kind in (run.forward, run.backward, run.weight_grads) if kind is not None]
        assert len(kinds) == 2 + is_split
        assert {kind.pool for kind in kinds} == {graphs.pools[stage in graphs.stages_with_experts, place]}
        own = [numbers[id(kind.recording.replay)] for kind in kinds]
        followed_by[own[0]] = own
    for pool in graphs.pools.values():
        seen = [number for other, number in recorder.replays if other == pool]
        while seen and pool != graphs.pools.get(OF_STEP):
            own = followed_by[seen[0]]
            assert seen[: len(own)] == own
            seen = seen[len(own) :]


def train(recipe: Recipe, extent: str) -> dict[str, Any]:
    """Losses, norms, weights and counts after a few steps of one warm-up."""
    torch.manual_seed(0)
    with mock.patch.object(step_runner, "NUM_WARM_UPS", 1):
        run = assemble(recipe, torch.device("cpu"))
        recorder: Any = StandIn(run.parts)
        take = step_runner.StepRunner(run.step.step, run.schedule, extent, lambda: recorder, run.step.control)
    names = "losses", "aux", "norms", "counts", "reruns", "recordings", "held", "replays"
    seen: dict[str, Any] = {name: [] for name in names}
    for step in range(STEPS):
        if step == RELEASED_BEFORE:
            if isinstance(take.captured, PipelineGraphs):
                assert_one_at_a_time(take.captured, recorder)
                pool, number = take.captured.pools.get(OF_STEP), len(take.captured.of_step)
                assert recorder.pools_of_changes == [pool] * number, "no graph of a place changes them"
            take.release()
        num_replays = len(recorder.replays)
        result = take(one_loss.batch_of(step, 1, run.meshes, has_documents=recipe.data.document_attention))
        seen["losses"].append(result.loss.item())
        seen["aux"].append(result.aux_loss.item())
        seen["norms"].append(result.grad_norm.item())
        seen["counts"].append({name: counts.tolist() for name, counts in result.tokens_per_expert.items()})
        seen["reruns"].append(take.num_reruns)
        seen["recordings"].append(take.num_recordings)
        graphs = take.captured.graphs if isinstance(take.captured, PipelineGraphs) else []
        seen["held"].append(sum(graph.recording is not None for graph in graphs))
        seen["replays"].append(len(recorder.replays) - num_replays)
    seen["weights"] = [whole(weight).detach().clone() for part in run.parts for weight in part.parameters()]
    return seen


def whole(x: Tensor) -> Tensor:
    return x.full_tensor() if isinstance(x, DTensor) else x


BF16 = PrecisionConfig("bf16", "fp32", "fp32")
ONE, LOOP, V = {"pp": 2}, {"pp": 2, "vpp": 2}, {"pp": 2, "vpp": 2, "accumulate_unsharded": True}
EP2 = {"ep": 2, "dispatcher": "allgather", "expert_rank_capacity_factor": 0.0}
CASES: dict[str, tuple[int, str, dict[str, Any], dict[str, Any]]] = {
    # name: ranks, model, parallel, changes to the recipe
    "1f1b": (4, "gqa-tied", {**ONE, **EP2}, {"precision": BF16, "kernels": "grouped_mm"}),
    "1f1b_sharded_experts": (4, "mla", {**ONE, "dp_shard": 2}, {"memory": MemoryConfig("block")}),
    "1f1b_unsharded": (
        4,
        "gqa-tied",
        {**ONE, **EP2, "accumulate_unsharded": True},
        {"precision": BF16, "kernels": "grouped_mm"},
    ),
    "1f1b_gathers_codes": (
        2,
        "gqa",
        {**ONE, "accumulate_unsharded": True},
        {"precision": PrecisionConfig("fp32", backend="emulated", linears="fp8_tensorwise", all_gather="format")},
    ),
    "interleaved_1f1b": (
        2,
        "gqa-window",
        {**LOOP, "pp_schedule": "interleaved_1f1b", "pp_layout": "E|tttt||L"},
        {"precision": BF16, "kernels": "grouped_mm"},
    ),
    "interleaved_zero_bubble": (2, "gqa", {**V, "pp_schedule": "interleaved_zero_bubble"}, {}),
    "zbv": (2, "mla-latent-gate", {**V, "pp_schedule": "zbv"}, {}),
    "zbv_tp": (4, "gqa", {**V, "pp_schedule": "zbv", "tp": 2}, {}),
    "dualpipev": (2, "gqa", {**V, "pp_schedule": "dualpipev"}, {}),
}


@pytest.mark.few("interleaved_1f1b", "zbv")
@pytest.mark.parametrize("name", CASES)
def test_replayed_actions_are_the_launched_ones(ranks: Any, name: str) -> None:
    num_ranks, model, parallel, changes = CASES[name]
    recipe = one_loss.split_recipe(ParallelConfig(**parallel), model, **changes)
    recipe = replace(
        recipe,
        model=replace(recipe.model, num_layers=max(recipe.model.num_layers, parallel.get("vpp", 1) * 2)),
        train=replace(recipe.train, micro_batch_sequences=1),
    )
    launched, replayed = (ranks(num_ranks, train, recipe, extent) for extent in ("off", "microbatch"))
    for one, other in zip(launched, replayed, strict=True):
        recordings, replays, _ = (other.pop(name) for name in ("recordings", "replays", "held"))
        assert {number for name in ("recordings", "replays", "held") for number in one.pop(name)} == {0}
        assert recordings[0] == 0 < recordings[1] == recordings[2]
        assert recordings[3] == 2 * recordings[1], "all are recorded again"
        assert replays[0] == 0 and recordings[1] < replays[1] == replays[2] == replays[3]
        weights, others = one.pop("weights"), other.pop("weights")
        assert one == other and all(map(torch.equal, weights, others))


def train_bounded(recipe: Recipe, extent: str) -> dict[str, Any]:
    """The same with slots that are bounded to the slot."""
    with mock.patch.object(capacity, "SLOTS_ALIGNMENT", 1):
        return train(recipe, extent)


def test_steps_that_are_taken_again_are_launched_and_then_recorded_anew(ranks: Any) -> None:
    parallel = ParallelConfig(**{**ONE, **EP2, "expert_rank_capacity_factor": 1.4})
    recipe = one_loss.recipe(parallel)
    launched, replayed = (ranks(4, train_bounded, recipe, extent) for extent in ("off", "microbatch"))
    for one, other in zip(launched, replayed, strict=True):
        for name in ("losses", "aux", "norms", "counts", "reruns"):
            assert one[name] == other[name]
        assert all(map(torch.equal, one["weights"], other["weights"]))
        number = other["recordings"][1]
        assert other["reruns"] == [0, 0, 1, 1], "a replayed step"
        assert other["recordings"] == [0, number, number, 2 * number] and other["held"] == [0, number, 0, number]
