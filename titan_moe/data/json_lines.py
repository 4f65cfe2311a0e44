"""Local JSON lines that `data.files` names: which they are, and where a row is in them.

`datasets` reads them in chunks of 10 MB. A broken line ends its reader, and its error does not name the line.
"""

from itertools import islice
from pathlib import Path

from titan_moe.config.data_files import find_files
from titan_moe.config.train import DataConfig
from titan_moe.data.rows import Rows

_SUFFIXES = {".jsonl", ".ndjson", ".json"}
_SCAN_BYTES = 1 << 30


def files_of(data: DataConfig) -> list[Path]:
    """The files of `data.files` if they are JSON lines, else an empty list: a file can be one list or object."""
    files = find_files(data.files, "data.files") if data.path == "json" and data.files else []
    return files if all(_has_lines(file) for file in files) else []


def place_of_row(data: DataConfig, number: int) -> str:
    """The file and line of a row (the first is 1); empty if the data is not JSON lines."""
    rows = Rows(files_of(data), "json")
    row = next(islice(iter(rows.next, None), number - 1, None), None)
    return row.place if row else ""


def find_bad_line(data: DataConfig, num_read: int) -> str:
    """The first line after `num_read` rows that is not JSON; empty if there is none in the next GiB."""
    rows, scanned = Rows(files_of(data), "json"), 0
    for _ in range(num_read):
        rows.next()
    before = rows.place
    while scanned < _SCAN_BYTES and (row := rows.next()) is not None:
        if row.problem:
            return f"{row.place}, {row.problem}"
        scanned += rows.place[1] - before[1] * (rows.place[0] == before[0])
        before = rows.place
    return ""


def _has_lines(file: Path) -> bool:
    if file.suffix not in _SUFFIXES:
        return False
    with file.open("rb") as stream:
        first = stream.readline().strip()
    return file.suffix != ".json" or (first.startswith(b"{") and first.endswith(b"}"))
