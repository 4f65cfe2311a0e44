"""Rows of local files with columns: JSON lines, arrays of JSON, Parquet, Arrow; each also compressed.

A row is a dict of its columns. What makes a document of it is not known here: text.py's readers take a column of text.
"""

import io
import json
import os
import re
from collections.abc import Callable, Iterator
from contextlib import suppress
from itertools import islice
from pathlib import Path
from typing import Any, Literal, NamedTuple, Protocol

from titan_moe.config.data_files import LINE_ENDINGS, ending_of
from titan_moe.data.file_kinds import HEAD_BYTES, kind_of, zeros_of
from titan_moe.data.opened import OpenedFile, read_whole

BATCH_ROWS = 1024
FIRST_ROWS = 100
"""Of a file, among which one tells the columns of JSON."""
Holds = Literal["text", "records", "other"]
"""What a column has: strings, lists of objects, or anything else."""
_BYTE_ORDER_MARK = b"\xef\xbb\xbf"


class Row(NamedTuple):
    """A row, or why there is none."""

    place: str
    """The file and the line or the row, from 1."""
    value: Any
    """A dict of its columns; anything else that JSON has is a bad row."""
    problem: str = ""
    """Why the row cannot be read; it is then a bad row."""


class _Reader(Protocol):
    """The rows of a file, from `place` on: [offset, number of rows or lines before]."""

    place: list[int]

    def next(self) -> Row | None: ...
    @property
    def share(self) -> float: ...


class Rows:
    """The rows of files of one kind in order, from any place on."""

    def __init__(
        self,
        files: list[Path],
        kind: str,
        place: list[int] | None = None,
        column: str = "",
        end: list[int] | None = None,
    ) -> None:
        """`column`: the only one that is read, where a file allows it; by default all. `end`: the place at which they
        end; by default the end of the last file."""
        self._files, self._kind, self._column = files, kind, column
        self._num_file, *self._start = place or [0, 0, 0]
        self._end = (end or [len(files), 0])[:2]
        self._reader: _Reader | None = None
        sizes = [file.stat().st_size for file in files]
        self._total, self._ends = max(sum(sizes), 1), [sum(sizes[:number]) for number in range(len(sizes) + 1)]

    def next(self) -> Row | None:
        """Return the next row, or None at the end of the last file.

        Raises: ValueError for a file that is not of its kind; BadRowError is left to the caller.
        """
        while self.place[:2] < self._end:
            if self._reader is None:
                self._reader = _READERS[self._kind](self._files[self._num_file], self._start, self._column)
            if (row := self._reader.next()) is not None:
                return row
            self._reader, self._num_file, self._start = None, self._num_file + 1, [0, 0]
        return None

    @property
    def place(self) -> list[int]:
        """The place of the next row: the number of its file, and where it begins there."""
        return [self._num_file, *(self._start if self._reader is None else self._reader.place)]

    @property
    def share(self) -> float:
        """How much of all files is read, by bytes, from 0 to 1."""
        if self._num_file >= len(self._files):
            return 1.0
        first, end = self._ends[self._num_file : self._num_file + 2]
        return (first + (end - first) * (0.0 if self._reader is None else self._reader.share)) / self._total


class _JsonLines:
    """A place is the offset of a line in bytes, decompressed, and the number of lines before, -1 if it is unknown."""

    def __init__(self, file: Path, place: list[int], column: str) -> None:
        self._path, self._file, self.place = file, OpenedFile(file), list(place)
        if not any(place):
            _check_head(file, _head(file))
        self._file.skip(place[0])

    @property
    def share(self) -> float:
        return self._file.share

    def next(self) -> Row | None:
        while line := self._file.readline():
            offset, number = self.place
            self.place = [offset + len(line), number + 1 if number >= 0 else -1]
            if not (content := line.removeprefix(_BYTE_ORDER_MARK).strip()):
                continue
            place = f"{self._path}, {f'line {number + 1}' if number >= 0 else f'the line at byte {offset}'}"
            try:
                return Row(place, json.loads(content.decode()))
            except (ValueError, RecursionError) as error:
                reason = "it is nested too deeply" if isinstance(error, RecursionError) else str(error)
                return Row(place, None, f"is not JSON: {reason}")
        self._file.close()
        return None


class _Table:
    """A file whose rows come in batches; a place is the number of rows before, twice."""

    def __init__(
        self, file: Path, batches: Iterator[list[Any]], place: list[int], share_after: Callable[[int], float]
    ) -> None:
        """`share_after` is how much of the file is read after so many rows."""
        self._path, self._batches, self._share_after = file, batches, share_after
        self._rows: Iterator[Any] = iter(())
        self.place = list(place)

    @property
    def share(self) -> float:
        return min(self._share_after(self.place[0]), 1.0)

    def next(self) -> Row | None:
        while (row := next(self._rows, self)) is self:
            try:
                batch = next(self._batches, None)
            except (OSError, ValueError) as error:  # of pyarrow
                raise ValueError(
                    f"data.path: {self._path} cannot be read after row {self.place[0]}: {error}; it is damaged: repair "
                    "it, or leave it out"
                ) from error
            if batch is None:
                return None
            self._rows = iter(batch)
        self.place = [self.place[0] + 1] * 2
        return Row(f"{self._path}, row {self.place[0]}", row)


def has_lines(file: Path) -> bool:
    """Whether a file of JSON is read line by line, and not as one array."""
    return ending_of(file.name).startswith(LINE_ENDINGS) or not _head(file).strip().startswith(b"[")


def row_groups(file: Path) -> tuple[list[int], int]:
    """The first row of each row group of a Parquet file, and the number of rows.

    Raises: ValueError for a file that is none.
    """
    try:
        table = _pyarrow(file, "parquet").ParquetFile(_source(file))
    except (OSError, ValueError) as error:  # of pyarrow
        raise ValueError(f"data.path: {file} is not a Parquet table: {error}; repair it, or leave it out") from error
    counts = [table.metadata.row_group(number).num_rows for number in range(table.num_row_groups)]
    return [sum(counts[:number]) for number in range(len(counts))], sum(counts)


def _open_json(file: Path, place: list[int], column: str) -> _Reader:
    """JSON lines, or one array, which is read as a whole."""
    if ending_of(file.name).startswith(LINE_ENDINGS) or not (head := _head(file).strip()).startswith((b"[", b"{")):
        return _JsonLines(file, place, column)
    if head.startswith(b"{"):
        _refuse_object(file)
        return _JsonLines(file, place, column)
    try:
        rows = json.loads(read_whole(file).removeprefix(_BYTE_ORDER_MARK).decode())
    except (ValueError, RecursionError) as error:
        raise ValueError(
            f"data.path: {file} begins as an array of JSON and is none: {error}; repair it, or give JSON lines, a "
            "record a line, of which a bad one can be skipped"
        ) from error
    return _Table(file, iter([rows[place[0] :]]), place, lambda num_read: num_read / max(len(rows), 1))


def _open_parquet(file: Path, place: list[int], column: str) -> _Reader:
    parquet = _pyarrow(file, "parquet")
    try:
        table = parquet.ParquetFile(_source(file))
        columns = [column] if column in table.schema_arrow.names else None
        counts = [table.metadata.row_group(number).num_rows for number in range(table.num_row_groups)]
    except (OSError, ValueError) as error:  # of pyarrow
        raise ValueError(f"data.path: {file} is not a Parquet table: {error}; repair it, or leave it out") from error
    num_skipped, first = place[0], 0
    while first < len(counts) and num_skipped >= counts[first]:
        num_skipped, first = num_skipped - counts[first], first + 1

    def batches() -> Iterator[list[Any]]:
        left = num_skipped
        groups = list(range(first, len(counts)))
        for batch in table.iter_batches(BATCH_ROWS, row_groups=groups, columns=columns) if groups else ():
            yield batch.slice(left).to_pylist()
            left = max(left - batch.num_rows, 0)

    return _Table(file, batches(), place, lambda num_read: num_read / max(sum(counts), 1))


def _open_arrow(file: Path, place: list[int], column: str) -> _Reader:
    ipc, source = _pyarrow(file, "ipc"), _source(file)
    size = max(source.seek(0, os.SEEK_END), 1)
    source.seek(0)
    try:
        try:
            reader = ipc.open_file(source)
            found = (reader.get_batch(number) for number in range(reader.num_record_batches))
        except ValueError:  # as `datasets` writes it
            source.seek(0)
            reader = ipc.open_stream(source)
            found = iter(reader)
    except (OSError, ValueError) as error:
        raise ValueError(f"data.path: {file} is not an Arrow file: {error}; repair it, or leave it out") from error
    columns = [column] if column in reader.schema.names else reader.schema.names

    def batches() -> Iterator[list[Any]]:
        left = place[0]
        for batch in found:
            for start in range(min(left, batch.num_rows), batch.num_rows, BATCH_ROWS):
                yield batch.slice(start, BATCH_ROWS).select(columns).to_pylist()
            left = max(left - batch.num_rows, 0)

    return _Table(file, batches(), place, lambda num_read: source.tell() / size)


_READERS: dict[str, Any] = {"json": _open_json, "parquet": _open_parquet, "arrow": _open_arrow}
"""Kind of file -> opens one at a place."""


def columns_of(file: Path, kind: str, wanted: str = "") -> dict[str, Holds]:
    """The columns of a file, and what each holds; of JSON those of its first rows, no further than the `wanted` one is
    found. Empty without a good row."""
    if kind == "json":
        columns: dict[str, Holds] = {}
        for row in islice(iter(Rows([file], kind).next, None), FIRST_ROWS):
            for name, entry in row.value.items() if isinstance(row.value, dict) else ():
                if columns.get(name, "other") == "other":
                    columns[name] = _holds(entry)
            if wanted in columns:
                break
        return columns
    if kind == "parquet":
        parquet = _pyarrow(file, "parquet")
        with suppress(OSError, ValueError):  # the reader says why
            return _holds_of_schema(parquet.ParquetFile(_source(file)).schema_arrow)
        return {}
    ipc, source = _pyarrow(file, "ipc"), _source(file)
    for open_ in (ipc.open_file, ipc.open_stream):
        with suppress(OSError, ValueError):
            source.seek(0)
            return _holds_of_schema(open_(source).schema)
    return {}


def _holds(entry: Any) -> Holds:
    """What an entry of JSON is."""
    is_records = isinstance(entry, list) and entry and isinstance(entry[0], dict)
    return "text" if isinstance(entry, str) else "records" if is_records else "other"


def _holds_of_schema(schema: Any) -> dict[str, Holds]:
    return {field.name: holds_of_type(str(field.type)) for field in schema}


def holds_of_type(type_: str) -> Holds:
    """What a column of a type of Arrow holds, by its name."""
    is_records = re.match(r"(large_|fixed_size_)?list(_view)?<\w+: struct<", type_)
    return "text" if type_ in ("string", "large_string", "string_view") else "records" if is_records else "other"


def _source(file: Path) -> Any:
    """A file as pyarrow takes it; a compressed one is decompressed as a whole, for it is read from its end."""
    import pyarrow

    whole = ending_of(file.name).endswith((".gz", ".zst"))
    return io.BytesIO(read_whole(file)) if whole else pyarrow.OSFile(str(file))


def _pyarrow(file: Path, module: str) -> Any:
    try:
        if module == "parquet":
            import pyarrow.parquet as found
        else:
            import pyarrow.ipc as found
    except ImportError as error:
        way_out = "pip install pyarrow, or give the data as .jsonl"
        raise ImportError(f"data.path: {file} needs the package `pyarrow`: {way_out}") from error
    return found


def _head(file: Path) -> bytes:
    opened = OpenedFile(file)
    try:
        return opened.read(HEAD_BYTES).removeprefix(_BYTE_ORDER_MARK)
    finally:
        opened.close()


def _check_head(file: Path, head: bytes) -> None:
    """Refuse a file that is no text.

    Raises: ValueError naming what it is.
    """
    kind = kind_of(head, is_text=True)
    if kind is None:
        if zeros := zeros_of(head):
            raise ValueError(f"data.path: {file} is not JSON in UTF-8: {zeros}")
        return
    way_out = "give it the ending of its compression too, .gz or .zst" if kind.is_compressed else kind.way_out
    raise ValueError(f"data.path: {file} is {kind.name}, not JSON in UTF-8; {way_out}")


def _refuse_object(file: Path) -> None:
    """Refuse an object over several lines, such as a file of settings.

    Raises: ValueError naming the file.
    """
    opened = OpenedFile(file)
    try:
        first = opened.readline().removeprefix(_BYTE_ORDER_MARK).strip()
        while not first and (line := opened.readline()):
            first = line.strip()
    finally:
        opened.close()
    if not first.endswith(b"}"):
        raise ValueError(
            f"data.path: {file} is one object of JSON over several lines; give an array of records, "
            "`[{...}, {...}]`, or JSON lines, a record a line"
        )
