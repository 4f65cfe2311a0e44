"""Which kernels a run takes on a device, and why: what `check` shows and a run logs and then trains with.

`perf.kernels = "auto"` takes, operation by operation, what was fastest at its shape. It never guesses: where nobody
has measured, on the device of that very name and at a shape near enough, or where others are hardly faster, the default
stays.
"""

from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, get_args, get_type_hints

from titan_moe.config.kernels import DEFAULT_KERNELS, Kernels
from titan_moe.config.perf import PerfConfig
from titan_moe.config.recipe import Recipe
from titan_moe.config.rules import check_rules
from titan_moe.plan.kernel_shapes import Shape, shapes_of
from titan_moe.plan.kernel_table import KernelTable, Measured, tables_for

SMALLEST_GAIN = 0.02
"""Part of its time that the default gives way for: less may be gone at another routing, or when measured again."""


@dataclass(frozen=True)
class KernelChoice:
    """The implementation of one operation in a run."""

    operation: str
    """A field of `Kernels`."""
    backend: str
    """The value that it gets."""
    reason: str
    """Why, in words; nothing to say where the recipe's preset names it."""
    measured: Measured | None = None
    """What decided, if a measurement did."""


def choose_for(recipe: Recipe, world_size: int, device: str | None) -> list[KernelChoice]:
    """Choose each operation that the run has, on a device by its driver's name; None for one without a table.

    Raises: RecipeError if a table cannot be read.
    """
    is_auto = recipe.perf.kernels == "auto"
    tables = tables_for(device) if is_auto and device is not None and recipe.run.device != "cpu" else []
    named, overridden = asdict(recipe.perf.chosen_kernels), asdict(recipe.perf.override)
    choices = []
    for operation, shape in shapes_of(recipe, world_size).items():
        choice = KernelChoice(operation, named[operation], "not measured" if is_auto else "")
        if is_auto and operation == "experts" and recipe.parallel.overlap == "tile":
            choice = KernelChoice(operation, "fused", 'parallel.overlap = "tile"')
        if overridden[operation] != "no":
            choice = replace(choice, reason=f"perf.override.{operation}")
        elif measured := _find(tables, operation, shape):
            choice = _fastest(recipe, world_size, measured) or choice
        choices.append(choice)
    return choices


def _find(tables: Sequence[KernelTable], operation: str, shape: Shape) -> Measured | None:
    return next((measured for table in tables if (measured := table.find(operation, shape))), None)


def _fastest(recipe: Recipe, world_size: int, measured: Measured) -> KernelChoice | None:
    """The fastest implementation that the recipe's rules allow, the default if it is about as fast; None if none is."""
    allowed = backends_that_can_run(recipe, world_size, measured.operation, measured.ms)
    if not allowed:
        return None
    fastest, default = min(allowed, key=lambda name: measured.ms[name]), asdict(DEFAULT_KERNELS)[measured.operation]
    if fastest == default or default not in allowed:
        return KernelChoice(measured.operation, fastest, "measured", measured)
    if measured.ms[fastest] > (1 - SMALLEST_GAIN) * measured.ms[default]:
        reason = f"{fastest} is within {100 * SMALLEST_GAIN:.0f} % of {default}: the default stays"
        return KernelChoice(measured.operation, default, reason, measured)
    return KernelChoice(measured.operation, fastest, "measured", measured)


def backends_that_can_run(recipe: Recipe, world_size: int, operation: str, backends: Iterable[str]) -> list[str]:
    """Those of the implementations of an operation that exist and break no rule of the recipe on a GPU, in bf16."""
    known = get_args(get_type_hints(Kernels)[operation])
    if recipe.precision.compute != "bf16":
        return []
    return [
        backend
        for backend in backends
        if backend in known and not check_rules(_with(recipe, operation, backend), world_size)
    ]


def _with(recipe: Recipe, operation: str, backend: str) -> Recipe:
    change: dict[str, Any] = {operation: backend}
    if recipe.parallel.overlap == "tile" and recipe.perf.override.experts == "no":
        change = {"experts": "fused", **change}  # which other operations are not to blame for
    override = replace(recipe.perf.override, **change)
    perf = replace(recipe.perf, kernels="grouped_mm", override=override)
    return replace(recipe, perf=perf, run=replace(recipe.run, device="cuda"))


def as_overrides(perf: PerfConfig, choices: Iterable[KernelChoice]) -> PerfConfig:
    """Write a choice as a recipe says it, so that a run goes on, and is repeated, with the kernels it began with."""
    default = asdict(DEFAULT_KERNELS)
    backends: dict[str, Any] = {
        choice.operation: choice.backend for choice in choices if choice.backend != default[choice.operation]
    }
    return replace(perf, kernels="grouped_mm", override=replace(perf.override, **backends))


def in_words(choices: Iterable[KernelChoice]) -> list[str]:
    """Tell a choice in lines: one for each operation that a measurement decided, one for each other reason."""
    measured, others = [], dict[str, list[str]]()
    for choice in choices:
        said = f"{choice.operation} {choice.backend}"
        if choice.measured:
            measured.append(f"{said} ({_measured_in_words(choice, choice.measured)})")
        else:
            others.setdefault(choice.reason, []).append(said)
    return [*measured, *(", ".join(said) + (f" ({reason})" if reason else "") for reason, said in others.items())]


def _measured_in_words(choice: KernelChoice, measured: Measured) -> str:
    """`5.2 ms fused, 7.38 ms grouped_mm` and where that comes from, the chosen one first; why, if it is not faster."""
    times = sorted(measured.ms.items(), key=lambda item: (item[0] != choice.backend, item[1]))
    sizes = ", ".join(f"{size:,} {name}" if isinstance(size, int) else size for name, size in measured.shape.items())
    said = ", ".join(f"{ms:.3g} ms {name}" for name, ms in times)
    why = "" if choice.reason == "measured" else f"{choice.reason}; "
    return f"{why}{said}, measured at {sizes} with torch {measured.torch}, {measured.date}"
