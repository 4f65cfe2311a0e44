"""Pipelines over symmetric memory: one buffer serves all stages and microbatches of a rank, and the arena has a slab
for each that is in flight.

Ranks are those of symm_mem/test_dispatcher.py: processes that map each other's files, in Triton's interpreter.
"""

from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
from support import load
from torch import Tensor

from titan_moe.config import Recipe
from titan_moe.config.parallel import ParallelConfig
from titan_moe.config.perf import MemoryConfig
from titan_moe.dispatch import capacity as capacity_module
from titan_moe.dispatch.capacity import ExpertCapacity
from titan_moe.dispatch.symm_mem import backward as symm_mem_backward
from titan_moe.kernels.experts.arena import Arena
from titan_moe.plan.cost import loads
from titan_moe.training.step_runner import StepRunner

pytestmark = pytest.mark.interpreted
one_loss, over_memory = load("distributed/test_one_loss"), load("distributed/test_symm_mem")

PP2_EP2 = replace(over_memory.EP2, pp=2, pp_layout="Ett|tL")
V = {"vpp": 2, "pp_schedule": "zbv", "accumulate_unsharded": True, "pp_layout": "Ett|t|t|tL"}
"""Every stage has experts."""
PAIRS = {**V, "pp_schedule": "dualpipev", "overlap": "microbatch"}
TWO_NODES = {"dispatcher": "hierarchical_symm_mem", "ep_ranks_per_node": 1}


def deep(recipe: Recipe, num_layers: int, num_microbatches: int = 4) -> Recipe:
    """Of a dense layer and others; two ranks share the sequences."""
    train = replace(recipe.train, micro_batch_sequences=one_loss.SEQUENCES // 2 // num_microbatches)
    return replace(recipe, model=replace(recipe.model, num_layers=num_layers), train=train)


def joined(answers: list[dict[str, Any]]) -> list[Any]:
    """The traces of four ranks, with the gradients of both stages."""
    traces = [one_loss.Trace(**fields) for fields in answers]
    for rank, trace in enumerate(traces):
        trace.grads = traces[rank % 2].grads | traces[rank % 2 + 2].grads
    return traces


@pytest.mark.few("dualpipev-pairs")
@pytest.mark.parametrize(
    ("changes", "num_layers"),
    [({}, 3), ({**PAIRS, **TWO_NODES}, 5)],
    ids=["1f1b", "dualpipev-pairs"],
)
def test_pipelines_share_memory_and_train_as_one_process(
    ranks: Any, tmp_path: Path, changes: dict[str, Any], num_layers: int
) -> None:
    alone = ranks(1, one_loss.train, deep(one_loss.recipe(ParallelConfig()), num_layers), -1, 1)[0]
    candidate = deep(one_loss.recipe(replace(PP2_EP2, **changes)), num_layers)
    answers = ranks(4, over_memory.on_files, str(tmp_path), "one_loss", "train", candidate, -1, 1)
    for trace in joined(answers):
        one_loss.assert_same(trace, one_loss.Trace(**alone), 1e-9)


def test_experts_of_one_stage_are_computed_again(ranks: Any, tmp_path: Path) -> None:
    """All of the first stage, which needs no slab then; the second keeps its rows in some."""
    alone = ranks(1, one_loss.train, deep(over_memory.in_plain_torch(), 3), -1, 1)[0]
    bounded = replace(PP2_EP2, expert_rank_capacity_factor=4.0)
    candidate = over_memory.with_fused_experts(bounded, memory=MemoryConfig(("experts:1-1",)))
    answers = ranks(4, over_memory.on_files, str(tmp_path), "one_loss", "train", deep(candidate, 3), -1, 1)
    for trace in joined(answers):
        one_loss.assert_same(trace, one_loss.Trace(**alone), 2e-5)


def train_in_slabs(candidate: Recipe) -> tuple[dict[str, Any], tuple[int, set[int], int, set[int]], int, int]:
    """A trace; the number of slabs and those that forwards used, and the same of delayed ones; the layers whose weight
    gradients were delayed; and steps that were taken again."""
    capacities, used, used_delayed, delay = [], set(), set(), Arena.delay

    def start(capacity: ExpertCapacity) -> None:
        capacities.append(capacity)
        used.add(capacity.slab)
        capacity.arena.start_forward(capacity.slab)

    def delay_in(arena: Arena, base: Tensor) -> Tensor:
        used_delayed.add(arena.delayed_slab)
        return delay(arena, base)

    with (
        mock.patch.object(capacity_module, "SLOTS_ALIGNMENT", 1),
        mock.patch.object(loads, "SLOTS_ALIGNMENT", 1),
        mock.patch.object(ExpertCapacity, "start_forward", start),
        mock.patch.object(Arena, "delay", delay_in),
        mock.patch.object(symm_mem_backward, "backward_weight", side_effect=symm_mem_backward.backward_weight) as late,
        mock.patch.object(StepRunner, "_take_again", autospec=True, side_effect=StepRunner._take_again) as again,
    ):
        fields = one_loss.train(candidate, -1, 1)
    arena = capacities[0].arena
    slabs = arena.num_slabs, used, arena.num_delayed_slabs, used_delayed
    return fields, slabs, late.call_count, again.call_count


def follow_load(folder: str, candidate: Recipe) -> tuple[dict[str, Any], list[float], int, int]:
    """A trace of two steps, the capacity factor after each, how often memory was opened, and the layers whose weight
    gradients were delayed."""
    map_files = partial(over_memory.mapped_files.map_files, folder)
    with (
        mock.patch.object(over_memory.symm_memory, "open_symm_memory", side_effect=map_files) as opened,
        mock.patch.object(symm_mem_backward, "backward_weight", side_effect=symm_mem_backward.backward_weight) as late,
    ):
        fields, _, factors, _ = over_memory.follow_load(candidate, 2)
        return fields, factors, opened.call_count, late.call_count


def test_a_stage_without_experts_follows_the_load_of_the_others(ranks: Any, tmp_path: Path) -> None:
    """It has an empty arena and no memory to share, and decides as they do: a step without a bound, then one with rows
    in the arena."""

    def dense_first(recipe: Recipe) -> Recipe:
        recipe = deep(recipe, 3, num_microbatches=2)
        return replace(recipe, model=replace(recipe.model, num_dense_layers=2))

    alone = ranks(1, one_loss.train, dense_first(over_memory.in_plain_torch()), -1, 2)[0]
    auto = replace(PP2_EP2, expert_rank_capacity_factor="auto")
    answers = ranks(4, follow_load, str(tmp_path), dense_first(over_memory.with_fused_experts(auto)))
    for trace in joined([fields for fields, *_ in answers]):
        one_loss.assert_same(trace, one_loss.Trace(**alone), 2e-5)
    assert [num_opened for *_, num_opened, _ in answers] == [0, 0, 1, 1]
    (factors,) = {tuple(factors) for _, factors, *_ in answers}
    assert min(factors) >= 1.0


over_memory.slabs = SimpleNamespace(train_in_slabs=train_in_slabs)


def train_on_files(folder: str, candidate: Recipe) -> Any:
    return over_memory.on_files(folder, "slabs", "train_in_slabs", candidate)


@pytest.mark.few("zbv")
@pytest.mark.parametrize(
    ("changes", "num_layers", "num_slabs", "num_delayed"),
    [({"overlap": "tile"}, 3, (2, 1), (0, 0)), (V, 5, (4, 4), (2, 4))],
    ids=["1f1b-tile", "zbv"],
)
def test_pipelines_have_slabs_in_an_arena_and_train_as_one_process(
    ranks: Any,
    tmp_path: Path,
    changes: dict[str, Any],
    num_layers: int,
    num_slabs: tuple[int, int],
    num_delayed: tuple[int, int],
) -> None:
    """Four microbatches of two layers with experts on each rank, whose split backwards delay their weight gradients."""
    alone = ranks(1, one_loss.train, deep(over_memory.in_plain_torch(), num_layers), -1, 1)[0]
    bounded = replace(PP2_EP2, expert_rank_capacity_factor=4.0, **changes)
    answers = ranks(4, train_on_files, str(tmp_path), deep(over_memory.with_fused_experts(bounded), num_layers))
    for trace in joined([fields for fields, *_ in answers]):
        one_loss.assert_same(trace, one_loss.Trace(**alone), 2e-5)
    for rank, (_, slabs, num_late, num_reruns) in enumerate(answers):
        number, delayed = num_slabs[rank // 2], num_delayed[rank // 2]
        assert slabs == (number, set(range(number)), delayed, set(range(delayed))) and num_reruns == 0
        assert num_late == (8 if delayed else 0)


@pytest.mark.few()
def test_weight_gradients_are_delayed_from_the_first_bounded_step_on(ranks: Any, tmp_path: Path) -> None:
    alone = ranks(1, one_loss.train, deep(over_memory.in_plain_torch(), 5, 2), -1, 2)[0]
    auto = replace(PP2_EP2, expert_rank_capacity_factor="auto", **V)
    answers = ranks(4, follow_load, str(tmp_path), deep(over_memory.with_fused_experts(auto), 5, 2))
    for trace in joined([fields for fields, *_ in answers]):
        one_loss.assert_same(trace, one_loss.Trace(**alone), 2e-5)
    assert [num_late for *_, num_late in answers] == [4] * 4, "none in the step without a bound"


def test_a_step_that_overflows_delayed_slabs_is_taken_again(ranks: Any, tmp_path: Path) -> None:
    """The layers that do not fit lie at the beginning of their slabs."""
    alone = ranks(1, one_loss.train, deep(over_memory.in_plain_torch(), 5, 2), -1, 1)[0]
    small = replace(PP2_EP2, expert_rank_capacity_factor=0.5, **{**V, "pp_layout": "Et|tt|t|tL"})
    answers = ranks(4, train_on_files, str(tmp_path), deep(over_memory.with_fused_experts(small), 5, 2))
    for trace in joined([fields for fields, *_ in answers]):
        one_loss.assert_same(trace, one_loss.Trace(**alone), 2e-5)
    assert all(num_late > 0 and num_reruns == 1 for *_, num_late, num_reruns in answers)


@pytest.mark.few()
@pytest.mark.parametrize("changes", [{"pp_layout": "Ett|tL"}, V], ids=["1f1b", "zbv"])
def test_a_step_in_which_a_layer_overflows_is_taken_again_in_pieces(
    ranks: Any, tmp_path: Path, changes: dict[str, Any]
) -> None:
    """All slabs have room for their layers. Weight gradients are delayed in the void step alone."""
    num_layers, is_split = (5, True) if changes == V else (3, False)
    alone = ranks(1, one_loss.train, deep(over_memory.in_plain_torch(), num_layers, 2), -1, 1)[0]
    bounded = replace(PP2_EP2, expert_rank_capacity_factor=4.0, expert_layer_capacity_factor=1.0, **changes)
    answers = ranks(4, train_on_files, str(tmp_path), deep(over_memory.with_fused_experts(bounded), num_layers, 2))
    for trace in joined([fields for fields, *_ in answers]):
        one_loss.assert_same(trace, one_loss.Trace(**(alone | {"grads": trace.grads})), 2e-5)
    assert [(num_late, num_reruns) for *_, num_late, num_reruns in answers] == [(4 if is_split else 0, 1)] * 4
