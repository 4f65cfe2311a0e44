"""Local files of JSON lines, read line by line: a row has a file and a line, and one that is not JSON can be skipped.

`datasets` reads them in chunks of 10 MB. A broken line ends its reader, and its error does not name the line.
"""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

from titan_moe.config.data_files import find_files
from titan_moe.config.train import DataConfig
from titan_moe.data.bad_rows import BadRows

PLACE = "json_lines"
"""Key of a place of this reader: the number of the file, the offset of its next line in bytes, and its number."""
Convert = Callable[[Any, int, str], Any]
"""(row, its number from 1, its place in words) -> its document, or None for a row that is left out."""
_SUFFIXES = {".jsonl", ".ndjson", ".json"}
_SCAN_BYTES = 1 << 30


class Line(NamedTuple):
    """One line that is not blank."""

    file: Path
    number: int
    """From 1."""
    content: bytes

    @property
    def place(self) -> str:
        return f"{self.file}, line {self.number}"

    def parse(self) -> Any:
        """Raises: ValueError for a line that is not JSON in UTF-8."""
        try:
            return json.loads(self.content.decode())
        except RecursionError as error:
            raise ValueError("it is nested too deeply") from error


class Lines:
    """The lines of files, from any place on."""

    def __init__(self, files: list[Path], place: list[int] | None = None) -> None:
        self._files = files
        self.num_file, self.offset, self.num_lines = place or (0, 0, 0)
        self._file: Any = None

    def next(self) -> Line | None:
        """Return the next line, or None at the end of the last file."""
        while self.num_file < len(self._files):
            if self._file is None:
                self._file = self._files[self.num_file].open("rb")
                self._file.seek(self.offset)
            if not (content := self._file.readline()):
                self._file.close()
                self._file, self.num_file, self.offset, self.num_lines = None, self.num_file + 1, 0, 0
                continue
            self.offset += len(content)
            self.num_lines += 1
            if content := content.removeprefix(b"\xef\xbb\xbf").strip():
                return Line(self._files[self.num_file], self.num_lines, content)
        return None


class JsonLinesStream:
    """One pass over the documents of JSON lines that leaves out bad rows. It can stop at any document and resume.

    `convert` makes documents of rows, by default their text.
    """

    def __init__(
        self,
        data: DataConfig,
        bad_rows: BadRows,
        num_read: int,
        place: dict[str, Any] | None,
        convert: Convert | None = None,
    ) -> None:
        own = (place or {}).get(PLACE)
        self.num_read = num_read if own else 0
        self._column, self._bad_rows, self._convert = data.text_column, bad_rows, convert or self._text
        self._lines = Lines(files_of(data), own)
        while self.num_read < num_read and self._lines.next() is not None:
            self.num_read += 1

    def read(self) -> Any:
        """Return the next document, or None at the end of the pass."""
        while (line := self._lines.next()) is not None:
            self.num_read += 1
            try:
                row = line.parse()
            except ValueError as error:
                self._bad_rows.found(self.num_read, f"{line.place}, is not JSON: {error}")
                continue
            if (document := self._convert(row, self.num_read, line.place)) is not None:
                return document
        return None

    def _text(self, row: Any, number: int, place: str) -> str | None:
        text = row.get(self._column, 0) if isinstance(row, dict) else 0
        if text is None or isinstance(text, str):
            return text or ""
        self._bad_rows.found(number, f"{place}, has no text in the column {self._column!r}")
        return None

    def place(self) -> dict[str, Any]:
        """Return the place of the next line."""
        return {PLACE: [self._lines.num_file, self._lines.offset, self._lines.num_lines]}


def files_of(data: DataConfig) -> list[Path]:
    """The files of `data.files` if they are JSON lines, else an empty list: a file can be one list or object."""
    files = find_files(data.files, "data.files") if data.path == "json" and data.files else []
    return files if all(_has_lines(file) for file in files) else []


def place_of_row(data: DataConfig, number: int) -> str:
    """The file and line of a row (the first is 1); empty if the data is not JSON lines."""
    lines, line = Lines(files_of(data)), None
    for _ in range(number):
        line = lines.next()
    return line.place if line else ""


def find_bad_line(data: DataConfig, num_read: int) -> str:
    """The first line after `num_read` rows that is not JSON; empty if there is none in the next GiB."""
    lines, scanned = Lines(files_of(data)), 0
    for _ in range(num_read):
        lines.next()
    while scanned < _SCAN_BYTES and (line := lines.next()) is not None:
        try:
            line.parse()
        except ValueError as error:
            return f"{line.place}, is not JSON: {error}"
        scanned += len(line.content)
    return ""


def _has_lines(file: Path) -> bool:
    if file.suffix not in _SUFFIXES:
        return False
    with file.open("rb") as stream:
        first = stream.readline().strip()
    return file.suffix != ".json" or (first.startswith(b"{") and first.endswith(b"}"))
