"""The formats of a run's GEMMs, module by module, with reasons: shown by `check`, logged and used by `train`.

A module keeps compute's dtype where the recipe says so, where its widths are no multiples of what the format needs, and
where the format was measured slower at the nearest shape, on this GPU or another of its architecture.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Literal

from titan_moe.config.formats import FORMAT_FACTS, GemmFormats
from titan_moe.config.gemms import NEVER_ROUNDED, GemmModule, gemm_modules, ranks_of_tokens, why_kept, widths_of_a_rank
from titan_moe.config.parse import RecipeError
from titan_moe.config.precision import Part, PrecisionConfig
from titan_moe.config.recipe import Recipe
from titan_moe.plan.hardware import Capability
from titan_moe.plan.kernel_choice import SMALLEST_GAIN
from titan_moe.plan.kernel_shapes import FORMAT_OPERATIONS, Shape, linear_shape
from titan_moe.plan.kernel_table import KernelTable, find_nearest, tables_for

IN_COMPUTE = GemmFormats()


@dataclass(frozen=True)
class FormatChoice:
    """The formats of one module's GEMMs."""

    module: GemmModule
    formats: GemmFormats
    reason: str = ""  # why the module has none although the recipe names one; `measured ...` for the gate
    is_slower: bool = False  # whether the gate is the reason


def choose_formats(recipe: Recipe, device: str | None, capability: Capability | None = None) -> list[FormatChoice]:
    """Choose the formats of each module, on a device by its driver's name (None: no table).

    Raises: RecipeError if a table cannot be read.
    """
    is_gated = recipe.precision.only_where_faster and recipe.precision.backend != "emulated"
    tables = tables_for(device, capability) if device is not None and is_gated and recipe.precision.formats else []
    return [_choose(recipe, module, tables, device or "") for module in gemm_modules(recipe.model)]


def _choose(recipe: Recipe, module: GemmModule, tables: list[KernelTable], device: str) -> FormatChoice:
    formats = recipe.precision.gemm_formats(module.part)
    if formats == IN_COMPUTE:
        return FormatChoice(module, formats)
    if reason := why_kept(recipe, module):
        return FormatChoice(module, IN_COMPUTE, reason)
    comparable = [_with(table, {"compute", str(formats)}) for table in tables]
    nearest = find_nearest(comparable, device, operation_of(module.part), shape_of(recipe, module))
    if nearest is None:
        return FormatChoice(module, formats)
    ms = nearest.measured.ms
    place = "" if nearest.ratio == 1 else f" at {nearest.distance}"
    times = f"{ms[str(formats)]:.3g} ms, compute {ms['compute']:.3g} ms on {nearest.device}{place}"
    if ms[str(formats)] > (1 - SMALLEST_GAIN) * ms["compute"]:
        return FormatChoice(module, IN_COMPUTE, f"{formats} is not faster: {times}", is_slower=True)
    return FormatChoice(module, formats, f"measured {times}")


def operation_of(part: Part) -> str:
    """The key of `FORMAT_OPERATIONS` for experts or dense linear layers."""
    return "experts_in_formats" if part == "experts" else "linear_in_formats"


def shape_of(recipe: Recipe, module: GemmModule) -> Shape:
    """The shape of a module's measurements."""
    if module.part == "linears":
        return linear_shape(recipe, widths_of_a_rank(recipe, module), ranks_of_tokens(recipe, module))
    return FORMAT_OPERATIONS["experts_in_formats"].shape(recipe)


def _with(table: KernelTable, needed: set[str]) -> KernelTable:
    return replace(table, measured=tuple(entry for entry in table.measured if needed <= entry.ms.keys()))


def resolve_backend(precision: PrecisionConfig, capability: Capability | None) -> Literal["native", "emulated"]:
    """What `precision.backend` means on a GPU of a compute capability, or on another device (None).

    Raises: RecipeError where `auto` or `native` has no matrix units for a format.
    """
    if precision.backend == "emulated":
        return "emulated"
    where = "this device is no GPU" if capability is None else f"this GPU has {_dotted(capability)}"
    problems = [
        f'precision.backend = "{precision.backend}" computes {name} on GPUs of compute capability '
        f"{_dotted(FORMAT_FACTS[name].capability)} and later, and {where}; take precision.backend = "
        f'"emulated" for its numerics without its speed, or {precision.without_formats}'
        for name in precision.formats
        if capability is None or capability < FORMAT_FACTS[name].capability
    ]
    if problems:
        raise RecipeError(problems)
    return "native"


def keep_slower_in_compute(precision: PrecisionConfig, choices: Iterable[FormatChoice]) -> PrecisionConfig:
    """Write what the gate keeps as patterns of the recipe, so that a resumed or repeated run has the same formats."""
    slower = dict.fromkeys(choice.module.pattern for choice in choices if choice.is_slower)
    return replace(precision, only_where_faster=False, modules_in_compute=(*precision.modules_in_compute, *slower))


def describe_formats(recipe: Recipe, choices: Iterable[FormatChoice]) -> list[str]:
    """Describe choices: a line for each format and reason, with the names of its modules; none without formats."""
    p = recipe.precision
    if not p.formats:
        return []
    groups: dict[tuple[str, str], list[GemmModule]] = {}
    for choice in choices:
        name = p.compute if choice.formats == IN_COMPUTE else str(choice.formats)
        groups.setdefault((name, choice.reason), []).append(choice.module)
    lines = [
        f"{name}: {names}" + (f" ({reason})" if reason else "")
        for (name, reason), modules in sorted(groups.items(), key=lambda item: item[0][0] == p.compute)
        for names in [_names(modules)]
    ]
    return [f"{_backend_in_words(p)}; {_gate_in_words(p, groups)}", *lines, f"{p.compute} or finer: {NEVER_ROUNDED}"]


def _backend_in_words(p: PrecisionConfig) -> str:
    if p.backend == "emulated":
        return "emulated: the numerics of formats without their speed"
    needs = ", ".join(f"{name} on compute capability {_dotted(FORMAT_FACTS[name].capability)}" for name in p.formats)
    return f"native: {needs} and later"


def _gate_in_words(p: PrecisionConfig, groups: Mapping[tuple[str, str], list[GemmModule]]) -> str:
    if p.backend == "emulated" or not p.only_where_faster:
        return "no format is dropped for speed"
    is_measured = any(" ms, compute " in reason for _, reason in groups)
    return "formats only where faster" if is_measured else "speed not measured, so no format is dropped for it"


def _names(modules: Iterable[GemmModule]) -> str:
    """Names of modules, layers as ranges: `layers.0-11.attention.qkv|out, layers.1-11.feed_forward.experts`."""
    layers_of: dict[str, list[int]] = {}
    for module in modules:
        layers_of.setdefault(module.path, []).append(module.layer)
    paths_of: dict[tuple[str, str], list[str]] = {}
    for path, layers in layers_of.items():
        parent, _, leaf = path.rpartition(".")
        paths_of.setdefault((_ranges(layers), parent), []).append(leaf)
    return ", ".join(f"layers.{ranges}.{parent}.{'|'.join(leaves)}" for (ranges, parent), leaves in paths_of.items())


def _ranges(numbers: list[int]) -> str:
    """`0-2,5` for 0, 1, 2 and 5."""
    runs: list[list[int]] = []
    for number in sorted(numbers):
        if runs and number == runs[-1][1] + 1:
            runs[-1][1] = number
        else:
            runs.append([number, number])
    return ",".join(str(a) if a == b else f"{a}-{b}" for a, b in runs)


def _dotted(capability: Capability) -> str:
    return ".".join(map(str, capability))
