"""Make the paths of a recipe absolute, so that its run goes on from any working directory."""

import glob
import os
from dataclasses import replace
from pathlib import Path

from titan_moe.config.data_files import STANDARD_LIBRARY
from titan_moe.config.recipe import Recipe
from titan_moe.config.schema import Table

HUGGING_FACE = "hf:"
WORDS = ("bytes", "plain")
"""Of a tokenizer and of a chat template: no paths, whatever lies in the working directory."""


def with_absolute_paths(recipe: Recipe) -> Recipe:
    """The recipe of a run whose data was found: names of a hub, of file types and of tokenizers stay as they are. The
    run folder too: a recipe in it means its own place."""
    m, d, v, load_from = recipe.model, recipe.data, recipe.validation, recipe.checkpoint.load_from
    prefix = HUGGING_FACE if load_from.startswith(HUGGING_FACE) else ""
    return replace(
        recipe,
        model=replace(m, moe=replace(m.moe, hash_table=_absolute(m.moe.hash_table))),
        data=replace(
            d,
            path=d.path if d.files else _of_source(d.path, d.source),
            files=_absolute(d.files),
            tokenizer=_if_here(d.tokenizer),
            cache_folder=_absolute(d.cache_folder),
            chat=replace(d.chat, template=_if_here(d.chat.template)),
        ),
        validation=replace(
            v,
            path=_of_source(v.path, v.source),
            sets=Table({name: _of_source(path, v.source) for name, path in v.sets.items()}),
        ),
        checkpoint=replace(recipe.checkpoint, load_from=prefix + _if_here(load_from.removeprefix(prefix))),
    )


def _of_source(path: str, source: str) -> str:
    """A path of data. One that is not here is a name, or is not read."""
    is_here = glob.has_magic(path) or Path(path).exists()
    is_name = path == STANDARD_LIBRARY or source == "synthetic"
    return _absolute(path) if is_here and not is_name else path


def _if_here(path: str) -> str:
    return _absolute(path) if path not in WORDS and Path(path).exists() else path


def _absolute(path: str) -> str:
    return os.path.abspath(path) if path else ""
