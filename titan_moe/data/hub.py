"""Documents through Hugging Face `datasets`: hub names, local folders, local files; downloaded first or streamed."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from titan_moe.config.train import DataConfig
from titan_moe.data.cache import describe_files
from titan_moe.data.text import find_files


def describe_dataset(data: DataConfig) -> list[object]:
    """Say what a cache of this dataset was made from; a hub name stands for itself: a run keeps what it first saw."""
    files = find_files(data.files, "data.files") if data.files else sorted(Path(data.path).rglob("*"))
    return [data.path, data.subset, data.split, data.text_column, describe_files(files)]


def read_documents(data: DataConfig) -> Iterator[str]:
    """Read a downloaded dataset's texts in order."""
    for row in _load(data):
        yield _text(row, data)


class DocumentStream:
    """One pass over a streamed dataset that can be left at any document and taken up again there.

    `datasets` knows how to jump to a place that it described before, and describes the start of the pass until it has
    read a row there; where its description is not plain JSON the place is found by reading, and throwing away, the
    documents before it.
    """

    def __init__(self, data: DataConfig, num_read: int, place: dict[str, Any] | None) -> None:
        self.num_read = 0
        self._data = data
        self._dataset = _load(data)
        self._given = place
        if place is not None:
            self._dataset.load_state_dict(place)
            self.num_read = num_read
        self._rows = iter(self._dataset)
        while self.num_read < num_read and self.read() is not None:
            pass

    def read(self) -> str | None:
        """Read the next document; None when the pass is over."""
        try:
            row = next(self._rows, None)
        except ValueError as error:
            raise ValueError(
                f"{_whence(self._data)}: the row after {self.num_read} cannot be read: {error}; mend the file or leave "
                "it out"
            ) from error
        self._given = None
        if row is None:
            return None
        self.num_read += 1
        return _text(row, self._data)

    def place(self) -> dict[str, Any] | None:
        """Describe the place before the next document as plain JSON; None where `datasets` cannot."""
        place = self._given or self._dataset.state_dict()
        try:
            return place if json.loads(json.dumps(place)) == place else None
        except (TypeError, ValueError):
            return None


def _load(data: DataConfig) -> Any:
    try:
        import datasets
    except ImportError as error:
        raise ImportError(
            "data.source = 'datasets' needs the package `datasets`: pip install datasets; "
            "or read local files with data.source = 'text'"
        ) from error
    files = [str(file) for file in find_files(data.files, "data.files")] if data.files else None
    try:
        return datasets.load_dataset(
            data.path, data.subset or None, data_files=files, split=data.split, streaming=data.is_streamed
        )
    except Exception as error:  # of many kinds; some say what happened in their cause only
        reason = error.__cause__ or error
        raise ValueError(f"{_whence(data)}: `datasets` cannot load this: {type(reason).__name__}: {reason}") from error


def _whence(data: DataConfig) -> str:
    return (
        f"data.path = {data.path!r}, data.subset = {data.subset!r}, data.split = {data.split!r}, "
        f"data.files = {data.files!r}"
    )


def _text(row: dict[str, Any], data: DataConfig) -> str:
    if data.text_column not in row:
        raise ValueError(
            f"data.text_column = {data.text_column!r} is no column of data.path = {data.path!r}; "
            f"it has {', '.join(map(repr, row))}"
        )
    text = row[data.text_column] or ""
    if not isinstance(text, str):
        raise ValueError(
            f"data.text_column = {data.text_column!r} of data.path = {data.path!r} holds {type(text).__name__}, "
            "not text; name a column of strings"
        )
    return text
