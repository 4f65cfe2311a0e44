"""The settings of a recipe that CUDA graphs cannot capture, with reasons."""

from collections.abc import Iterator

from titan_moe.config.model import ModelConfig
from titan_moe.config.recipe import Recipe, counts_ahead
from titan_moe.config.recompute import RECOMPUTABLE, recompute_of
from titan_moe.config.rules.rule import rule


@rule(
    "a CUDA graph replays its capture without the host",
    "run.device parallel.dispatcher ep cp_kind perf.kernels perf.override.experts memory.recompute "
    "model.moe.aux_losses.global_batch model.mtp.num_depths repeats_layer",
)
def step_can_be_captured(recipe: Recipe, world_size: int) -> Iterator[str]:
    if recipe.run.device == "cpu":
        yield 'run.device = "cpu" has no CUDA graphs'
    if recipe.model.num_moe_layers > 0 and recipe.parallel.facts.reads_host:
        yield f'parallel.dispatcher = "{recipe.parallel.dispatcher}" reads the counts of every layer on the host'
    if recipe.model.num_moe_layers > 0 and recipe.perf.chosen_kernels.experts == "reference":
        yield 'the "reference" experts read their offsets on the host'
    if recipe.parallel.cp > 1 and recipe.parallel.cp_kind == "ring":
        yield (
            'parallel.cp_kind = "ring" overlaps point-to-point messages with its kernels, which has not been tested in '
            "a capture"
        )
    if counts_ahead(recipe, world_size) and recipe.parallel.ep * recipe.parallel.etp > 1:
        yield (
            f"model.moe.aux_losses.global_batch = {recipe.model.moe.aux_losses.global_batch:g} counts the microbatches "
            "of a step ahead, which has not been tested in a capture with experts on several ranks"
        )
    for name in recompute_of(recipe).layers if recipe.model.class_ != ModelConfig.class_ else ():
        if RECOMPUTABLE[name].how == "checkpoint":
            yield (
                f'memory.recompute = "{name}" saves the random state on the host around parts of model.class = '
                f'"{recipe.model.class_}", which may draw random numbers'
            )
