"""The kernels of a run on a device, with reasons: shown by `check`, logged and used by `train`.

`perf.kernels = "auto"` takes for each operation the fastest implementation at the nearest measured shape, on this GPU
or another of its architecture. PyTorch stays where Triton cannot run, where it saves less than `SMALLEST_GAIN`, and
where no comparable shape was measured.
"""

from collections.abc import Iterable
from dataclasses import asdict, dataclass, replace
from typing import Any, get_args, get_type_hints

from titan_moe.config.gemms import has_native_experts
from titan_moe.config.kernels import DEFAULT_KERNELS, Kernels
from titan_moe.config.perf import PerfConfig
from titan_moe.config.recipe import Recipe
from titan_moe.config.rules import check_rules
from titan_moe.plan.hardware import Capability
from titan_moe.plan.kernel_shapes import shapes_of
from titan_moe.plan.kernel_table import Nearest, find_nearest, tables_for

SMALLEST_GAIN = 0.02
"""The share of the default's time that another implementation must save; less is within noise and routing."""
NOT_MEASURED = "not measured; titan-moe tune does it"


@dataclass(frozen=True)
class KernelChoice:
    """The implementation of one operation in a run."""

    operation: str  # a field of `Kernels`
    backend: str  # its value
    reason: str  # empty where the recipe's preset names the backend
    nearest: Nearest | None = None  # the measurement that decided, if one did


def choose_for(
    recipe: Recipe, world_size: int, device: str | None, capability: Capability | None = None
) -> list[KernelChoice]:
    """Choose the implementation of each operation of a run, on a device by its driver's name (None: no table).

    Where the name is unknown, the compute capability finds the tables of its architecture.

    Raises: RecipeError if a table cannot be read.
    """
    is_auto = recipe.perf.kernels == "auto"
    reason = _why_no_table_applies(recipe, device) if is_auto else ""
    tables = tables_for(device, capability) if device is not None and reason == NOT_MEASURED else []
    named, overridden = asdict(recipe.perf.chosen_kernels), asdict(recipe.perf.override)
    choices = []
    for operation, shape in shapes_of(recipe, world_size).items():
        choice = KernelChoice(operation, named[operation], reason)
        if is_auto and operation == "experts" and recipe.parallel.overlap == "tile":
            choice = KernelChoice(operation, "fused", 'parallel.overlap = "tile"')
        elif is_auto and operation == "experts" and has_native_experts(recipe):
            choice = KernelChoice(operation, "fused", f'precision.experts = "{recipe.precision.format_of("experts")}"')
        if overridden[operation] != "no":
            choice = replace(choice, reason=f"perf.override.{operation}")
        elif nearest := find_nearest(tables, device or "", operation, shape):
            choice = _fastest(recipe, world_size, nearest) or choice
        choices.append(choice)
    return choices


def _why_no_table_applies(recipe: Recipe, device: str | None) -> str:
    if recipe.run.device == "cpu" or device == "CPU":
        return "a CPU has no Triton"
    return NOT_MEASURED if recipe.precision.compute == "bf16" else "measured in bf16 alone"


def _fastest(recipe: Recipe, world_size: int, nearest: Nearest) -> KernelChoice | None:
    """The fastest implementation that the rules allow, or the default if about as fast; None if none is allowed."""
    operation, ms = nearest.measured.operation, nearest.measured.ms
    allowed = backends_that_can_run(recipe, world_size, operation, ms)
    if not allowed:
        return None
    fastest, default = min(allowed, key=lambda name: ms[name]), asdict(DEFAULT_KERNELS)[operation]
    if fastest != default and default in allowed and ms[fastest] > (1 - SMALLEST_GAIN) * ms[default]:
        reason = f"{fastest} is within {100 * SMALLEST_GAIN:.0f} % of {default}: the default stays"
        return KernelChoice(operation, default, reason, nearest)
    excluded = [name for name in ms if name not in allowed and ms[name] < ms[fastest]]
    reason = f"{' and '.join(excluded)} cannot run here" if excluded else "measured"
    return KernelChoice(operation, fastest, reason, nearest)


def backends_that_can_run(recipe: Recipe, world_size: int, operation: str, backends: Iterable[str]) -> list[str]:
    """The known implementations of an operation that break no rule of the recipe on a GPU, in bf16."""
    known = get_args(get_type_hints(Kernels)[operation])
    if recipe.precision.compute != "bf16":
        return []
    return [name for name in backends if name in known and not check_rules(_with(recipe, operation, name), world_size)]


def _with(recipe: Recipe, operation: str, backend: str) -> Recipe:
    change: dict[str, Any] = {operation: backend}
    needs_fused = recipe.parallel.overlap == "tile" or has_native_experts(recipe)
    if needs_fused and recipe.perf.override.experts == "no":
        change = {"experts": "fused", **change}  # or the rule of experts would fail for other operations
    perf = replace(recipe.perf, kernels="grouped_mm", override=replace(recipe.perf.override, **change))
    return replace(recipe, perf=perf, run=replace(recipe.run, device="cuda"))


def as_overrides(perf: PerfConfig, choices: Iterable[KernelChoice]) -> PerfConfig:
    """Write choices as a recipe's overrides, so that a resumed or repeated run has the same kernels."""
    default = asdict(DEFAULT_KERNELS)
    backends: dict[str, Any] = {it.operation: it.backend for it in choices if it.backend != default[it.operation]}
    return replace(perf, kernels="grouped_mm", override=replace(perf.override, **backends))


def describe_choices(choices: Iterable[KernelChoice]) -> list[str]:
    """Describe choices: a line for each operation that a measurement decided, and one for each other reason."""
    measured, others = [], dict[str, list[str]]()
    for choice in choices:
        chosen = f"{choice.operation} {choice.backend}"
        if choice.nearest:
            measured.append(f"{chosen} ({_describe_measurement(choice, choice.nearest)})")
        else:
            others.setdefault(choice.reason, []).append(chosen)
    return [*measured, *(", ".join(chosen) + (f" ({reason})" if reason else "") for reason, chosen in others.items())]


def _describe_measurement(choice: KernelChoice, nearest: Nearest) -> str:
    """`5.2 ms fused, 7.38 ms grouped_mm` with its source, the chosen one first; the reason too, if it is not faster."""
    measured = nearest.measured
    times = sorted(measured.ms.items(), key=lambda item: (item[0] != choice.backend, item[1]))
    sizes = ", ".join(f"{size:,} {name}" if isinstance(size, int) else size for name, size in measured.shape.items())
    by_backend = ", ".join(f"{ms:.3g} ms {name}" for name, ms in times)
    why = "" if choice.reason == "measured" else f"{choice.reason}; "
    place = "at" if nearest.ratio == 1 else f"at {nearest.distance}:"
    return (
        f"{why}{by_backend}, measured on {nearest.device} {place} {sizes} with torch {measured.torch}, {measured.date}"
    )
