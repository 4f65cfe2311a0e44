"""A file of records, one JSON object a line, that a resumed run continues as if it had never stopped."""

import json
import math
import os
from pathlib import Path
from typing import Any


class JsonLines:
    """Append records and flush each, so that a reader or a crash finds whole lines."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def drop_after(self, step: int) -> None:
        """Remove records of later steps, which a resumed run will make again, and a line that a crash cut short."""
        if not self.path.exists():
            return
        kept = [line for line in self.path.read_text().splitlines() if _step_of(line) <= step]
        new = self.path.with_suffix(".new")
        new.write_text("".join(f"{line}\n" for line in kept))
        os.replace(new, self.path)

    def write(self, record: dict[str, Any]) -> None:
        """Append a record; JSON knows no NaN and no infinity, they become null."""
        with self.path.open("a") as file:
            file.write(json.dumps(_finite(record), allow_nan=False) + "\n")


def _step_of(line: str) -> float:
    try:
        return int(json.loads(line)["step"])
    except (ValueError, KeyError, TypeError):
        return math.inf


def _finite(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _finite(member) for name, member in value.items()}
    return None if isinstance(value, float) and not math.isfinite(value) else value
