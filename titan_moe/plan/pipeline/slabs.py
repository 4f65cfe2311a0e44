"""The slabs of a pipeline rank's arena: one for each microbatch that a stage of it keeps for backward, and a delayed
one for each whose weight gradients are computed later."""

from collections.abc import Mapping
from typing import NamedTuple

from titan_moe.config.recipe import Recipe, num_microbatches
from titan_moe.plan.pipeline.schedules import measure_rank
from titan_moe.plan.pipeline.simulation import max_delayed, max_held
from titan_moe.plan.pipeline.weight_grads import splits_backward

FEWEST = 6
"""Microbatches after which 2 ranks have as many sent messages as ever."""


class ArenaSlabs(NamedTuple):
    """How an arena is divided (kernels/experts/arena.py)."""

    number: int
    """The most (stage, microbatch) pairs in flight, at least 1."""
    num_layers: int
    """MoE layers that one has room for: those of the stage that has most of them."""
    num_delayed: int = 0
    """The most pairs between `backward_input` and `backward_weight`."""
    num_hidden_layers: int | None = None
    """MoE layers whose hidden states one has room for; None for all."""


def arena_slabs(
    recipe: Recipe, rank: int, world_size: int, moe_layers: Mapping[int, int], hidden_layers: Mapping[int, int]
) -> ArenaSlabs:
    """The slabs of a pipeline rank whose stages have so many MoE layers, and so many of them whose hidden states are
    kept. A stage without any needs none."""
    p, most, most_hidden = recipe.parallel, max(moe_layers.values()), max(hidden_layers.values())
    if p.pp == 1 or not most:
        return ArenaSlabs(1, most, num_hidden_layers=most_hidden)
    with_experts = {stage: 1.0 for stage, number in moe_layers.items() if number}
    of_rank = p, few_microbatches(recipe, world_size), rank, with_experts
    num_delayed = measure_rank(max_delayed, *of_rank) if splits_backward(recipe) else 0
    return ArenaSlabs(round(measure_rank(max_held, *of_rank)), most, round(num_delayed), most_hidden)


def few_microbatches(recipe: Recipe, world_size: int) -> int:
    """The microbatches of a step, or fewer with as many in flight, and as many messages."""
    number, pp = num_microbatches(recipe, world_size), recipe.parallel.pp
    return min(number, max(2 * pp, FEWEST) + number % pp)
