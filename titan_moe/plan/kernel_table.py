"""Tables of measured kernels: read by `auto`, written by `titan-moe tune`, one file a device.

The nearest measured shape decides. Of equally near ones, the user's own table in the cache folder comes before the
package's. Tables of other GPUs of the same architecture count too, at a larger distance.
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
from titan_moe.config.recipe import Recipe
from titan_moe.config.schema import in_toml
from titan_moe.plan.hardware import Capability, find_capability
from titan_moe.plan.kernel_shapes import FORMAT_OPERATIONS, OPERATIONS, OTHER_WORD, Shape

MEASURABLE = OPERATIONS | FORMAT_OPERATIONS
SHIPPED_TABLES = Path(__file__).with_name("tables")


@dataclass(frozen=True)
class Measured:
    """The times of one operation's implementations at one shape."""

    operation: str  # a field of `Kernels`, or a key of `FORMAT_OPERATIONS`
    shape: Shape  # as in `plan.kernel_shapes`
    ms: Mapping[str, float]  # implementation (in bf16) or format -> milliseconds of forward and backward
    torch: str  # version
    triton: str  # version
    date: str  # year first


@dataclass(frozen=True)
class KernelTable:
    """The measurements on one device."""

    device: str  # its name, as the driver reports it
    measured: tuple[Measured, ...] = ()  # one a shape

    def merged(self, new: Iterable[Measured]) -> "KernelTable":
        """The table with new measurements, which replace those of equal shapes."""
        measured = {_key(entry): entry for entry in (*self.measured, *new)}
        return KernelTable(self.device, tuple(measured[key] for key in sorted(measured)))


@dataclass(frozen=True)
class Nearest:
    """The measurement that decides an operation at a shape."""

    measured: Measured
    device: str  # where it was measured
    ratio: float  # distance of its shape (`Operation.ratio`): 1 for an equal shape

    @property
    def distance(self) -> str:
        """The distance in words."""
        number = f"{self.ratio:.3g}" if self.ratio < 100 else f"{self.ratio:,.0f}"
        return f"the nearest shape, x{number} away"


def find_nearest(tables: Iterable[KernelTable], device: str, operation: str, shape: Shape) -> Nearest | None:
    """The measurement at the nearest shape, of equally near ones the first; None if none is comparable.

    Another device than the run's counts as another word.
    """
    found = (
        Nearest(entry, table.device, MEASURABLE[operation].ratio(entry.shape, shape))
        for table in tables
        for entry in table.measured
        if entry.operation == operation
    )
    comparable = (nearest for nearest in found if nearest.ratio < math.inf)
    return min(comparable, key=lambda it: it.ratio * (1 if it.device == device else OTHER_WORD), default=None)


def _key(entry: Measured) -> tuple[Any, ...]:
    return entry.operation, tuple((name, str(size).rjust(12)) for name, size in sorted(entry.shape.items()))


def cached_tables() -> Path:
    """The folder of the user's own tables; `XDG_CACHE_HOME` moves it."""
    cache = os.environ.get("XDG_CACHE_HOME", "")
    return (Path(cache) if cache else Path.home() / ".cache") / "titan_moe" / "kernels"


def table_name(device: str) -> str:
    """File name of a device's table: `nvidia_h200.toml`."""
    return re.sub("[^a-z0-9]+", "_", device.lower()).strip("_") + ".toml"


def tables_for(device: str, capability: Capability | None = None) -> list[KernelTable]:
    """The tables of a device and of others of its compute capability (by default that of its name), own ones first.

    Raises: RecipeError if a table cannot be read.
    """
    capability = capability or find_capability(device)
    return [
        table
        for table in _all_tables()
        if table.device == device or (capability and find_capability(table.device) == capability)
    ]


def measured_devices() -> list[str]:
    """All devices with a table."""
    return sorted({table.device for table in _all_tables()})


def _all_tables() -> list[KernelTable]:
    return [read_table(path) for folder in (cached_tables(), SHIPPED_TABLES) for path in sorted(folder.glob("*.toml"))]


def read_table(path: Path) -> KernelTable:
    """Read a table.

    Raises: RecipeError that names the file, if it is not a valid table.
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
    if not MEASURABLE[measured.operation].shape(Recipe()).keys() <= measured.shape.keys():
        raise ValueError(f"a shape of {measured.operation} lacks some of its sizes")
    if any(isinstance(size, int) and size < 0 for size in measured.shape.values()):
        raise ValueError(f"a size of {measured.operation} is below 0")
    if not all(ms > 0 for ms in measured.ms.values()):
        raise ValueError(f"a time of {measured.operation} is not above 0")
    return measured


def write_table(path: Path, table: KernelTable) -> None:
    """Write a table where `read_table` finds it."""
    entries = "\n".join(_written(entry) for entry in table.measured)
    note = (
        '# Milliseconds of forward and backward in bf16, measured by `titan-moe tune` for `perf.kernels = "auto"`;\n'
        "# of `..._in_formats` in formats, quantisation included, for `precision.only_where_faster`.\n"
    )
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
    return "{ " + ", ".join(f"{_key_in_toml(name)} = {in_toml(value)}" for name, value in values.items()) + " }"


def _key_in_toml(name: str) -> str:
    return name if re.fullmatch("[A-Za-z0-9_-]+", name) else in_toml(name)
