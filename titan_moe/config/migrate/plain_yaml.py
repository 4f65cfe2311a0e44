"""Read the plain part of YAML: tables by indentation, numbers, words, lists of them. The rest is refused by line."""

import re
from typing import Any, NamedTuple

KEY = re.compile(r"(?P<name>[\w.+-]+|\"[^\"]*\"|'[^']*')\s*:(?:\s+(?P<value>.*))?$")
NUMBER = re.compile(r"[+-]?(\d[\d_]*)?\.?\d+\.?(e[+-]?\d+)?", re.IGNORECASE)
BEYOND = "&*!|>{%@`?"
"""What a value of other YAML begins with: anchors, tags, blocks of text, tables in a line."""
WORDS = {"true": True, "false": False, "null": None, "~": None, "": None}
MAX_DIGITS = 30


class Line(NamedTuple):
    """A value by the names of its tables, and its line."""

    path: tuple[str, ...]
    value: Any
    number: int


class PlainError(Exception):
    """What cannot be read, with its line."""


def scalar(text: str) -> Any:
    """A number, a word of YAML, or the text itself, without its quotes."""
    text = text.strip()
    if len(text) > 1 and text[0] == text[-1] and text[0] in "\"'":
        return text[1:-1]
    if text.lower() in WORDS:
        return WORDS[text.lower()]
    if NUMBER.fullmatch(text) and len(text) <= MAX_DIGITS:
        try:
            return int(text)
        except ValueError:
            return float(text)
    return text


def read_plain(text: str) -> list[Line]:
    """The values of a file in its order.

    Raises: PlainError.
    """
    lines: list[Line] = []
    tables: list[tuple[int, str]] = []
    for number, raw in enumerate(text.splitlines(), 1):
        content = _without_comment(raw).rstrip()
        if not content.strip() or content in ("---", "..."):
            continue
        stripped = content.lstrip(" ")
        if stripped.startswith("\t"):
            raise PlainError(f"line {number}: a tab indents it; take spaces")
        indent = len(content) - len(stripped)
        if stripped == "-" or stripped.startswith("- "):
            _add_entry(lines, tables, indent, stripped[1:].strip(), number)
            continue
        match = KEY.match(stripped)
        if match is None:
            raise PlainError(f"line {number}: {stripped[:60]!r} is no `name: value`")
        while tables and tables[-1][0] >= indent:
            tables.pop()
        tables.append((indent, match["name"].strip("\"'")))
        lines.append(Line(tuple(name for _, name in tables), _value(match["value"] or "", number), number))
    inner = {line.path[:depth] for line in lines for depth in range(1, len(line.path))}
    return [line for line in lines if not (line.value is None and line.path in inner)]


def _add_entry(lines: list[Line], tables: list[tuple[int, str]], indent: int, text: str, number: int) -> None:
    """Add an entry to the list of the last name."""
    path = tuple(name for _, name in tables)
    last = lines[-1] if lines and lines[-1].path == path else None
    if last is None or not (last.value is None or type(last.value) is list) or indent < tables[-1][0]:
        raise PlainError(f"line {number}: the entry {text[:60]!r} belongs to no list")
    if KEY.match(text) or text.startswith("- "):
        raise PlainError(f"line {number}: {text[:60]!r}: a list of tables or lists is not read; write it in one line")
    lines[-1] = Line(path, [*(last.value or []), _value(text, number)], last.number)


def _value(text: str, number: int) -> Any:
    text = text.strip()
    if text == "{}":
        return None
    if text.startswith("["):
        inner = text[1:-1]
        if not text.endswith("]") or any(mark in inner for mark in "[]{}"):
            if not text.endswith("]"):
                return text if re.fullmatch(r"[\[\]\d*+() ]+", text) else _refuse(text, number)
            return text
        return [scalar(entry) for entry in inner.split(",") if entry.strip()]
    if text and text[0] in BEYOND:
        return _refuse(text, number)
    return scalar(text)


def _refuse(text: str, number: int) -> Any:
    raise PlainError(f"line {number}: {text[:60]!r} is beyond plain YAML, which has names, numbers, words and lists")


def _without_comment(line: str) -> str:
    """A line up to a # that no quotes contain."""
    mark = ""
    for at, letter in enumerate(line):
        if mark:
            mark = "" if letter == mark else mark
        elif letter in "\"'" and (at == 0 or line[at - 1] in " \t[,:"):
            mark = letter
        elif letter == "#" and (at == 0 or line[at - 1] in " \t"):
            return line[:at]
    return line
