"""The slabs of a pipeline rank's arena: one for each microbatch that a stage of it keeps for backward, and a delayed
one for each whose weight gradients are computed later."""

from collections.abc import Mapping
from typing import NamedTuple

from titan_moe.config.recipe import Recipe, num_microbatches
from titan_moe.plan.pipeline.schedules import measure_rank
from titan_moe.plan.pipeline.simulation import max_delayed, max_held
from titan_moe.plan.pipeline.stages import stages_of, stages_of_rank
from titan_moe.plan.pipeline.weight_grads import splits_backward


class ArenaSlabs(NamedTuple):
    """How an arena is divided (kernels/experts/arena.py)."""

    number: int
    """The most (stage, microbatch) pairs in flight, at least 1."""
    num_layers: int
    """MoE layers that one has room for: those of the stage that has most of them."""
    num_delayed: int = 0
    """The most pairs between `backward_input` and `backward_weight`."""


def arena_slabs(recipe: Recipe, rank: int, world_size: int, layers: Mapping[int, int] | None = None) -> ArenaSlabs:
    """The slabs of a pipeline rank. A stage without MoE layers needs none. `layers` are the MoE layers of each stage
    of the rank; without it, those of the recipe's model."""
    p = recipe.parallel
    layers = moe_layers_of(recipe, rank) if layers is None else layers
    most = max(layers.values())
    if p.pp == 1 or not most:
        return ArenaSlabs(1, most)
    with_experts = {stage: 1.0 for stage, num_layers in layers.items() if num_layers}
    of_rank = p, few_microbatches(recipe, world_size), rank, with_experts
    num_delayed = measure_rank(max_delayed, *of_rank) if splits_backward(recipe) else 0
    return ArenaSlabs(round(measure_rank(max_held, *of_rank)), most, round(num_delayed))


def moe_layers_of(recipe: Recipe, rank: int) -> dict[int, int]:
    """The number of MoE layers of each stage of a pipeline rank."""
    model = recipe.model
    if recipe.parallel.pp == 1:
        return {0: model.num_moe_layers}
    moe = {f"layers.{layer}" for layer in range(model.num_layers - model.num_moe_layers, model.num_layers)}
    stages = stages_of(recipe)
    return {stage: len(moe.intersection(stages[stage])) for stage in stages_of_rank(rank, recipe.parallel)}


def few_microbatches(recipe: Recipe, world_size: int) -> int:
    """The microbatches of a step, or fewer with as many in flight."""
    number, pp = num_microbatches(recipe, world_size), recipe.parallel.pp
    return min(number, 4 * pp + number % pp)
