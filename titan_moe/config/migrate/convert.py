"""Write a recipe from a job of torchtitan, Megatron-Core or Megatron-Bridge: its values in our fields, and comments for
what has no counterpart. No torch is needed."""

import re
from collections.abc import Iterator
from pathlib import Path

from titan_moe.config.migrate.job_file import read_job
from titan_moe.config.migrate.translate import OWNED, Field, Translation, translate, values_of
from titan_moe.config.migrate.values import NAMES
from titan_moe.config.parallel import planning, smallest_world
from titan_moe.config.parse import RecipeError, recipe_of
from titan_moe.config.recipe import Recipe
from titan_moe.config.schema import all_keys, cut, in_toml
from titan_moe.config.ways_out import refusals

NEEDED = {
    "model.vocab_size": "rows of the embedding",
    "model.num_layers": "blocks",
    "model.hidden_size": "width of the residual stream",
    "model.attention.num_heads": "query heads",
    "model.moe.num_experts": "0, as here, makes every layer dense",
    "model.moe.ffn_hidden_size": "width of an expert",
    "train.seq_len_tokens": "tokens of a sequence",
    "train.global_batch_sequences": "sequences of a step",
    "train.micro_batch_sequences": "sequences of a forward on a rank",
    "train.steps": "steps of the run",
    "optim.lr": "peak learning rate",
}
"""What a whole job says: without it the field has our default."""
COLUMN = 44
"""Where comments behind values begin."""
WIDTH = 120


def recipe_of_job(path: Path, num_ranks: int | None = None) -> str:
    """The recipe of a job, as TOML.

    Raises: RecipeError with the line and the word of what contradicts itself or cannot be read.
    """
    dialect, entries = read_job(path, OWNED)
    translation = translate(dialect, entries, num_ranks)
    if translation.problems:
        raise RecipeError([f"{path}: {problem}" for problem in dict.fromkeys(translation.problems)])
    if "model.name" not in translation.fields:
        name = re.sub(r"\W+", "_", path.stem.lower()).strip("_") or "converted"
        translation.fields["model.name"] = Field(name, ())
    recipe = recipe_of(values_of(translation), str(path))
    lines = [f"# From {cut(path.name)}, {NAMES[dialect]}'s names and values; lines are those of that file."]
    lines += [*_verdict(recipe, num_ranks), *_missing(translation), *_comments(translation)]
    return "\n".join([*lines, *_sections(translation)]) + "\n"


def _verdict(recipe: Recipe, num_ranks: int | None) -> Iterator[str]:
    """What `titan-moe check` says of it."""
    with planning():
        problems = refusals(recipe, num_ranks)
    number = num_ranks or smallest_world(recipe.parallel)
    if not problems:
        yield f"# titan-moe check RECIPE.toml --nproc {number} accepts it."
        return
    yield f"# titan-moe check RECIPE.toml --nproc {number} refuses it until this is changed:"
    for problem in problems:
        yield from _wrapped(problem)


def _missing(translation: Translation) -> Iterator[str]:
    missing = {
        key: words
        for key, words in NEEDED.items()
        if key not in translation.fields or all(entry.line == 0 for entry in translation.fields[key].entries)
    }
    for said in (False, True):
        some = {key: words for key, words in missing.items() if (key in translation.fields) == said}
        if some:
            yield "# Its own defaults, for the file does not say them:" if said else "# Missing in the file; set them:"
        for key, words in some.items():
            value = translation.fields[key].value if said else all_keys(Recipe)[key].default
            yield f"#   {key} = {in_toml(value)} ({words})"


def _comments(translation: Translation) -> Iterator[str]:
    if translation.without:
        yield "# Without a counterpart here, and why or what to take:"
    for entry, reason in translation.without:
        yield from _wrapped(f"{entry.in_words}: {reason}")
    if translation.agreeing:
        yield "# So in every recipe:"
        yield from _wrapped(", ".join(dict.fromkeys(cut(entry.written) for entry in translation.agreeing)))


def _wrapped(text: str) -> Iterator[str]:
    """A paragraph of comments."""
    line, start = "#  ", "#     "
    for word in text.split():
        if len(line) + len(word) >= WIDTH and line.strip("# "):
            yield line
            line = start
        line += f" {word}"
    yield line


def _sections(translation: Translation) -> Iterator[str]:
    """Each section with its fields, which may be behind an inner section in the schema."""
    lines: dict[str, list[str]] = {}
    for key in all_keys(Recipe).values():
        found = translation.fields.get(key.dotted)
        if key.is_section:
            lines[key.dotted] = []
        elif found is not None and not (_is_default(found) and found.value == key.default):
            written, comment = f"{key.name} = {in_toml(found.value)}", _source(found)
            lines[key.dotted.rpartition(".")[0]].append(f"{written:<{COLUMN}}{comment}" if comment else written)
    for section, of_section in lines.items():
        if of_section:
            yield from ("", f"[{section}]", *of_section)


def _is_default(found: Field) -> bool:
    return not found.note and all(entry.line == 0 for entry in found.entries)


def _source(found: Field) -> str:
    said = [cut(entry.written) for entry in found.entries if entry.line]
    words = ", ".join(said[:3]) + (", ..." if len(said) > 3 else "")
    if not said and found.entries:
        words = f"{cut(found.entries[0].written)} by default"
    return "  # " + "; ".join(filter(None, [words, found.note])) if words or found.note else ""
