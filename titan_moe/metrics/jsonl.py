"""A file of records, one JSON object per line. A resumed run continues it without gaps or repetitions."""

import json
import math
import os
from pathlib import Path
from typing import Any


class JsonLines:
    """Append records. Each is flushed, so readers see complete lines, also after a crash."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def drop_after(self, step: int) -> None:
        """Move records of later steps, which a resumed run writes again, and an incomplete last line into the file
        `metrics.dropped.jsonl`."""
        if not self.path.exists():
            return
        lines = self.path.read_text().splitlines()
        kept, dropped = ([line for line in lines if (_step_of(line) <= step) is is_kept] for is_kept in (True, False))
        if dropped:
            with self.path.with_suffix(".dropped.jsonl").open("a") as file:
                file.writelines(f"{line}\n" for line in dropped)
        new = self.path.with_suffix(".new")
        new.write_text("".join(f"{line}\n" for line in kept))
        os.replace(new, self.path)

    def write(self, record: dict[str, Any]) -> None:
        """Append a record. NaN and infinity, which JSON lacks, become null."""
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
