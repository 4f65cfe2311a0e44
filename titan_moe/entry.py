"""Train and check recipes from Python, as `titan-moe train` and `titan-moe check` do."""

from collections.abc import Sequence
from pathlib import Path

from titan_moe.config import Recipe, RecipeError, load_recipe, refusals
from titan_moe.config.parallel import planning, smallest_world
from titan_moe.plan.check_report import describe


def train(recipe: Recipe | str | Path, overrides: Sequence[str] = ()) -> None:
    """Train a recipe in this process to its last step, resuming if its run folder has a checkpoint.

    In a process that torchrun has started this is one of the ranks. `overrides` are those of the command line, such as
    `--train.steps=50`, for the recipe of a file.

    Raises: RecipeError if the recipe cannot run. SystemExit after Ctrl-C, once the run is saved, and if it diverged.
    """
    from titan_moe.training.trainer import run

    run(_load(recipe, overrides))


def check(
    recipe: Recipe | str | Path, overrides: Sequence[str] = (), *, num_ranks: int | None = None, gpu: str | None = None
) -> str:
    """Return the report of `titan-moe check`: shape, layout, memory and cost of a recipe. Does not import torch.

    By default `num_ranks` is the smallest number that the layout allows, and the peak of a step is compared with the
    memory of GPUs whose kernels were measured.

    Raises: RecipeError with all rules that the recipe breaks.
    """
    with planning():
        loaded = _load(recipe, overrides)
        number = num_ranks or smallest_world(loaded.parallel)
        if problems := refusals(loaded, number):
            raise RecipeError(problems)
        return describe(loaded, number, gpu)


def _load(recipe: Recipe | str | Path, overrides: Sequence[str]) -> Recipe:
    if not isinstance(recipe, Recipe):
        return load_recipe(recipe, overrides)
    if overrides:
        raise TypeError(f"overrides are for the recipe of a file, and got a Recipe with {', '.join(overrides)}")
    return recipe
