"""The data that validation has of its own: `validation.path` and `validation.sets`."""

from collections.abc import Sequence
from dataclasses import replace
from itertools import accumulate
from pathlib import Path
from typing import Any

from titan_moe.config import Recipe
from titan_moe.config.data_files import find
from titan_moe.config.train import DataConfig, ValidationConfig
from titan_moe.data.bad_rows import BadRows
from titan_moe.data.cache import Cache
from titan_moe.data.corpora import open_divided
from titan_moe.data.sample import Sample
from titan_moe.data.samples import IndexedSamples
from titan_moe.data.tokenizer import Tokenizer


class ChainedSamples:
    """The samples of several sets, one set after the other."""

    def __init__(self, parts: Sequence[IndexedSamples]) -> None:
        self._parts, self._ends = parts, list(accumulate(map(len, parts)))

    def __len__(self) -> int:
        return self._ends[-1]

    def __getitem__(self, index: int) -> Sample:
        number = next(number for number, end in enumerate(self._ends) if index < end)
        return self._parts[number][index - self._ends[number] + len(self._parts[number])]


def open_validation(
    recipe: Recipe, tokenizer: Tokenizer, cache: Cache
) -> tuple[IndexedSamples | None, dict[str, IndexedSamples]]:
    """Open the data that validation has of its own.

    Returns: the samples of `validation.path`, and those of each set. Without a path and anything held out, those of all
    sets are also the first ones: a prompt is taken from them, and `titan-moe evaluate` reads them.
    Raises: ValueError or ImportError, each naming the field of `[validation]` to change.
    """
    validation = recipe.validation
    sets: dict[str, IndexedSamples] = {}
    for name, path in validation.sets.items():
        sets[name] = _open(recipe, path, f"validation.sets.{name}", tokenizer, cache)
    if validation.path:
        return _open(recipe, validation.path, "validation.path", tokenizer, cache), sets
    is_held_out = recipe.data.holdout_fraction > 0
    return None if is_held_out else ChainedSamples(list(sets.values())), sets


def _open(recipe: Recipe, path: str, key: str, tokenizer: Tokenizer, cache: Cache) -> IndexedSamples:
    """The samples of all data of a path."""
    own: dict[str, Any] = {"source": recipe.validation.source, "path": path}
    data = replace(recipe.data, **own, files="", is_streamed=False, holdout_fraction=0.0)
    if recipe.validation.source == "datasets" and Path(path).expanduser().is_file():
        way_out = 'validation.source = "auto" reads .jsonl, .json, .parquet and .arrow'
        raise ValueError(f'{key} = {path!r} is a file, and validation.source = "datasets" takes hub names; {way_out}')
    try:
        data = replace(data, split=_split(recipe, path, key))
        return open_divided(replace(recipe, data=data), tokenizer, cache, BadRows(data.bad_rows), 0.0)[1]
    except (ValueError, FileNotFoundError, ImportError) as error:
        words = str(error).replace("data.path", key).replace("data.source", "validation.source")
        words = words.replace("training tokens", "tokens").replace("data.split", "validation.split")
        raise (ImportError if isinstance(error, ImportError) else ValueError)(words) from error


def _split(recipe: Recipe, path: str, key: str) -> str:
    """The split of a path. The default is only of hub names and of folders with splits."""
    validation = recipe.validation
    if validation.split != ValidationConfig.split or validation.source == "datasets":
        return validation.split
    if validation.source != "auto":
        return DataConfig.split
    found = find(path, key, validation.split)
    return validation.split if found.kind == "datasets" or found.split == validation.split else DataConfig.split
