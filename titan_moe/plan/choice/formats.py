"""The formats of a run's GEMMs, module by module, with reasons: shown by `check`, logged and used by `train`.

A module keeps compute's dtype where the recipe says so, where its widths are no multiples of what the format needs, and
where a rule on its widths says that the format is slower on this GPU.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Literal, NamedTuple

from titan_moe.config.formats import FORMAT_FACTS, GemmFormats
from titan_moe.config.gemms import NEVER_ROUNDED, GemmModule, gemm_modules, why_kept, widths_of_a_rank
from titan_moe.config.parse import RecipeError
from titan_moe.config.precision import PARTS, PrecisionConfig
from titan_moe.config.recipe import Recipe
from titan_moe.plan.choice.hardware import Capability, dotted

IN_COMPUTE = GemmFormats()


class FasterFrom(NamedTuple):
    """The dense linear layers that are faster in a format than in bf16, quantisation included."""

    input: int = 0  # the smallest width, that of a rank
    weights: int = 0  # the fewest

    def why_slower(self, num_inputs: int, num_outputs: int) -> str:
        """Why a layer is not among them; empty if it is."""
        if num_inputs < self.input:
            return f"below an input width of {self.input:,}"
        return f"below {self.weights:,} weights" if num_inputs * num_outputs < self.weights else ""


FASTER_FROM: dict[Capability, dict[str, FasterFrom]] = {
    (9, 0): {
        "fp8_tensorwise": FasterFrom(input=1024),
        "fp8_rowwise": FasterFrom(input=1024),
        "fp8_blockwise": FasterFrom(weights=2**23),
    }
}
"""Compute capability -> format of all three GEMMs -> bound. A test compares it with each measurement in plan/tables.
Routed experts are faster in each format that they have kernels for, at all measured widths. A format that is not listed
was not measured."""


@dataclass(frozen=True)
class FormatChoice:
    """The formats of one module's GEMMs."""

    module: GemmModule
    formats: GemmFormats
    reason: str = ""  # why the module has none although the recipe names one
    is_slower: bool = False  # whether that is speed


def choose_formats(recipe: Recipe, capability: Capability | None = None) -> list[FormatChoice]:
    """Choose the formats of each module on GPUs of a compute capability. Without one, none is dropped for speed."""
    bounds = _bounds(recipe.precision, capability)
    return [_choose(recipe, module, bounds) for module in gemm_modules(recipe.model)]


def _choose(recipe: Recipe, module: GemmModule, bounds: Mapping[str, FasterFrom]) -> FormatChoice:
    formats = recipe.precision.gemm_formats(module.part)
    if formats == IN_COMPUTE:
        return FormatChoice(module, formats)
    if reason := why_kept(recipe, module):
        return FormatChoice(module, IN_COMPUTE, reason)
    bound = bounds.get(str(formats), FasterFrom()) if module.part == "linears" else FasterFrom()
    if reason := bound.why_slower(*widths_of_a_rank(recipe, module)):
        return FormatChoice(module, IN_COMPUTE, f"{formats} is slower {reason}", is_slower=True)
    return FormatChoice(module, formats)


def _bounds(p: PrecisionConfig, capability: Capability | None) -> Mapping[str, FasterFrom]:
    """What the gate compares with; nothing if it is off."""
    is_gated = p.only_where_faster and p.backend != "emulated"
    return FASTER_FROM.get(capability, {}) if is_gated and capability else {}


def resolve_backend(precision: PrecisionConfig, capability: Capability | None) -> Literal["native", "emulated"]:
    """What `precision.backend` means on a GPU of a compute capability, or on another device (None).

    Raises: RecipeError where `auto` or `native` has no matrix units for a format.
    """
    if precision.backend == "emulated":
        return "emulated"
    where = "this device is no GPU" if capability is None else f"this GPU has {dotted(capability)}"
    others = " and ".join(f'precision.{name} = "compute"' for name in precision.fields_with_formats)
    problems = [
        f'precision.backend = "{precision.backend}" computes {name} on GPUs of compute capability '
        f"{dotted(FORMAT_FACTS[name].capability)} and later, and {where}; take precision.backend = "
        f'"emulated" for its numerics without its speed, or {others}'
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


def describe_formats(
    recipe: Recipe, choices: Iterable[FormatChoice], capability: Capability | None = None
) -> list[str]:
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
    return [
        f"{_backend_in_words(p)}; {_gate_in_words(p, capability)}",
        *lines,
        f"{p.compute} or finer: {NEVER_ROUNDED}",
    ]


def _backend_in_words(p: PrecisionConfig) -> str:
    if p.backend == "emulated":
        return "emulated: the numerics of formats without their speed"
    needs = ", ".join(f"{name} on compute capability {dotted(FORMAT_FACTS[name].capability)}" for name in p.formats)
    return f"native: {needs} and later"


def _gate_in_words(p: PrecisionConfig, capability: Capability | None) -> str:
    if p.backend == "emulated" or not p.only_where_faster:
        return "no format is dropped for speed"
    is_measured = any(str(p.gemm_formats(part)) in _bounds(p, capability) for part in PARTS)
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
    return ", ".join(
        ".".join(filter(None, ("layers", ranges, parent, "|".join(leaves))))
        for (ranges, parent), leaves in paths_of.items()
    )


def _ranges(numbers: list[int]) -> str:
    """`0-2,5` for 0, 1, 2 and 5."""
    runs: list[list[int]] = []
    for number in sorted(numbers):
        if runs and number == runs[-1][1] + 1:
            runs[-1][1] = number
        else:
            runs.append([number, number])
    return ",".join(str(a) if a == b else f"{a}-{b}" for a, b in runs)
