"""What of a recipe cannot be recorded as a CUDA graph, and why."""

from collections.abc import Iterator

from titan_moe.config.dispatchers import dispatchers_that
from titan_moe.config.model import ModelConfig
from titan_moe.config.recipe import Recipe


def obstacles(recipe: Recipe) -> Iterator[str]:
    """Name each field that stands in the way, with the reason and a way out; nothing where all can be recorded.

    They lie in forward and backward, so they are the same for a microbatch and for a whole step.
    """
    if recipe.run.device == "cpu":
        yield 'run.device = "cpu" has no CUDA graphs; take "cuda"'
    if recipe.model.num_moe_layers > 0:
        yield from _obstacles_of_experts(recipe)
    if recipe.memory.recompute == "block" and recipe.model.class_ != ModelConfig.class_:
        yield (
            f'memory.recompute = "block" asks the host for the random state around blocks of model.class = '
            f'"{recipe.model.class_}", which may draw from it; take "experts" or "none"'
        )


def _obstacles_of_experts(recipe: Recipe) -> Iterator[str]:
    if recipe.parallel.facts.reads_host:
        yield (
            f'parallel.dispatcher = "{recipe.parallel.dispatcher}" reads the counts of every layer on the host; take '
            f"{without_host_reads()}"
        )
    if recipe.perf.chosen_kernels.experts == "reference":
        yield 'the "reference" experts read their borders on the host; take perf.kernels = "grouped_mm" or "fused"'


def without_host_reads() -> str:
    """List the dispatchers that a graph can contain, for a way out."""
    movers = dispatchers_that(lambda facts: facts.moves_rows and not facts.reads_host)
    others = dispatchers_that(lambda facts: not facts.moves_rows and not facts.reads_host)
    return f"{movers}, or {others} with parallel.ep = 1"
