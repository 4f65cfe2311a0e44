"""Read a TOML file that may be anything: a refusal is quick and names the place."""

import difflib
import os
import re
import tomllib
from pathlib import Path
from typing import Any

from titan_moe.config.regular_file import NOT_REGULAR, open_regular

MAX_BYTES = 256 * 1024
"""Of a recipe; a resolved one has some thousand."""
MAX_DOTS = 16
"""Of a dotted name; those of recipes have 2. The time that TOML takes grows with the square of it."""
MAX_FILES_NAMED = 5
NAME_AND_DOT = r"""["'\w-]+[ \t]*\.[ \t]*"""
DEEP_NAME = re.compile(rf"(?<![\"'\w-])(?:{NAME_AND_DOT}){{{MAX_DOTS + 1}}}")
HEADER = re.compile(r"^\s*\[+([^\[\]]+)\]")


def read_toml(path: Path, referrer: str, problems: list[str]) -> dict[str, Any]:
    """The table of a file, empty if it is refused. `referrer` is what precedes the path in messages."""
    try:
        with open_regular(path) as file:
            content = file.read(MAX_BYTES + 1)
    except FileNotFoundError:
        problems.append(f"{referrer}{path} does not exist; {_recipes_in(path.parent, path.name)}")
        return {}
    except IsADirectoryError:
        problems.append(f"{referrer}{path} is a folder; {_recipes_in(path, path.name)}")
        return {}
    except OSError as error:
        is_other = error.strerror == NOT_REGULAR
        way_out = "is not a regular file; write the recipe into a file"
        reason = way_out if is_other else f"cannot be read: {error.strerror}"
        problems.append(f"{referrer}{path} {reason}")
        return {}
    if len(content) > MAX_BYTES:
        problems.append(f"{referrer}{path} has more than {MAX_BYTES:,} bytes, so it is no recipe")
        return {}
    return _parse(content, path, problems)


def _parse(content: bytes, path: Path, problems: list[str]) -> dict[str, Any]:
    try:
        text = content.decode("utf-8-sig")
        if deep := DEEP_NAME.search(text):
            line = text.count("\n", 0, deep.start()) + 1
            raise ValueError(f"a name has more than {MAX_DOTS} dots (at line {line})")
        return tomllib.loads(text)
    except UnicodeDecodeError as error:
        line = content.count(b"\n", 0, error.start) + 1
        reason = f"byte 0x{content[error.start]:02x} at line {line} is not UTF-8; save it as UTF-8"
        problems.append(f"{path} is not valid TOML: {reason}{_place(content, line)}")
    except RecursionError:
        problems.append(f"{path} is not valid TOML: brackets nest too deeply{_deepest(content)}")
    except ValueError as error:  # TOMLDecodeError contains line and column
        found = re.search(r"at line (\d+)", str(error))
        line = int(found[1]) if found else _longest_number(content) if "digits" in str(error) else -1
        reason = "an integer has too many digits" if "int_max_str_digits" in str(error) else str(error)
        problems.append(f"{path} is not valid TOML: {reason}{_place(content, line)}")
    return {}


def _deepest(content: bytes) -> str:
    lines = content.split(b"\n")
    return _place(content, 1 + max(range(len(lines)), key=lambda at: lines[at].count(b"[") + lines[at].count(b"{")))


def _longest_number(content: bytes) -> int:
    """The line with the longest row of digits."""
    lengths = [max(map(len, re.findall(rb"[0-9_]+", line)), default=0) for line in content.split(b"\n")]
    return 1 + lengths.index(max(lengths))


def _place(content: bytes, line: int) -> str:
    """The section and the text of a line; -1 means the last one."""
    lines = content.decode("utf-8", "backslashreplace").split("\n")
    before = lines if line < 0 else lines[:line]
    headers = [found[1].strip() for text in before if (found := HEADER.match(text))]
    section = f"in [{_cut(headers[-1])}]" if headers else "before the first section"
    return f"; {section}: {_cut(before[-1].strip())}" if before[-1].strip() else f"; {section}"


def _cut(text: str, longest: int = 60) -> str:
    printable = "".join(character if character.isprintable() else "?" for character in text[: longest + 1])
    return printable if len(printable) <= longest else f"{printable[:longest]}..."


def _recipes_in(folder: Path, wanted: str) -> str:
    """The recipes of a folder or, if it has none, of its folder `recipes`, for a way out; of many the nearest names."""
    for place in (folder, folder / "recipes"):
        names = [file.name for file in place.glob("*.toml")] if place.is_dir() else []
        if recipes := sorted(set(names) - {"pyproject.toml"}):
            named, rest = recipes, ""
            if len(recipes) > MAX_FILES_NAMED:
                nearest = difflib.get_close_matches(wanted, recipes, n=MAX_FILES_NAMED, cutoff=0.5)
                named = nearest or recipes[:MAX_FILES_NAMED]
                rest = f" and {len(recipes) - len(named):,} more"
            return f"{place}{os.sep} contains {', '.join(named)}{rest}"
    return f"{folder}/ contains no recipe"
