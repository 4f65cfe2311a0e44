"""Documents from Hugging Face `datasets`: hub names, local folders or local files, downloaded first or streamed."""

import json
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from titan_moe.config.data_files import ROWS, find_files, kind_of_name
from titan_moe.config.train import DataConfig
from titan_moe.data import json_lines
from titan_moe.data.bad_rows import BadRowError, BadRows
from titan_moe.data.content import describe_files
from titan_moe.data.corpus import Corpus
from titan_moe.data.file_kinds import PARQUET, kind_of, read_head, zeros_of
from titan_moe.data.row_text import PLACES, Convert, RowTexts, choose_column
from titan_moe.data.rows import holds_of_type
from titan_moe.data.text import first_line_not_utf8, rows_of_json
from titan_moe.data.token_file import OpenFiles, TokenFile

_PATHS = {".parquet": "parquet", ".arrow": "arrow", ".csv": "csv", ".json": "json", ".jsonl": "json"}
"""Ending of a file -> the `data.path` that reads it."""
_TEXT_PATHS = ("json", "csv", "text")
_TEXT_SUFFIXES = (".json", ".jsonl", ".csv", ".txt")
_SCAN_BYTES = 1 << 30


def describe_dataset(data: DataConfig) -> list[object]:
    """Make the cache key of a dataset. A hub name is not resolved to a revision: a cached copy stays in use."""
    part = [data.path, data.subset, data.split, data.text_column, data.bad_rows]
    return [*part, describe_files(_local_files(data))]


def fingerprint(data: DataConfig, files: Sequence[Path] = ()) -> str:
    """Describe the content of a dataset: its part and samples of its local files, which are `files` or those that it
    names. Data on the hub has only its name."""
    part = f"{data.subset or 'default'}, {data.split}, {data.text_column}"
    files = [file for file in files or _local_files(data) if file.is_file() and file.stat().st_size > 0]
    if not files:
        return f"{data.path}, {part}"
    open_files = OpenFiles()
    contents = [TokenFile(file, np.dtype(np.uint8), open_files=open_files) for file in files]
    return f"{part}, bytes as {Corpus(contents, np.empty(0), 256).fingerprint()}"


def read_documents(data: DataConfig, bad_rows: BadRows) -> Iterator[str]:
    """Yield the texts of a downloaded dataset in order."""
    if is_read_by_line(data):
        yield from iter(_open_lines(data, bad_rows, 0, None).read, None)
        return
    dataset = load(data)
    data = _with_column(data, dataset)
    rows, num_read = iter(dataset), 0
    while (row := _next_row(rows, num_read, data)) is not None:
        num_read += 1
        if (text := _text(row, data, bad_rows, num_read)) is not None:
            yield text


class DocumentStream:
    """One pass over a streamed dataset that can stop at any document and resume there.

    A `datasets` stream resumes from its state dict. Right after that it still returns the state of the start of the
    pass, until the first row is read, so the loaded state is kept until then. If the state dict is not plain JSON,
    a resume reads and discards all earlier documents. `convert` makes documents of rows, by default their text.
    """

    def __init__(
        self,
        data: DataConfig,
        bad_rows: BadRows,
        num_read: int,
        place: dict[str, Any] | None,
        convert: Convert | None = None,
        dataset: Any = None,
    ) -> None:
        """`dataset`: a part of it, by default all."""
        self.num_read, self._convert = 0, convert or self._text
        self._dataset, self._origin = load(data) if dataset is None else dataset, _describe_origin(data)
        self._data, self._bad_rows = data if convert else _with_column(data, self._dataset), bad_rows
        self._loaded_place = place = None if {*PLACES} & {*(place or {})} else place
        if place is not None:
            self._dataset.load_state_dict(place)
            self.num_read = num_read
        self._rows = iter(self._dataset)
        while self.num_read < num_read and self._next_row() is not None:
            pass

    def read(self) -> Any:
        """Return the next document, or None at the end of the pass.

        Raises: BadRowError for a row without text, if they are not skipped, and for one that `datasets` cannot read;
        ValueError for a file that is gone.
        """
        while (row := self._next_row()) is not None:
            if (document := self._convert(row, self.num_read, f"{self._origin}: row {self.num_read}")) is not None:
                return document
        return None

    def _text(self, row: dict[str, Any], number: int, place: str) -> str | None:
        return _text(row, self._data, self._bad_rows, number)

    def _next_row(self) -> dict[str, Any] | None:
        row = _next_row(self._rows, self.num_read, self._data)
        self._loaded_place = None
        self.num_read += row is not None
        return row

    def place(self) -> dict[str, Any] | None:
        """Return the stream's state before the next document as plain JSON, or None if it is not plain JSON."""
        place = self._loaded_place or self._dataset.state_dict()
        try:
            return place if json.loads(json.dumps(place)) == place else None
        except (TypeError, ValueError):
            return None


def open_stream(
    data: DataConfig,
    bad_rows: BadRows,
    num_read: int,
    place: dict[str, Any] | None,
    convert: Convert | None = None,
) -> DocumentStream | RowTexts:
    """Open a pass over a dataset at document `num_read`: line by line if bad JSON lines are to be skipped, or if the
    rows are no texts, whose fields `datasets` would make equal."""
    open_ = _open_lines if is_read_by_line(data, convert is not None) else DocumentStream
    return open_(data, bad_rows, num_read, place, convert)


def _open_lines(
    data: DataConfig, bad_rows: BadRows, num_read: int, place: dict[str, Any] | None, convert: Convert | None = None
) -> RowTexts:
    return RowTexts(data, json_lines.files_of(data), "json", bad_rows, num_read, place, convert)


def is_read_by_line(data: DataConfig, has_fields: bool = False) -> bool:
    """Whether bad rows can be left out as the files are read. Refuses files that are no text."""
    if (data.bad_rows == "refuse" and not has_fields) or not json_lines.files_of(data):
        return False
    _refuse_other_kinds(data)
    return True


def num_shards(dataset: Any) -> int:
    """The parts into which a streamed dataset can be divided without reading it: its files."""
    return int(getattr(dataset, "num_shards", 0) or dataset.n_shards)


def load(data: DataConfig) -> Any:
    """Open a dataset.

    Raises: ImportError without the package `datasets`; ValueError for a dataset that cannot be opened.
    """
    try:
        import datasets
    except ImportError as error:
        raise ImportError(
            "data.source = 'datasets' needs the package `datasets`: pip install datasets; "
            "or read local files with data.source = 'text'"
        ) from error
    if not data.files and (file := Path(data.path)).is_file():
        path = _PATHS.get(Path(file.name.removesuffix(".gz").removesuffix(".zst")).suffix, "text")
        way_out = f"set data.path = {path!r} and data.files = {data.path!r}"
        if kind_of_name(file.name) in ("text", *ROWS):
            way_out = 'set data.source = "auto", which reads it'
        raise ValueError(f"data.path = {data.path!r} is a file, and `datasets` takes the file type: {way_out}")
    if data.path == "pandas":
        raise ValueError('data.path = "pandas" reads pickles, which can run code; give the data as parquet or json')
    files = [str(file) for file in find_files(data.files, "data.files")] if data.files else None
    _refuse_other_kinds(data)
    try:
        return datasets.load_dataset(
            data.path, data.subset or None, data_files=files, split=data.split, streaming=data.is_streamed
        )
    except Exception as error:  # of many types; for some, only the cause contains the reason
        reason = error.__cause__ or error
        if found := _find_cause(data, 0):
            raise ValueError(f"{_describe_origin(data)}: {found}; {_way_out(data)}") from error
        problem = f"`datasets` cannot load this: {type(reason).__name__}: {reason}"
        way_out = "give a name on the Hugging Face hub that can be reached, a folder, or a file type beside data.files"
        if not data.files and not Path(data.path).exists():
            here = f"no file or folder {data.path!r} is here (working directory {Path.cwd()})"
            raise ValueError(
                f"data.path: {here}, and as a name on the Hugging Face hub `datasets` cannot load it: "
                f"{type(reason).__name__}: {reason}; correct the path, or give a hub name that can be reached"
            ) from error
        raise ValueError(f"{_describe_origin(data)}: {problem}; {way_out}") from error


def _with_column(data: DataConfig, dataset: Any) -> DataConfig:
    """With the column of text, where the dataset tells its columns before its rows."""
    if not dataset.features:
        return data
    columns = {field.name: holds_of_type(str(field.type)) for field in dataset.features.arrow_schema}
    return replace(data, text_column=choose_column(data.text_column, columns, f"data.path = {data.path!r}"))


def _next_row(rows: Iterator[dict[str, Any]], num_read: int, data: DataConfig) -> dict[str, Any] | None:
    """Return the next row, or None after the last one.

    Raises: BadRowError for a row that `datasets` cannot read; ValueError for a file that is gone.
    """
    try:
        return next(rows, None)
    except FileNotFoundError as error:
        raise ValueError(
            f"{_describe_origin(data)}: {error.filename or error} is gone while the run reads it, after row "
            f"{num_read}; restore the file and start the run again"
        ) from error
    except ValueError as error:
        reason = _find_cause(data, num_read) or str(error)
        raise BadRowError(
            f"{_describe_origin(data)}: the row after {num_read} cannot be read: {reason}; {_way_out(data)}"
        ) from error


def _way_out(data: DataConfig) -> str:
    skip = ', or set data.bad_rows = "skip"' if json_lines.files_of(data) else ""
    return f"repair the file or leave it out{skip}"


def _refuse_other_kinds(data: DataConfig) -> None:
    """Refuse local files of text that are none, before `datasets` reads rows from them.

    Raises: ValueError naming the file.
    """
    for file in _local_files(data) if data.path in _TEXT_PATHS else []:
        head = read_head(file)
        kind = kind_of(head, is_text=True)
        if kind is not None and not kind.is_compressed:
            raise ValueError(f"data.files: {file} is {kind.name}, not {data.path} in UTF-8; {kind.way_out}")
        if kind is None and data.path == "text" and (rows := rows_of_json(file, _start(file))):
            way_out = 'set data.path = "json", which reads a column of it'
            raise ValueError(f"data.files: {file} has {rows}, not plain text; {way_out}")
        if kind is None and (zeros := zeros_of(head)):
            raise ValueError(f"data.files: {file} is not {data.path} in UTF-8: {zeros}")


def _start(file: Path) -> bytes:
    """The first mebibyte of a file."""
    with file.open("rb") as stream:
        return stream.read(1 << 20)


def _find_cause(data: DataConfig, num_read: int) -> str:
    """Name the first local file, and the line in it, that explains why a dataset cannot be read after some rows; empty
    if none does in the first GiB."""
    scanned = 0
    for file in filter(Path.is_file, _local_files(data)):
        kind = kind_of(read_head(file), is_text=True)
        if data.path == "parquet" and kind is not PARQUET:
            return f"{file} is not a Parquet table"
        if data.path in _TEXT_PATHS and kind is not None:
            return f"{file} is {kind.name}, and has no name that says so; {kind.way_out}"
        is_text = kind is None and (data.path in _TEXT_PATHS or file.suffix in _TEXT_SUFFIXES)
        if is_text and scanned < _SCAN_BYTES:
            if found := first_line_not_utf8(file):
                return found
            scanned += file.stat().st_size
    return json_lines.find_bad_line(data, num_read)


def _local_files(data: DataConfig) -> list[Path]:
    return find_files(data.files, "data.files") if data.files else sorted(Path(data.path).rglob("*"))


def _describe_origin(data: DataConfig) -> str:
    return ", ".join(f"data.{key} = {getattr(data, key)!r}" for key in ("path", "subset", "split", "files"))


def _text(row: dict[str, Any], data: DataConfig, bad_rows: BadRows, number: int) -> str | None:
    """The text of a row, or None for a bad row that is left out."""
    column, path = f"data.text_column = {data.text_column!r}", f"data.path = {data.path!r}"
    if data.text_column not in row:
        raise ValueError(f"{column} is not a column of {path}; its columns are {', '.join(map(repr, row))}")
    text = row[data.text_column] or ""
    if isinstance(text, str):
        return text
    place = json_lines.place_of_row(data, number) or f"row {number}"
    found = f"contains {type(text).__name__}, not text, in {place}"
    bad_rows.found(number, f"{column} of {path} {found}; give a column of strings, repair the row")
    return None
