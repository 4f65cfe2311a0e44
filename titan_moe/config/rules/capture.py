"""The settings of a recipe that CUDA graphs cannot capture, with reasons."""

from collections.abc import Iterator

from titan_moe.config.model import ModelConfig
from titan_moe.config.recipe import Recipe
from titan_moe.config.rules.rule import Problem, key_of_kernel, rule


@rule("a CUDA graph replays its capture without the host")
def step_can_be_captured(recipe: Recipe, world_size: int) -> Iterator[str]:
    if recipe.run.device == "cpu":
        yield Problem('run.device = "cpu" has no CUDA graphs', "run.device")
    if recipe.model.num_moe_layers > 0 and recipe.parallel.facts.reads_host:
        problem = f'parallel.dispatcher = "{recipe.parallel.dispatcher}" reads the counts of every layer on the host'
        yield Problem(problem, "parallel.dispatcher ep")
    if recipe.model.num_moe_layers > 0 and recipe.perf.chosen_kernels.experts == "reference":
        yield Problem('the "reference" experts read their offsets on the host', key_of_kernel(recipe, "experts"))
    if recipe.parallel.cp > 1 and recipe.parallel.cp_kind == "ring":
        yield Problem(
            'parallel.cp_kind = "ring" overlaps point-to-point messages with its kernels, which has not been tested in '
            "a capture",
            "parallel.cp_kind",
        )
    if recipe.memory.recompute == "block" and recipe.model.class_ != ModelConfig.class_:
        yield Problem(
            f'memory.recompute = "block" saves the random state on the host around blocks of model.class = '
            f'"{recipe.model.class_}", which may draw random numbers',
            "memory.recompute",
        )
