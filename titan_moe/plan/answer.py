"""What `titan-moe plan` answers: the fastest layouts of a recipe on so many GPUs, or on the fewest that hold it; and
what a layout would be with one thing changed."""

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

from titan_moe.config import RecipeError
from titan_moe.config.recipe import Recipe
from titan_moe.config.recompute import with_entries
from titan_moe.config.rules import check_rules
from titan_moe.config.schema import value_of
from titan_moe.plan.choice.hardware import gpus_here
from titan_moe.plan.search import Result, fewest_ranks, search
from titan_moe.plan.search_report import as_rows, describe_plan, layout_in_words, written_recipe
from titan_moe.plan.search_space import FIXABLE
from titan_moe.plan.what_if import as_rows as rows_of_cases
from titan_moe.plan.what_if import describe_what_if, what_if


class Answer(NamedTuple):
    """The layouts that were found, and for what."""

    recipe: Recipe
    num_ranks: int
    gpu: str
    found: Result

    @property
    def text(self) -> str:
        """A table, with what the best layout wins by."""
        return describe_plan(self.found, self.recipe, self.num_ranks, self.gpu)

    @property
    def json(self) -> str:
        """The rows of the table."""
        return json.dumps(as_rows(self.found, self.num_ranks), indent=1)

    def changed(self, *, as_json: bool) -> str:
        """The best layout as it is, and with one thing changed each; the table alone where nothing fits."""
        if not self.found.found:
            return self.json if as_json else self.text
        first = self.found.found[0]
        cases = what_if(with_entries(first.recipe, first.entries), self.num_ranks, self.gpu)
        head = f"{self.recipe.model.name} on {self.num_ranks:,} x {self.gpu}, the best layout: {layout_in_words(first)}"
        return json.dumps(rows_of_cases(cases), indent=1) if as_json else f"{head}\n{describe_what_if(cases)}"

    def write(self, out: str, file: str | Path | None) -> None:
        """Write a recipe of the best layout, on that of `file`.

        Raises: RecipeError where nothing fits, for a recipe that is no file, and where `out` cannot be written.
        """
        if not self.found.found or file is None:
            raise RecipeError([f"nothing is written to {out}: {self.text}"])
        base = Path(file).resolve()
        try:
            Path(out).write_text(written_recipe(str(base), self.found.found[0], base), encoding="utf-8")
        except OSError as error:
            raise RecipeError([f"--write {out} cannot be written: {error.strerror}"]) from error


def changed(recipe: Recipe, num_ranks: int, gpu: str | None, *, as_json: bool) -> str:
    """A recipe's layout as it is, and with one thing changed each.

    Raises: RecipeError with the rules that it breaks.
    """
    if problems := check_rules(recipe, num_ranks):
        raise RecipeError(list(problems))
    device = gpu or next(iter(gpus_here()), "H100")
    cases = what_if(recipe, num_ranks, device)
    head = f"{recipe.model.name} on {num_ranks:,} x {device}, the recipe's layout"
    return json.dumps(rows_of_cases(cases), indent=1) if as_json else f"{head}\n{describe_what_if(cases)}"


def answer(
    recipe: Recipe,
    given: Sequence[str],
    num_ranks: int,
    gpu: str | None,
    tokens_per_step: int | None,
    top: int,
    *,
    fewest: bool,
) -> Answer:
    """Search. `given` are the keys of overrides: those of `[parallel]` are fixed, and without `memory.recompute` "auto"
    chooses.

    Raises: RecipeError for another number of tokens than whole sequences.
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
    if fewest:
        num_ranks, found = fewest_ranks(recipe, num_ranks, device, fixed)
    else:
        found = search(recipe, num_ranks, device, top, fixed)
    return Answer(recipe, num_ranks, device, found)
