"""The stages of a pipeline: which modules each has, and on which rank it is."""

from collections.abc import Sequence
from itertools import accumulate

from titan_moe.config.parallel import ParallelConfig
from titan_moe.config.pipeline_layout import parse_layout
from titan_moe.config.pipeline_schedules import SCHEDULES
from titan_moe.config.recipe import Recipe
from titan_moe.plan.pipeline.division import divide, even_out_ranks
from titan_moe.plan.pipeline.flops import flops_of_module

PARTS_OF_A_LAYER = 16
"""Of the shortest one: to these, times are rounded when layers are divided."""


def stages_of(recipe: Recipe) -> tuple[tuple[str, ...], ...]:
    """Return the names of the modules of each of the pp * vpp stages, as models/part.py takes them; an empty stage has
    none.

    Raises: ValueError for a layout that does not fit, and for more stages than layers without one.
    """
    num_layers, p = recipe.model.num_layers, recipe.parallel
    num_stages = p.pp * p.vpp
    if p.pp_layout:
        return parse_layout(p.pp_layout, num_layers, num_stages)
    layers = [f"layers.{layer}" for layer in range(num_layers)]
    times, (of_head,) = _rounded_times(recipe, layers), _rounded_times(recipe, ["head"])
    sizes = divide(times, num_stages, of_head)
    if p.vpp > 1:
        ranks = [rank_of_stage(stage, p.pp, p.pp_schedule) for stage in range(num_stages)]
        sizes = even_out_ranks(sizes, times, of_head, ranks)
    ends = accumulate(sizes)
    stages = [layers[end - size : end] for size, end in zip(sizes, ends, strict=True)]
    stages[0].insert(0, "embed")
    stages[-1] += ["norm", "head"]
    return tuple(tuple(stage) for stage in stages)


def _rounded_times(recipe: Recipe, names: Sequence[str]) -> list[int]:
    """FLOPs of modules in parts of a layer's: fine differences of FLOPs say nothing of times."""
    shortest = min(flops_of_module(recipe, f"layers.{layer}").total for layer in range(recipe.model.num_layers))
    return [round(flops_of_module(recipe, name).total / shortest * PARTS_OF_A_LAYER) for name in names]


def rank_of_stage(stage: int, pp: int, schedule: str) -> int:
    """The pipeline rank of a stage."""
    return SCHEDULES[schedule].rank_of(stage, pp)


def stages_on_rank(rank: int, pp: int, vpp: int, schedule: str) -> list[int]:
    """The stages of a pipeline rank, in the order of the model."""
    return [stage for stage in range(pp * vpp) if rank_of_stage(stage, pp, schedule) == rank]


def stages_of_rank(rank: int, parallel: ParallelConfig) -> list[int]:
    """The stages of a pipeline rank of a recipe, in the order of the model."""
    return stages_on_rank(rank, parallel.pp, parallel.vpp, parallel.pp_schedule)
