"""Documents from local text files, one document per file."""

import codecs
import json
import logging
import sysconfig
from collections.abc import Iterator
from pathlib import Path

from titan_moe.config.data_files import LINE_ENDINGS, ROWS, STANDARD_LIBRARY, ending_of, find_files, kind_of_name
from titan_moe.data.bad_rows import BadRowError
from titan_moe.data.file_kinds import HEAD_BYTES, kind_of
from titan_moe.data.opened import read_whole
from titan_moe.data.row_text import CONVERSATIONS, NAMES

_REPLACEMENT = "\N{REPLACEMENT CHARACTER}"
_FEW_BAD_BYTES = 8
_MAX_BAD_SHARE = 1e-3
"""More bad bytes than this are no accident: text in Latin-1 has more, of almost every language."""
_HEAD_OF_ROWS = 1 << 24
"""Bytes in which the first lines are looked for."""
_WAY_OUT = "convert the text to UTF-8 (iconv -f LATIN1 -t UTF-8), or leave out what is not text"
_EXCLUDED = {"test", "tests", "idlelib", "lib2to3", "site-packages", "dist-packages", "__pycache__"}

logger = logging.getLogger(__name__)


def find_text_files(path: str) -> list[Path]:
    """List the files of `data.path`, sorted, so that all ranks and all restarts read the same documents.

    `python-stdlib` stands for the standard library sources of the running Python, without their tests. They exist on
    every machine but differ between Python releases, so losses are comparable only within one release.

    Raises: FileNotFoundError if no file matches.
    """
    if path != STANDARD_LIBRARY:
        return find_files(path, "data.path")
    root = Path(sysconfig.get_path("stdlib"))
    relative = (file.relative_to(root) for file in root.rglob("*.py"))
    kept = sorted(path.as_posix() for path in relative if _EXCLUDED.isdisjoint(path.parts))
    if not kept:
        raise FileNotFoundError(
            f"data.path = {path!r} finds no sources in {root}: this Python has its library in an archive; give text "
            "files instead"
        )
    return [root / path for path in kept]


def read_documents(files: list[Path]) -> Iterator[str]:
    """Yield the text of each file. Bytes that are not UTF-8 become the replacement character; the log counts them.

    Raises: BadRowError for a file that is not text, or has too many such bytes; ValueError if all files together do.
    """
    num_bytes = num_bad = 0
    bad_files = []
    for file in files:
        data = read_whole(file)
        if kind := kind_of(data[:HEAD_BYTES], is_text=True):
            raise BadRowError(f"data.path: {file} is {kind.name}, not text in UTF-8; {kind.way_out}")
        if rows := rows_of_json(file, data):
            rename = "" if kind_of_name(file.name) in ROWS else "rename it to .jsonl and "
            raise BadRowError(
                f"data.path: {file} has {rows}, not plain text: its braces and names would be trained on; {rename}set "
                'data.source = "auto", which reads a column of it'
            )
        text = data.decode("utf-8", errors="replace")
        bad = _count_bad_bytes(data, text)
        num_bytes, num_bad = num_bytes + len(data), num_bad + bad
        if bad:
            bad_files.append(file)
            if _is_no_text(bad, len(data)):
                raise BadRowError(f"data.path: {_describe_bad(f'{file}:', bad, len(data))}; {_WAY_OUT}")
        yield text
    if bad_files:
        where = f"{len(bad_files)} of {len(files)} files (the first is {bad_files[0]}):"
        if _is_no_text(num_bad, num_bytes):
            raise ValueError(f"data.path: {_describe_bad(where, num_bad, num_bytes)}; {_WAY_OUT}")
        logger.warning("data.path: %s; they are replaced", _describe_bad(where, num_bad, num_bytes))


def rows_of_json(file: Path, data: bytes) -> str:
    """What a file is that has rows of JSON and no text, in words; empty for text.

    The content decides: most of the first lines are objects, or there is an array of them. A file of one line is one
    if its ending or the names in it say so.
    """
    is_whole = len(data) <= _HEAD_OF_ROWS
    data = data.removeprefix(codecs.BOM_UTF8)
    lines = [line for line in data[:_HEAD_OF_ROWS].split(b"\n", 8)[:8] if line.strip()]
    if ending_of(file.name).startswith(LINE_ENDINGS) and lines:
        return "JSON lines"
    objects = [found for line in lines if (found := _object(line)) is not None]
    is_row = len(objects) == 1 and any({*names} <= {*objects[0]} for names in (NAMES[:1], NAMES[1:], *CONVERSATIONS))
    if 2 * len(objects) > len(lines) and (len(lines) > 1 or is_row):
        return "JSON lines"
    start = data[:HEAD_BYTES].split()
    if b"".join(start[:2])[:2] != b"[{":
        return ""
    if not is_whole:
        return "an array of JSON records" if file.suffix == ".json" else ""
    try:
        return "an array of JSON records" * isinstance(json.loads(data)[0], dict)
    except (ValueError, RecursionError, IndexError, TypeError, KeyError):
        return ""


def first_line_not_utf8(file: Path) -> str:
    """Name the first line of a file that is not UTF-8, and the bytes; empty if there is none."""
    with file.open("rb") as stream:
        for number, line in enumerate(stream, start=1):
            try:
                line.decode()
            except UnicodeDecodeError as error:
                found = line[error.start : error.end].hex(" ")
                return f"{file}, line {number}, is not UTF-8: it has the bytes {found} at column {error.start + 1}"
    return ""


def _object(line: bytes) -> dict[str, object] | None:
    """The object of JSON that a line is. One that is cut is none."""
    if not line.strip().startswith(b"{"):
        return None
    try:
        found = json.loads(line)
    except (ValueError, RecursionError):
        return None
    return found if isinstance(found, dict) else None


def _count_bad_bytes(data: bytes, text: str) -> int:
    """Count the bytes that are not UTF-8, and those that are 0, which text does not have and UTF-16 has many of."""
    num_replaced = text.count(_REPLACEMENT) - data.count(_REPLACEMENT.encode())
    if num_replaced:
        num_replaced = len(data) - (len(text.encode()) - num_replaced * len(_REPLACEMENT.encode()))
    return num_replaced + data.count(0)


def _is_no_text(num_bad: int, num_bytes: int) -> bool:
    return num_bad > _FEW_BAD_BYTES and num_bad > _MAX_BAD_SHARE * num_bytes


def _describe_bad(where: str, num_bad: int, num_bytes: int) -> str:
    return f"{where} {num_bad:,} of {num_bytes:,} bytes ({100 * num_bad / num_bytes:.2g} %) are not text in UTF-8"
