"""Times of kernels and formats by shape, in a table for each device: data for estimates, not for a choice."""

import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

TABLES = Path(__file__).parents[1] / "tables"


@dataclass(frozen=True)
class Measured:
    """The times of one operation's implementations at one shape, for a call on one rank."""

    operation: str  # a field of `Kernels`; with the suffix `_in_formats`, GEMMs of experts or of a dense linear layer
    shape: Mapping[str, int | str]  # sizes by name, and words for what else the time depends on
    ms: Mapping[str, float]  # implementation (in bf16) or format -> milliseconds of forward and backward
    torch: str  # version
    triton: str  # version
    date: str  # year first


def read_tables() -> dict[str, list[Measured]]:
    """Read all measurements by device, under the name that its driver reports."""
    tables = [tomllib.loads(path.read_text(encoding="utf-8")) for path in sorted(TABLES.glob("*.toml"))]
    return {table["device"]: [Measured(**entry) for entry in table["measured"]] for table in tables}
