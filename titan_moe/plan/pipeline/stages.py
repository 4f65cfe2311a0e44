"""The stages of a pipeline: which modules each has, and on which rank it is."""

from functools import lru_cache
from itertools import accumulate

from titan_moe.config.model import ModelConfig
from titan_moe.config.parallel import ParallelConfig
from titan_moe.config.pipeline_layout import parse_layout
from titan_moe.config.pipeline_schedules import SCHEDULES
from titan_moe.config.recipe import Recipe
from titan_moe.plan.pipeline.division import divide, even_out_ranks
from titan_moe.plan.pipeline.flops import flops_of

PARTS_OF_A_LAYER = 16
"""Of the shortest one: to these, times are rounded when layers are divided."""


def stages_of(recipe: Recipe) -> tuple[tuple[str, ...], ...]:
    """Return the names of the modules of each of the pp * vpp stages, as models/part.py takes them; an empty stage has
    none.

    Raises: ValueError for a layout that does not fit, and for more stages than layers without one.
    """
    p = recipe.parallel
    if p.pp_layout:
        return parse_layout(p.pp_layout, recipe.model.num_layers, p.pp * p.vpp, recipe.model.mtp.num_layers)
    return _divided(recipe.model, recipe.train.seq_len_tokens, p.pp, p.vpp, p.pp_schedule)


@lru_cache(maxsize=128)  # a report asks for the stages of each rank many times, a search for those of many pipelines
def _divided(model: ModelConfig, seq_len_tokens: int, pp: int, vpp: int, schedule: str) -> tuple[tuple[str, ...], ...]:
    layers = [f"layers.{layer}" for layer in range(model.num_layers)]
    flops = [flops_of(model, seq_len_tokens, name).total for name in (*layers, "head")]
    mtp = [f"layers.{layer}" for layer in model.mtp_layers]  # on the stage of the head, whose losses they have
    flops[-1] += sum(flops_of(model, seq_len_tokens, name).total for name in mtp)
    *times, of_head = (round(total / min(flops[:-1]) * PARTS_OF_A_LAYER) for total in flops)
    sizes = divide(times, pp * vpp, of_head)
    if vpp > 1:
        ranks = [rank_of_stage(stage, pp, schedule) for stage in range(pp * vpp)]
        sizes = even_out_ranks(sizes, times, of_head, ranks)
    stages = [layers[end - size : end] for size, end in zip(sizes, accumulate(sizes), strict=True)]
    stages[0].insert(0, "embed")
    stages[-1] += [*mtp, "norm", "head"]
    return tuple(tuple(stage) for stage in stages)


def rank_of_stage(stage: int, pp: int, schedule: str) -> int:
    """The pipeline rank of a stage."""
    return SCHEDULES[schedule].rank_of(stage, pp)


def stages_on_rank(rank: int, pp: int, vpp: int, schedule: str) -> list[int]:
    """The stages of a pipeline rank, in the order of the model."""
    return [stage for stage in range(pp * vpp) if rank_of_stage(stage, pp, schedule) == rank]


def stages_of_rank(rank: int, parallel: ParallelConfig) -> list[int]:
    """The stages of a pipeline rank of a recipe, in the order of the model."""
    return stages_on_rank(rank, parallel.pp, parallel.vpp, parallel.pp_schedule)
