"""Read a job of torchtitan, Megatron-Core or Megatron-Bridge into names, values and lines."""

import re
import shlex
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from titan_moe.config.migrate.given import Entry, answer_of
from titan_moe.config.migrate.plain_yaml import PlainError, read_plain, scalar
from titan_moe.config.migrate.shell_words import ScriptError, Word, commands_of
from titan_moe.config.migrate.values import AGREEING
from titan_moe.config.parse import RecipeError
from titan_moe.config.renamed import WITHOUT_FIELD
from titan_moe.config.toml_file import read_toml

MAX_BYTES = 256 * 1024
OURS = {"train", "parallel", "optim", "memory", "perf", "precision"}
"""Sections that recipes of ours have and torchtitan's jobs have not."""
OVERRIDE = re.compile(r"\+{0,2}[A-Za-z_]\w*(\.\w+)+=")


def read_job(path: Path, owned: frozenset[str]) -> tuple[str, list[Entry]]:
    """The dialect of a file, and what it says. `owned` are names that rows of the tables answer for.

    Raises: RecipeError that names the line of what cannot be read.
    """
    if path.suffix.lower() == ".toml":
        problems: list[str] = []
        table = read_toml(path, "", problems)
        if problems:
            raise RecipeError(problems)
        return "torchtitan", _of_toml(table, path, owned)
    text = _text(path)
    try:
        return _of_text(text, path.suffix.lower(), owned)
    except (ScriptError, PlainError) as error:
        raise RecipeError([f"{path}: {error}"]) from error


def _text(path: Path) -> str:
    try:
        content = path.read_bytes() if path.is_file() else b""
    except OSError as error:
        raise RecipeError([f"{path} cannot be read: {error.strerror}"]) from error
    if not path.is_file():
        raise RecipeError([f"{path} is no file; convert reads a job's TOML, YAML, script or list of arguments"])
    if len(content) > MAX_BYTES:
        raise RecipeError([f"{path} has more than {MAX_BYTES:,} bytes, so it is no job"])
    try:
        return content.decode("utf-8-sig").replace("\r\n", "\n")
    except UnicodeDecodeError as error:
        line = content.count(b"\n", 0, error.start) + 1
        raise RecipeError([f"{path}: line {line}: byte 0x{content[error.start]:02x} is not UTF-8"]) from error


def _of_text(text: str, ending: str, owned: frozenset[str]) -> tuple[str, list[Entry]]:
    lines = [line.strip() for line in text.splitlines()]
    lines = [line for line in lines if line and not line.startswith("#")]
    if ending in (".yaml", ".yml") or (lines and re.match(r"[\w.-]+:(\s|$)", lines[0])):
        return _of_yaml(text, owned)
    if lines and all(OVERRIDE.match(line) for line in lines[:1]):
        return "bridge", list(_of_overrides(text, owned))
    return "megatron", list(_of_arguments(text, owned))


def spelt(path: Iterable[str], owned: frozenset[str]) -> str:
    """The name that the tables have, with as many of its sections as they have."""
    parts = [part.strip("-").replace("-", "_") for part in path]
    for start in range(len(parts)):
        name = ".".join(parts[start:])
        if name in owned or name in AGREEING or name in WITHOUT_FIELD or answer_of_exactly(name):
            return name
    return ".".join(parts)


def answer_of_exactly(name: str) -> str:
    """Our key for a name, of which no section is left out."""
    answer = answer_of(name)
    return answer if "." not in name or answer != answer_of(name.rpartition(".")[2]) else ""


# torchtitan.


def _of_toml(table: Mapping[str, Any], path: Path, owned: frozenset[str]) -> list[Entry]:
    if OURS & table.keys() or "base" in table:
        sections = ", ".join(f"[{name}]" for name in table if name in OURS)
        raise RecipeError([f"{path} is a recipe already, by {sections or 'its base'}; titan-moe check reads it"])
    lines = _lines_of_toml(path.read_text("utf-8-sig"))
    entries = []
    for names, value in _leaves(table, ()):
        dotted = ".".join(names)
        entries.append(Entry(spelt(names, owned), value, dotted, lines.get(dotted, 1)))
    return entries


def _leaves(table: Mapping[str, Any], path: tuple[str, ...]) -> Iterator[tuple[tuple[str, ...], Any]]:
    for name, value in table.items():
        if isinstance(value, dict):
            yield from _leaves(value, (*path, name))
        else:
            yield (*path, name), value


def _lines_of_toml(text: str) -> dict[str, int]:
    """The line of each key. Inline tables have that of their name."""
    lines, section = {}, ""
    for number, line in enumerate(text.splitlines(), 1):
        if header := re.match(r"\s*\[\s*([\w.\s-]+?)\s*\]", line):
            section = f"{header[1]}."
        elif key := re.match(r"\s*([\w.-]+)\s*=", line):
            lines[section + key[1]] = number
    return lines


# Megatron-Bridge.


def _of_yaml(text: str, owned: frozenset[str]) -> tuple[str, list[Entry]]:
    """Names with dashes are Megatron's arguments in YAML, as in `MODEL_ARGS:`."""
    lines = [line for line in read_plain(text) if not any(part.startswith("_") for part in line.path)]
    arguments = [line for line in lines if line.path[-1].startswith("--")]
    if not arguments:
        return "bridge", [Entry(spelt(x.path, owned), x.value, ".".join(x.path), x.number) for x in lines]
    return "megatron", [
        Entry(spelt(line.path[-1:], owned), _listed(line.value), line.path[-1], line.number)
        for line in arguments
        if line.value is not None
    ]


def _listed(value: Any) -> Any:
    """Several words of a line."""
    words = value.split() if isinstance(value, str) and not value.startswith(("(", "[")) else []
    return [scalar(word) for word in words] if len(words) > 1 else value


def _of_overrides(text: str, owned: frozenset[str]) -> Iterator[Entry]:
    for number, line in enumerate(text.splitlines(), 1):
        try:
            words = shlex.split(line.rstrip("\\ "), comments=True)
        except ValueError as error:
            raise PlainError(f"line {number}: {str(error).lower()}") from error
        for word in words:
            if not OVERRIDE.match(word):
                raise PlainError(f"line {number}: {word[:60]!r} is no section.name=value")
            written, _, value = word.lstrip("+").partition("=")
            yield Entry(spelt(written.split("."), owned), _of_override(value), written, number)


def _of_override(text: str) -> Any:
    if text.startswith("[") and text.endswith("]") and not any(mark in text[1:-1] for mark in "[]*"):
        return [scalar(entry) for entry in text[1:-1].split(",") if entry.strip()]
    return scalar(text)


# Megatron-Core.


def _of_arguments(text: str, owned: frozenset[str]) -> Iterator[Entry]:
    """The arguments of the commands that have some; without such a command, of all that is assigned."""
    commands, assigned = commands_of(text)
    with_arguments = [words for words in commands if _is_name(words[0]) or any(_is_known(w, owned) for w in words)]
    if not any(_is_known(word, owned) for words in (*with_arguments, assigned) for word in words):
        raise ScriptError("no argument such as --num-layers is in it")
    words = [word for command in with_arguments for word in command] or assigned
    at = 0
    while at < len(words):
        word = words[at]
        at += 1
        if not _is_name(word):
            continue
        written, equals, text_behind = word.text.partition("=")
        values = [Word(text_behind, word.line, word.unknown)] if equals else []
        while at < len(words) and not _is_name(words[at]) and not _ends_values(words[at]):
            values.append(words[at])
            at += 1
        unknown = next((value.unknown for value in values if value.unknown), "")
        yield Entry(spelt([written], owned), _of_words(values), written, word.line, unknown)


def _is_name(word: Word) -> bool:
    return word.text.startswith("--") and len(word.text) > 2


def _is_known(word: Word, owned: frozenset[str]) -> bool:
    name = word.text.partition("=")[0].strip("-").replace("-", "_")
    return _is_name(word) and (name in owned or name in AGREEING or bool(answer_of(name)))


def _ends_values(word: Word) -> bool:
    """A script, or an option of one letter."""
    return word.text.endswith(".py") or re.fullmatch(r"-[A-Za-z]\w*", word.text) is not None


def _of_words(values: list[Word]) -> Any:
    if not values:
        return True
    numbers = [scalar(value.text) for value in values]
    return numbers[0] if len(numbers) == 1 else numbers
