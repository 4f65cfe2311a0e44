"""The places of a pipeline rank: one for each microbatch that a stage of it keeps for backward, in the arena and as
memory pools of CUDA graphs, and in the arena a delayed one for each whose weight gradients are computed later."""

from collections import Counter, defaultdict
from collections.abc import Mapping
from itertools import count
from typing import NamedTuple

from titan_moe.config.recipe import Recipe, num_microbatches
from titan_moe.plan.pipeline.action import flat
from titan_moe.plan.pipeline.schedules import entries_of
from titan_moe.plan.pipeline.simulation import max_delayed, max_held
from titan_moe.plan.pipeline.stages import stages_of, stages_of_rank
from titan_moe.plan.pipeline.weight_grads import obstacle_of_experts, splits_backward


class ArenaPlaces(NamedTuple):
    """How an arena is divided (kernels/experts/arena.py)."""

    number: int
    """The most (stage, microbatch) pairs in flight, at least 1."""
    num_layers: int
    """MoE layers that one has room for: those of the stage that has most of them."""
    num_delayed: int = 0
    """The most pairs between `backward_input` and `backward_weight`."""


def arena_places(recipe: Recipe, rank: int, world_size: int, layers: Mapping[int, int] | None = None) -> ArenaPlaces:
    """The places of a pipeline rank. A stage without MoE layers needs none. `layers` are the MoE layers of each stage
    of the rank; without it, those of the recipe's model."""
    p = recipe.parallel
    layers = moe_layers_of(recipe, rank) if layers is None else layers
    most = max(layers.values())
    if p.pp == 1 or not most:
        return ArenaPlaces(1, most)
    entries = entries_of(p, num_microbatches(recipe, world_size))[rank]
    with_experts = {stage: 1.0 for stage, num_layers in layers.items() if num_layers}
    delays = splits_backward(recipe) and obstacle_of_experts(recipe) is None
    num_delayed = max_delayed(entries, with_experts) if delays else 0
    return ArenaPlaces(round(max_held(entries, with_experts)), most, round(num_delayed))


def graph_pools(recipe: Recipe, rank: int, world_size: int) -> Counter[frozenset[int]]:
    """Count the memory pools of a pipeline rank whose actions are replayed, by the stages that use them. There is one
    for each place of stages with MoE layers, and of the others with modules (parallel/pipeline/places.py)."""
    stages, layers = stages_of(recipe), moe_layers_of(recipe, rank)
    taken: dict[tuple[int, int], tuple[bool, int]] = {}
    users: dict[tuple[bool, int], set[int]] = defaultdict(set)
    for action in flat(entries_of(recipe.parallel, num_microbatches(recipe, world_size))[rank]):
        _, stage, microbatch = action
        if action.kind == "forward" and stages[stage]:
            has_experts, in_use = layers[stage] > 0, set(taken.values())
            pool = next(pool for place in count() if (pool := (has_experts, place)) not in in_use)
            taken[stage, microbatch] = pool
            users[pool].add(stage)
        if action.frees:
            taken.pop((stage, microbatch), None)
    return Counter(frozenset(of_pool) for of_pool in users.values())


def moe_layers_of(recipe: Recipe, rank: int) -> dict[int, int]:
    """The number of MoE layers of each stage of a pipeline rank."""
    model = recipe.model
    if recipe.parallel.pp == 1:
        return {0: model.num_moe_layers}
    moe = {f"layers.{layer}" for layer in range(model.num_layers - model.num_moe_layers, model.num_layers)}
    stages = stages_of(recipe)
    return {stage: len(moe.intersection(stages[stage])) for stage in stages_of_rank(rank, recipe.parallel)}
