"""Which parameters a run trains, by the table of the model's modules: `optim.trainable`.

A frozen parameter has no gradient, no moments and no master, and its weight gradient is not computed. What lies before
the first trained parameter has no backward at all.
"""

import re
from collections.abc import Iterable, Iterator, Mapping
from difflib import get_close_matches
from fnmatch import fnmatchcase
from functools import lru_cache
from typing import NamedTuple

from titan_moe.config.model import ModelConfig
from titan_moe.config.modules import Module, modules_of
from titan_moe.config.recipe import Recipe

Patterns = tuple[str, ...]
NOTHING: Patterns = ("",)
"""Patterns that match no name; an empty list means all."""
NUM_NEAR = 3
"""Names that a message suggests."""


class Passes(NamedTuple):
    """What backward computes of a module of a layer."""

    of_input: bool  # the gradient of its input
    share: float  # of its parameters, those with gradients


def trains_all(model: ModelConfig, patterns: Patterns) -> bool:
    """Whether all parameters of a model train."""
    return not patterns and not model.adapter.is_used


def trains(name: str, patterns: Patterns) -> bool:
    """Whether a parameter trains, by its name in the model."""
    return not patterns or any(fnmatchcase(name, pattern) for pattern in patterns)


def names_of(row: Module, layer: int | None) -> Iterator[tuple[str, int]]:
    """The parameters of a module in a layer, and their sizes."""
    prefix = "" if layer is None else f"layers.{layer}."
    for attribute, size in row.tensors or (("weight", row.parameters),):
        yield f"{prefix}{row.owner or row.path}{attribute and '.'}{attribute}", size


@lru_cache(maxsize=512)
def passes_of(
    model: ModelConfig, patterns: Patterns, *, follows: bool = False
) -> Mapping[tuple[str, int | None], Passes]:
    """What backward computes of each module, by path and layer. `follows` says that a stage before the model's modules
    wants the gradient of their input. What follows a router is as if its rows had gradients too."""
    result: dict[tuple[str, int | None], Passes] = {}
    exact, wild = _apart(patterns)
    for row, layer in rows_in_order(model):
        of_row = list(names_of(row, layer))
        if row.region == "head" and row.parameters == 0 and model.embeddings_are_tied:
            of_row = [("embed.weight", 1)]
        total = sum(size for _, size in of_row)
        if row.is_adapter or trains_all(model, patterns):
            trained = total
        else:
            trained = sum(size for name, size in of_row if name in exact or (wild and trains(name, wild)))
        result[row.path, layer] = Passes(follows, trained / total if total else 0.0)
        follows = follows or trained > 0
    return result


def _apart(patterns: Patterns) -> tuple[frozenset[str], Patterns]:
    """Names, and patterns: of many names one is found at once."""
    wild = tuple(pattern for pattern in patterns if re.search(r"[*?\[]", pattern))
    return frozenset(patterns) - frozenset(wild), wild


def rows_in_order(model: ModelConfig) -> Iterator[tuple[Module, int | None]]:
    """The modules in the order of forward: those before blocks, blocks by layer, those behind."""
    rows = modules_of(model)
    first = next((index for index, row in enumerate(rows) if row.layers is not None), len(rows))
    behind = [row for row in rows[first:] if row.layers is None]
    for row in rows[:first]:
        yield row, None
    of_layers = [row for row in rows if row.layers is not None]
    for layer in sorted({layer for row in of_layers for layer in row.layers or ()}):
        yield from ((row, layer) for row in of_layers if row.is_in(layer))
    for row in behind:
        yield row, None


def num_trained(row: Module, model: ModelConfig, patterns: Patterns) -> float:
    """How many of a module a model trains: each counts as the share of its parameters that train."""
    if trains_all(model, patterns):
        return row.number
    passes = passes_of(model, patterns)
    return sum(passes[row.path, layer].share for layer in ((None,) if row.layers is None else row.layers))


def trains_head(model: ModelConfig, patterns: Patterns) -> bool:
    """Whether the weight of the output head trains."""
    if trains_all(model, patterns):
        return True
    return any(num_trained(row, model, patterns) for row in modules_of(model) if row.path == "head")


def freezes_experts(recipe: Recipe) -> bool:
    """Whether no layer trains its routed experts."""
    rows = [row for row in modules_of(recipe.model, recipe.parallel) if row.region == "experts"]
    return not any(num_trained(row, recipe.model, recipe.optim.trainable) for row in rows)


def divides_experts(recipe: Recipe) -> bool:
    """Whether a layer trains some parameters of its routed experts, and others not."""
    if trains_all(recipe.model, recipe.optim.trainable):
        return False
    passes = passes_of(recipe.model, recipe.optim.trainable)
    shares: dict[int | None, set[float]] = {}
    for row, layer in rows_in_order(recipe.model):
        if row.region == "experts" and not row.is_adapter:
            shares.setdefault(layer, set()).add(passes[row.path, layer].share)
    return any(of_layer not in ({0.0}, {1.0}) for of_layer in shares.values())


def unmatched(names: Iterable[str], patterns: Patterns, key: str = "optim.trainable") -> Iterator[str]:
    """What is wrong with patterns that match no parameter, each in words, with names that are near."""
    known = list(names)
    short = {re.sub(r"^layers\.\d+\.", "layers.*.", name): None for name in known}
    for pattern in patterns:
        if not any(fnmatchcase(name, pattern) for name in known):
            like = re.sub(r"layers\.\d+\.", "layers.*.", pattern)
            near = _near(like, list(short))
            yield f'{key}: "{pattern}" matches no parameter; near it: {", ".join(near)}'


def _near(pattern: str, names: list[str]) -> list[str]:
    """The most similar names: as a whole, else by what the pattern says beside `*`."""
    by_end = {name.removeprefix("layers.*."): name for name in names}
    bare = pattern.replace("layers.*.", "").strip("*.")
    words = {word: name for name in names for word in (name.removeprefix("layers.*."), *name.split("."))}
    found = get_close_matches(pattern, names, NUM_NEAR, 0.6)
    found = found or [by_end[name] for name in get_close_matches(bare, list(by_end), NUM_NEAR, 0.5)]
    found = found or [words[word] for word in get_close_matches(bare, list(words), NUM_NEAR, 0.6)]
    return list(dict.fromkeys(found or names))[:NUM_NEAR]


def all_names(model: ModelConfig) -> list[str]:
    """The names of all parameters of the table."""
    return [name for row, layer in rows_in_order(model) for name, size in names_of(row, layer) if size]
