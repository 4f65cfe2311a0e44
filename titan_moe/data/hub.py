"""Documents from Hugging Face `datasets`: hub names, local folders or local files, downloaded first or streamed."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from titan_moe.config.train import DataConfig
from titan_moe.data import json_lines
from titan_moe.data.bad_rows import BadRowError, BadRows
from titan_moe.data.cache import describe_files
from titan_moe.data.corpus import Corpus
from titan_moe.data.text import find_files


def describe_dataset(data: DataConfig) -> list[object]:
    """Make the cache key of a dataset. A hub name is not resolved to a revision: a cached copy stays in use."""
    part = [data.path, data.subset, data.split, data.text_column, data.bad_rows]
    return [*part, describe_files(_local_files(data))]


def fingerprint(data: DataConfig) -> str:
    """Describe the content of a dataset: its part and samples of its local files. Data on the hub has only its name."""
    part = f"{data.subset or 'default'}, {data.split}, {data.text_column}"
    files = [file for file in _local_files(data) if file.is_file() and file.stat().st_size > 0]
    if not files:
        return f"{data.path}, {part}"
    contents = [np.memmap(file, dtype=np.uint8, mode="r") for file in files]
    return f"{part}, bytes as {Corpus(contents, np.empty(0), 256).fingerprint()}"


def read_documents(data: DataConfig, bad_rows: BadRows) -> Iterator[str]:
    """Yield the texts of a downloaded dataset in order."""
    if data.bad_rows == "skip" and json_lines.files_of(data):
        lines = json_lines.JsonLinesStream(data, bad_rows, 0, None)
        yield from iter(lines.read, None)
        return
    for number, row in enumerate(_load(data), start=1):
        if (text := _text(row, data, bad_rows, number)) is not None:
            yield text


class DocumentStream:
    """One pass over a streamed dataset that can stop at any document and resume there.

    A `datasets` stream resumes from its state dict. Right after that it still returns the state of the start of the
    pass, until the first row is read, so the loaded state is kept until then. If the state dict is not plain JSON,
    a resume reads and discards all earlier documents.
    """

    def __init__(self, data: DataConfig, bad_rows: BadRows, num_read: int, place: dict[str, Any] | None) -> None:
        self.num_read = 0
        self._data, self._bad_rows = data, bad_rows
        self._dataset = _load(data)
        self._loaded_place = place = None if json_lines.PLACE in (place or {}) else place
        if place is not None:
            self._dataset.load_state_dict(place)
            self.num_read = num_read
        self._rows = iter(self._dataset)
        while self.num_read < num_read and self._next_row() is not None:
            pass

    def read(self) -> str | None:
        """Return the next document, or None at the end of the pass.

        Raises: BadRowError for a row without text, if they are not skipped; ValueError for a row that `datasets` cannot
        read.
        """
        while (row := self._next_row()) is not None:
            if (text := _text(row, self._data, self._bad_rows, self.num_read)) is not None:
                return text
        return None

    def _next_row(self) -> dict[str, Any] | None:
        try:
            row = next(self._rows, None)
        except ValueError as error:
            reason, way_out = str(error), "repair the file or leave it out"
            if found := json_lines.find_bad_line(self._data, self.num_read):
                reason, way_out = found, 'repair it, leave the file out, or set data.bad_rows = "skip"'
            raise BadRowError(
                f"{_describe_origin(self._data)}: the row after {self.num_read} cannot be read: {reason}; {way_out}"
            ) from error
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
    data: DataConfig, bad_rows: BadRows, num_read: int, place: dict[str, Any] | None
) -> DocumentStream | json_lines.JsonLinesStream:
    """Open a pass over a streamed dataset at document `num_read`: line by line if bad JSON lines are to be skipped."""
    is_by_line = data.bad_rows == "skip" and json_lines.files_of(data)
    return (json_lines.JsonLinesStream if is_by_line else DocumentStream)(data, bad_rows, num_read, place)


def _load(data: DataConfig) -> Any:
    try:
        import datasets
    except ImportError as error:
        raise ImportError(
            "data.source = 'datasets' needs the package `datasets`: pip install datasets; "
            "or read local files with data.source = 'text'"
        ) from error
    if data.path == "pandas":
        raise ValueError('data.path = "pandas" reads pickles, which can run code; give the data as parquet or json')
    files = [str(file) for file in find_files(data.files, "data.files")] if data.files else None
    try:
        return datasets.load_dataset(
            data.path, data.subset or None, data_files=files, split=data.split, streaming=data.is_streamed
        )
    except Exception as error:  # of many types; for some, only the cause contains the reason
        reason = error.__cause__ or error
        found = json_lines.find_bad_line(data, 0) or f"{type(reason).__name__}: {reason}"
        problem = f"`datasets` cannot load this: {found}"
        way_out = "give a name on the Hugging Face hub that can be reached, a folder, or a file type beside data.files"
        raise ValueError(f"{_describe_origin(data)}: {problem}; {way_out}") from error


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
