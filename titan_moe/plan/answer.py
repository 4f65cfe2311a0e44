"""What `titan-moe plan` answers: the fastest layouts of a recipe on so many GPUs, or on the fewest that hold it."""

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from titan_moe.config import RecipeError
from titan_moe.config.parallel import planning
from titan_moe.config.recipe import Recipe
from titan_moe.config.schema import value_of
from titan_moe.plan.choice.hardware import gpus_here
from titan_moe.plan.search import fewest_ranks, search
from titan_moe.plan.search_report import as_rows, describe_plan, written_recipe
from titan_moe.plan.search_space import FIXABLE


def answer(
    recipe: Recipe,
    given: Sequence[str],
    num_ranks: int,
    gpu: str | None,
    tokens_per_step: int | None,
    top: int,
    as_json: bool,
    write: str | None,
    fewest: bool,
    file: str | Path | None,
) -> str:
    """The table of layouts, or its rows as JSON. `given` are the keys of overrides: those of `[parallel]` are fixed,
    and without `memory.recompute` "auto" chooses. `write` names a new recipe beside that of `file`.

    Raises: RecipeError for another number of tokens than whole sequences, and where nothing fits that was to be
    written.
    """
    length = recipe.train.seq_len_tokens
    if tokens_per_step is not None:
        if tokens_per_step % length:
            raise RecipeError(
                [f"--tokens-per-step {tokens_per_step} is no multiple of train.seq_len_tokens = {length}"]
            )
        recipe = replace(recipe, train=replace(recipe.train, global_batch_sequences=tokens_per_step // length))
    if "memory.recompute" not in given:
        recipe = replace(recipe, memory=replace(recipe.memory, recompute=("auto",)))
    device = gpu or next(iter(gpus_here()), "H100")
    fixed = {key.rpartition(".")[2]: value_of(recipe, key) for key in given if key in FIXABLE}
    with planning():
        number = num_ranks
        if fewest:
            number, result = fewest_ranks(recipe, num_ranks, device, fixed)
        else:
            result = search(recipe, num_ranks, device, top, fixed)
        text = describe_plan(result, recipe, number, device)
        if write is not None:
            if not result.found or file is None:
                raise RecipeError([f"nothing is written to {write}: {text}"])
            base = Path(file).resolve()
            Path(write).write_text(written_recipe(str(base), result.found[0], base), encoding="utf-8")
        return json.dumps(as_rows(result, number), indent=1) if as_json else text
