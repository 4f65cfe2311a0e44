"""Which formats `titan-moe tune` compares, at which shapes: those that the recipe's modules could have on a GPU.

The recipe need not name a format. Patterns and layers in compute do not matter here, widths and rules do.
"""

from collections.abc import Iterator
from dataclasses import replace
from typing import Any, NamedTuple

from titan_moe.config.formats import FORMAT_FACTS, GemmFormats
from titan_moe.config.gemms import GemmModule
from titan_moe.config.precision import PARTS, Part, PrecisionConfig
from titan_moe.config.recipe import Recipe
from titan_moe.config.rules import check_rules
from titan_moe.plan.format_choice import IN_COMPUTE, choose_formats, operation_of, shape_of
from titan_moe.plan.hardware import Capability
from titan_moe.plan.kernel_shapes import Shape


class ComparedFormats(NamedTuple):
    """One measurement: an operation's formats at a shape."""

    operation: str  # a key of `FORMAT_OPERATIONS`
    shape: Shape
    formats: list[GemmFormats]  # without compute's


def formats_to_measure(recipe: Recipe, world_size: int, capability: Capability) -> list[ComparedFormats]:
    """List the native formats of a recipe's modules on GPUs of a compute capability, once for each shape."""
    found: dict[str, ComparedFormats] = {}
    for part in PARTS:
        for possible in _possible(recipe, world_size, part, capability):
            for module, formats in _modules(possible, part):
                operation, shape = operation_of(part), shape_of(recipe, module)
                entry = found.setdefault(f"{operation} {shape}", ComparedFormats(operation, shape, []))
                if formats not in entry.formats:
                    entry.formats.append(formats)
    return list(found.values())


def _modules(recipe: Recipe, part: Part) -> Iterator[tuple[GemmModule, GemmFormats]]:
    for choice in choose_formats(recipe, device=None):
        if choice.module.part == part and choice.formats != IN_COMPUTE:
            yield choice.module, choice.formats


def _possible(recipe: Recipe, world_size: int, part: Part, capability: Capability) -> Iterator[Recipe]:
    """The recipe with each format for one part that no rule refuses: in all three GEMMs, and in those of the recipe."""
    p, perf = recipe.precision, recipe.perf
    if part == "experts":
        perf = replace(perf, override=replace(perf.override, experts="fused"))
    plain = replace(PrecisionConfig(p.compute, p.master, p.reduce, p.moments), backend="native")
    for name, facts in FORMAT_FACTS.items():
        if capability < facts.capability or not getattr(facts, f"has_native_{part}"):
            continue
        chosen: dict[str, Any] = {part: name}
        all_three = replace(plain, **chosen)
        for precision in dict.fromkeys((all_three, replace(all_three, dgrad=p.dgrad, wgrad=p.wgrad))):
            possible = replace(recipe, precision=precision, perf=perf, run=replace(recipe.run, device="cuda"))
            if not check_rules(possible, world_size):
                yield possible
