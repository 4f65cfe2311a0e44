"""The settings of a recipe that CUDA graphs cannot capture, with reasons."""

from collections.abc import Iterator

from titan_moe.config.model import ModelConfig
from titan_moe.config.recipe import Recipe
from titan_moe.config.rules.rule import dispatchers_for, key_of_kernel


def obstacles(recipe: Recipe, world_size: int) -> Iterator[str]:
    """Each field that prevents capture, with the reason and a way out."""
    if recipe.run.device == "cpu":
        yield 'run.device = "cpu" has no CUDA graphs; take "cuda"'
    if recipe.model.num_moe_layers > 0 and recipe.parallel.facts.reads_host:
        movers = dispatchers_for(recipe, world_size, lambda facts: facts.moves_rows and not facts.reads_host)
        others = dispatchers_for(recipe, world_size, lambda facts: not facts.moves_rows and not facts.reads_host)
        yield (
            f'parallel.dispatcher = "{recipe.parallel.dispatcher}" reads the counts of every layer on the host; take '
            f"{movers}, or {others} with parallel.ep = 1"
        )
    if recipe.model.num_moe_layers > 0 and recipe.perf.chosen_kernels.experts == "reference":
        key = key_of_kernel(recipe, "experts")
        yield f'the "reference" experts read their offsets on the host; take {key} = "grouped_mm" or "fused"'
    if recipe.parallel.cp > 1 and recipe.parallel.cp_kind == "ring":
        yield (
            'parallel.cp_kind = "ring" overlaps point-to-point messages with its kernels, which has not been tested in '
            'a capture; take "ulysses" or "allgather"'
        )
    if recipe.memory.recompute == "block" and recipe.model.class_ != ModelConfig.class_:
        yield (
            f'memory.recompute = "block" saves the random state on the host around blocks of model.class = '
            f'"{recipe.model.class_}", which may draw random numbers; take "experts" or "none"'
        )
