"""Tables of measured kernels: read by `auto`, written by `titan-moe tune`, one file a device.

A table of the user's own, in the cache folder, is asked before the one that comes with the package.
"""

import math
import os
import re
import tomllib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from titan_moe.config.parse import RecipeError
from titan_moe.config.schema import in_toml
from titan_moe.plan.kernel_shapes import OPERATIONS, Shape

SHIPPED_TABLES = Path(__file__).with_name("tables")
LARGEST_LOAD_RATIO = 2.0
"""How far a measurement may lie from the shape that it decides."""


@dataclass(frozen=True)
class Measured:
    """One operation at one shape: what each implementation took."""

    operation: str
    """A field of `Kernels`."""
    shape: Shape
    """Sizes, as in `plan.kernel_shapes`."""
    ms: Mapping[str, float]
    """Implementation -> milliseconds of forward and backward, in bf16."""
    torch: str
    """Version."""
    triton: str
    """Version."""
    date: str
    """Day of the measurement, year first."""


@dataclass(frozen=True)
class KernelTable:
    """What was measured on one device."""

    device: str
    """Its name, as the driver reports it."""
    measured: tuple[Measured, ...] = ()
    """One a shape."""

    def find(self, operation: str, shape: Shape) -> Measured | None:
        """The measurement nearest in load among those of the same widths; None if none is near.

        Of those with one load, the one whose other sizes are nearest: as many slots may come from fewer rows.
        """
        rule = OPERATIONS[operation]

        def distance(entry: Measured) -> float:
            return abs(math.log(rule.load(entry.shape) / rule.load(shape)))

        near = [
            entry
            for entry in self.measured
            if entry.operation == operation
            and all(entry.shape[name] == shape[name] for name in rule.same)
            and distance(entry) <= math.log(LARGEST_LOAD_RATIO) * (1 + 1e-9)
        ]
        return min(near, key=lambda entry: (distance(entry), _size_distance(entry.shape, shape)), default=None)

    def merged(self, news: Iterable[Measured]) -> "KernelTable":
        """The table with new measurements, which replace those of the very same shapes."""
        measured = {_key(entry): entry for entry in (*self.measured, *news)}
        return KernelTable(self.device, tuple(measured[key] for key in sorted(measured)))


def _size_distance(a: Shape, b: Shape) -> float:
    """How far two shapes lie apart in all sizes that both have, as a sum of logarithms."""
    pairs = [(a[name], b[name]) for name in a.keys() & b.keys()]
    return sum(abs(math.log(x / y)) for x, y in pairs if isinstance(x, int) and isinstance(y, int) and x > 0 and y > 0)


def _key(entry: Measured) -> tuple[Any, ...]:
    return entry.operation, tuple((name, str(size).rjust(12)) for name, size in sorted(entry.shape.items()))


def cached_tables() -> Path:
    """The folder of the user's own tables; `XDG_CACHE_HOME` moves it."""
    cache = os.environ.get("XDG_CACHE_HOME", "")
    return (Path(cache) if cache else Path.home() / ".cache") / "titan_moe" / "kernels"


def table_name(device: str) -> str:
    """File name of a device's table: `nvidia_h200.toml`."""
    return re.sub("[^a-z0-9]+", "_", device.lower()).strip("_") + ".toml"


def tables_for(device: str) -> list[KernelTable]:
    """The tables of a device, by that very name, in the order in which they are asked.

    Raises: RecipeError if one of them is no table.
    """
    paths = (folder / table_name(device) for folder in (cached_tables(), SHIPPED_TABLES))
    return [table for path in paths if path.is_file() and (table := read_table(path)).device == device]


def measured_devices() -> list[str]:
    """All devices that there are tables of."""
    paths = (path for folder in (cached_tables(), SHIPPED_TABLES) for path in folder.glob("*.toml"))
    return sorted({read_table(path).device for path in paths})


def read_table(path: Path) -> KernelTable:
    """Read a table.

    Raises: RecipeError naming the file, if it is none.
    """
    try:
        read = tomllib.loads(path.read_text(encoding="utf-8"))
        table = KernelTable(read.pop("device"), tuple(_measured(entry) for entry in read.pop("measured", [])))
        if read or not isinstance(table.device, str):
            raise ValueError(f"it should hold `device` and `measured`, not {', '.join(read) or 'another device'}")
    except (OSError, ValueError, TypeError, KeyError, AttributeError) as error:
        problem = f"{path} is no table of measured kernels ({error}); remove it, and let titan-moe tune write it anew"
        raise RecipeError([problem]) from error
    return table


def _measured(entry: dict[str, Any]) -> Measured:
    measured = Measured(**entry)
    rule = OPERATIONS[measured.operation]
    if not set(rule.same) <= set(measured.shape) or rule.load(measured.shape) <= 0:
        raise ValueError(f"a shape of {measured.operation} lacks some of its sizes")
    if not all(ms > 0 for ms in measured.ms.values()):
        raise ValueError(f"a time of {measured.operation} is not above 0")
    return measured


def write_table(path: Path, table: KernelTable) -> None:
    """Write a table where `read_table` finds it."""
    entries = "\n".join(_written(entry) for entry in table.measured)
    note = '# Milliseconds of forward and backward in bf16, measured by `titan-moe tune` for `perf.kernels = "auto"`.\n'
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"{note}device = {in_toml(table.device)}\n\n{entries}", encoding="utf-8")


def _written(entry: Measured) -> str:
    lines = [
        "[[measured]]",
        f"operation = {in_toml(entry.operation)}",
        f"shape = {_inline(entry.shape)}",
        f"ms = {_inline(entry.ms)}",
        *(f"{name} = {in_toml(getattr(entry, name))}" for name in ("torch", "triton", "date")),
    ]
    return "\n".join(lines) + "\n"


def _inline(values: Mapping[str, Any]) -> str:
    return "{ " + ", ".join(f"{name} = {in_toml(value)}" for name, value in values.items()) + " }"
