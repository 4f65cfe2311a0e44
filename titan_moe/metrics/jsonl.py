"""A file of records, one JSON object per line. A resumed run continues it without gaps or repetitions."""

import json
import logging
import math
import os
from pathlib import Path
from typing import Any

logger = logging.getLogger(__name__)


class JsonLines:
    """Append records. Each is flushed, so readers see complete lines, also after a crash."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def drop_after(self, step: int) -> None:
        """Move records of later steps, which a resumed run writes again, and lines that are no records, such as an
        incomplete last one, into the file `metrics.dropped.jsonl`."""
        if not self.path.exists():
            return
        lines = [(line + b"\n", _step_of(line)) for line in self.path.read_bytes().split(b"\n") if line]
        kept = [line for line, found in lines if found is not None and found <= step]
        aside = self.path.with_suffix(".dropped.jsonl")
        if dropped := [line for line, found in lines if found is None or found > step]:
            with aside.open("ab") as file:
                file.writelines(dropped)
        if num_damaged := sum(found is None for _, found in lines):
            count = "1 line is not a record" if num_damaged == 1 else f"{num_damaged} lines are not records"
            logger.warning("%s: %s; moved to %s", self.path, count, aside.name)
        new = self.path.with_suffix(".new")
        new.write_bytes(b"".join(kept))
        os.replace(new, self.path)

    def write(self, record: dict[str, Any]) -> None:
        """Append a record. NaN and infinity, which JSON lacks, become null."""
        with self.path.open("a") as file:
            file.write(json.dumps(_finite(record), allow_nan=False) + "\n")


def _step_of(line: bytes) -> int | None:
    """The step of a record, or None for anything else."""
    try:
        step = json.loads(line)["step"]
    except (ValueError, KeyError, TypeError, IndexError, RecursionError):
        return None
    return step if type(step) is int else None


def _finite(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _finite(member) for name, member in value.items()}
    return None if isinstance(value, float) and not math.isfinite(value) else value
