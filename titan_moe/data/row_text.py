"""Documents of text from rows: the column that has it, and the rows that have none."""

import logging
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from titan_moe.config.train import DataConfig
from titan_moe.data.bad_rows import BadRows
from titan_moe.data.rows import Holds, Rows, columns_of

Convert = Callable[[Any, int, str], Any]
"""(row, its number from 1, its place in words) -> its document, or None for a row that is left out."""
PLACE = "rows"
"""Key of a place of this reader, which is one of `Rows`."""
PLACES = (PLACE, "json_lines")
"""Keys that earlier versions wrote too, for the same."""
NAMES = ("text", "content")
"""Names of a column of text that need not be said. The first is the default of `data.text_column`."""
CONVERSATIONS = (("messages",), ("conversations",), ("prompt", "completion"))
"""Columns of rows that are conversations."""

logger = logging.getLogger(__name__)


class RowTexts:
    """One pass over the documents of rows of local files. It can stop at any document and resume there.

    `convert` makes documents of rows, by default their text.
    """

    def __init__(
        self,
        data: DataConfig,
        files: list[Path],
        kind: str,
        bad_rows: BadRows,
        num_read: int,
        place: Any,
        convert: Convert | None = None,
        part: tuple[list[int], list[int] | None] | None = None,
    ) -> None:
        """`part`: the places at which a pass starts and ends, by default all files."""
        own = next((entry for key, entry in (place or {}).items() if key in PLACES), None)
        self._key = "data.files" if data.source == "datasets" else "data.path"
        start, end = part or (None, None)
        self.column = "" if convert else column_of_files(data, files, kind)
        self._bad_rows, self._convert = bad_rows, convert or self._text
        self._rows = Rows(files, kind, own or start, self.column, end)
        self.num_read = num_read if own else 0
        while self.num_read < num_read and self._rows.next() is not None:
            self.num_read += 1

    def read(self) -> Any:
        """Return the next document, or None at the end of the pass. A row without text has an empty one.

        Raises: BadRowError for a row that is none, if they are not skipped; ValueError for a file that is none.
        """
        while (row := self._rows.next()) is not None:
            self.num_read += 1
            place = f"{self._key}: {row.place}"
            if row.problem:
                self._bad_rows.found(self.num_read, f"{place}, {row.problem}; repair it")
                continue
            if (document := self._convert(row.value, self.num_read, place)) is not None:
                return document
        return None

    def _text(self, row: Any, number: int, place: str) -> str | None:
        text = row.get(self.column, 0) if isinstance(row, dict) else 0
        if text is None or isinstance(text, str):
            return text or ""
        has = "no text" if text == 0 else f"{type(text).__name__}, not text,"
        problem = f"{place}, has {has} in the column {self.column!r}"
        self._bad_rows.found(number, f"{problem}; give a column of strings with data.text_column, repair it")
        return None

    def place(self) -> dict[str, Any]:
        """Return the place of the next row."""
        return {PLACE: self._rows.place}

    @property
    def share(self) -> float:
        """How much of the files is read, from 0 to 1."""
        return self._rows.share


def column_of_files(data: DataConfig, files: list[Path], kind: str) -> str:
    """The column of text of the first file that has rows.

    Raises: ValueError if it cannot be told.
    """
    for file in files:
        if columns := columns_of(file, kind, data.text_column):
            return choose_column(data.text_column, columns, str(file))
    return data.text_column


def choose_column(wanted: str, columns: Mapping[str, Holds], where: str) -> str:
    """The column of text among `columns`. It is `wanted`, or, where that is the default, `content`, or the only one
    that has strings. Beside conversations or other lists of objects none is taken: it may be their id.

    Raises: ValueError with the columns.
    """
    if wanted in columns:
        return wanted
    names = ", ".join(map(repr, columns))
    if wanted != NAMES[0]:
        raise ValueError(f"data.text_column = {wanted!r} is not a column of {where}; its columns are {names}")
    if chat := next((keys for keys in CONVERSATIONS if columns.keys() >= {*keys}), ()):
        raise ValueError(
            f"data.text_column = {wanted!r} is not a column of {where}; its columns are {names}, and it has "
            f'conversations in {" and ".join(map(repr, chat))}: set data.format = "chat", or data.text_column to the '
            "one with the text"
        )
    strings = [name for name, holds in columns.items() if holds == "text"]
    records = next((name for name, holds in columns.items() if holds == "records"), "")
    found = next((name for name in NAMES if name in strings), strings[0] if len(strings) == 1 else "")
    if found and records and found not in NAMES:
        raise ValueError(
            f"data.text_column = {wanted!r} is not a column of {where}; its columns are {names}, and {records!r} has "
            "lists of objects: set data.text_column to the one with the text, or give a record of that list a line"
        )
    if not found:
        which = f"{len(strings)} of them have strings" if strings else "none of them has strings"
        raise ValueError(
            f"data.text_column = {wanted!r} is not a column of {where}; its columns are {names}, and {which}: set "
            "data.text_column to the one with the text"
        )
    logger.info("data.text_column: the text of %s is in its column %r", where, found)
    return found
