"""Whether the estimated peak of a recipe fits the memory of a GPU, and single changes that make it fit."""

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

from titan_moe.config.recipe import Recipe
from titan_moe.config.rules import check_rules
from titan_moe.config.schema import in_toml
from titan_moe.plan.hardware import find_hardware

Need = Callable[[Recipe], float]
"""GiB of a GPU, on the rank that needs most."""


def warn_of_excess(recipe: Recipe, world_size: int, need: Need, devices: list[str]) -> Iterator[str]:
    """A line for each device that has less memory than the recipe needs, with the changes that fit. Of a device that is
    not known nothing is said."""
    needed, by_change = need(recipe), dict[str, float]()
    for device in devices:
        hardware = find_hardware(device)
        if hardware is None or needed <= hardware.memory_gib:
            continue
        if not by_change:
            allowed = [it for it in _changes(recipe) if not check_rules(it[1], world_size)]
            by_change = {change: need(changed) for change, changed in allowed}
        fitting = [f"{change} {gib:.3g}" for change, gib in by_change.items() if gib <= hardware.memory_gib]
        way_out = (
            f"with {', '.join(fitting)} GiB" if fitting else "no single change fits: take more ranks, or fewer layers"
        )
        yield f"WARNING: {needed:.3g} GiB exceed the {hardware.memory_gib:g} GiB of {device}; {way_out}"


def _changes(recipe: Recipe) -> Iterator[tuple[str, Recipe]]:
    """Recipes that need less, by the one field that differs; the cheaper changes first."""
    t, moments = recipe.train, recipe.precision.moments_dtype
    values: dict[tuple[str, str], list[Any]] = {
        ("compile", "cudagraph"): ["off"] if recipe.compile.cudagraph != "off" else [],
        ("precision", "moments"): ["bf16", "int8"] if moments == "fp32" else ["int8"] if moments == "bf16" else [],
        ("memory", "recompute"): {"none": ["experts", "block"], "experts": ["block"]}.get(recipe.memory.recompute, []),
        ("train", "micro_batch_sequences"): [t.micro_batch_sequences // 2] if t.micro_batch_sequences > 1 else [],
        ("run", "ranks_per_gpu"): [1] if recipe.run.ranks_per_gpu > 1 else [],
    }
    for (section, field), choices in values.items():
        for value in choices:
            changed = replace(getattr(recipe, section), **{field: value})
            yield f"{section}.{field} = {in_toml(value)}", replace(recipe, **{section: changed})
