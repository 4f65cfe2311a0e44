"""Turn TOML files and `--section.key=value` arguments into a `Recipe`, and a `Recipe` back into TOML.

A recipe may name another file as its `base`; their tables merge key by key and the recipe wins, then the command line
wins. Everything that is wrong is told at once, each problem with the place where it was said.
"""

import difflib
import tomllib
from collections.abc import Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any, NamedTuple

from titan_moe.config.recipe import Recipe
from titan_moe.config.renamed import REMOVED, RENAMED
from titan_moe.config.schema import Key, all_keys, in_toml, keys_of, type_in_words

COMMAND_LINE = "command line"


class RecipeError(Exception):
    """What is wrong with a recipe: `problems` holds one message each."""

    def __init__(self, problems: list[str]) -> None:
        super().__init__("\n".join(problems))
        self.problems = problems

    def __reduce__(self) -> tuple[type["RecipeError"], tuple[list[str]]]:
        return type(self), (self.problems,)


class Said(NamedTuple):
    """A value and the place that said it; `is_text` if it came from a command line and has no type yet."""

    value: Any
    place: str
    is_text: bool = False


def load_recipe(path: str | Path, overrides: Sequence[str] = ()) -> Recipe:
    """Read a recipe file, its bases and the overrides given beside it.

    `overrides` are command-line words: `--train.steps=50`, or `--train.steps` followed by `50`.

    Raises: RecipeError with every problem found.
    """
    problems: list[str] = []
    said = _read_with_bases(Path(path), (), problems)
    said |= _read_overrides(overrides, problems)
    recipe = _build(Recipe, "", said, problems)
    if problems:
        raise RecipeError(problems)
    return recipe


def split_overrides(words: Sequence[str]) -> tuple[list[str], list[str]]:
    """Separate `--section.key` arguments, with the word that is their value, from everything else on a command line."""
    overrides: list[str] = []
    others: list[str] = []
    remaining = list(words)
    while remaining:
        word = remaining.pop(0)
        if not _names_a_key(word):
            others.append(word)
        elif "=" in word or not remaining or remaining[0].startswith("--"):
            overrides.append(word)
        else:
            overrides += [word, remaining.pop(0)]
    return overrides, others


def dump_recipe(recipe: Recipe) -> str:
    """Write every field of a recipe as TOML that reads back as an equal recipe."""
    return "\n\n".join(_dump_section(recipe, "")) + "\n"


def unknown_key(dotted: str) -> str:
    """Say that there is no such key, and what took its place or which one was meant."""
    if dotted in RENAMED:
        return f"{dotted} is now {RENAMED[dotted]}"
    if dotted in REMOVED:
        return f"{dotted} is gone: {REMOVED[dotted]}; drop it"
    return f"{dotted} is not a known key; {nearest_key(dotted)}"


def nearest_key(dotted: str) -> str:
    """Offer the known key that the user most likely meant."""
    known = all_keys(Recipe)
    name = dotted.rpartition(".")[2]
    same_name = [key for key in known if key.rpartition(".")[2] == name]
    guesses = difflib.get_close_matches(dotted, same_name or known, n=1, cutoff=0.0 if same_name else 0.6)
    return f"did you mean {guesses[0]}?" if guesses else f"the sections are {', '.join(f.name for f in fields(Recipe))}"


# Reading: every file and the command line become one flat table, dotted key -> what was said and where.


def _read_with_bases(path: Path, children: tuple[Path, ...], problems: list[str]) -> dict[str, Said]:
    """Read a file on top of its base; `children` are the files that led here."""
    if path.resolve() in (child.resolve() for child in children):
        chain = " -> ".join(str(file) for file in (*children, path))
        problems.append(f"{children[-1]}: base = {in_toml(path.name)} closes a cycle: {chain}")
        return {}
    table = _read_toml(path, children, problems)
    base = table.pop("base", None)
    if base is None:
        return _flatten(table, str(path))
    if not isinstance(base, str):
        problems.append(f"{path}: base = {in_toml(base)} must be a string, the path of a recipe relative to this file")
        return _flatten(table, str(path))
    return _read_with_bases(path.parent / base, (*children, path), problems) | _flatten(table, str(path))


def _read_toml(path: Path, children: tuple[Path, ...], problems: list[str]) -> dict[str, Any]:
    asked_by = f"{children[-1]}: base: " if children else ""
    try:
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        problems.append(f"{asked_by}{path} does not exist; {_recipes_beside(path)}")
    except OSError as error:
        problems.append(f"{asked_by}{path} cannot be read: {error.strerror}")
    except ValueError as error:  # TOMLDecodeError says line and column; UnicodeDecodeError the byte
        problems.append(f"{path} is not valid TOML: {error}")
    return {}


def _recipes_beside(path: Path) -> str:
    names = sorted(file.name for file in path.parent.glob("*.toml")) if path.parent.is_dir() else []
    return f"{path.parent}/ holds {', '.join(names)}" if names else f"{path.parent}/ holds no recipe"


def _flatten(table: dict[str, Any], place: str, prefix: str = "") -> dict[str, Said]:
    """Name every value by its dotted key. A table that no section claims stays whole, to be refused whole."""
    known = all_keys(Recipe)
    said: dict[str, Said] = {}
    for name, value in table.items():
        dotted = f"{prefix}{name}"
        is_section = dotted in known and known[dotted].is_section
        if isinstance(value, dict) and is_section:
            said |= _flatten(value, place, f"{dotted}.")
        else:
            said[dotted] = Said(value, place)
    return said


def _names_a_key(word: str) -> bool:
    return word.startswith("--") and "." in word.partition("=")[0]


def _read_overrides(words: Sequence[str], problems: list[str]) -> dict[str, Said]:
    overrides, others = split_overrides(words)
    problems += [f"{COMMAND_LINE}: {word} is not of the form --section.key=value" for word in others]
    said: dict[str, Said] = {}
    while overrides:
        dotted, equals, text = overrides.pop(0).removeprefix("--").partition("=")
        if not equals:  # a lone --section.key switches a boolean on
            text = overrides.pop(0) if overrides and not _names_a_key(overrides[0]) else "true"
        said[dotted] = Said(text, COMMAND_LINE, is_text=True)
    return said


# Building: the flat table becomes dataclasses, and whatever no key takes is a problem.


def _build(section: type, prefix: str, said: dict[str, Said], problems: list[str]) -> Any:
    values: dict[str, Any] = {}
    keys = keys_of(section, prefix)
    for key in keys:
        if key.is_section:
            values[key.attribute] = _build(key.type, f"{key.dotted}.", said, problems)
            if key.dotted in said:
                problems.append(f"{said[key.dotted].place}: {key.dotted} is a section; set its keys one by one")
        elif key.dotted in said:
            values[key.attribute] = _convert(key, said[key.dotted], problems)
    if not prefix:
        unknown = [dotted for dotted in said if dotted not in all_keys(section)]
        problems += [f"{said[dotted].place}: {unknown_key(dotted)}" for dotted in unknown]
    return section(**values)


def _convert(key: Key, said: Said, problems: list[str]) -> Any:
    value = _from_text(key.type, said.value) if said.is_text else said.value
    if key.type is float and type(value) is int:
        value = float(str(value))  # of 400 digits it is infinite; float(value) would raise
    if (type(value) is str and value in key.choices) if key.choices else type(value) is key.type:
        return value
    shown = said.value if said.is_text else in_toml(said.value)
    gone = REMOVED.get(f"{key.dotted} = {in_toml(value)}")
    reason = f" ({gone})" if gone else ""
    problems.append(f"{said.place}: {key.dotted} = {shown} must be {type_in_words(key)}{reason}")
    return key.default


def _from_text(annotation: Any, text: str) -> Any:
    """Read a command-line word as a field's type; the word itself comes back if it is not one."""
    if annotation is bool:
        return {"true": True, "false": False}.get(text.lower(), text)
    if annotation in (int, float):
        try:
            return annotation(text)
        except ValueError:
            return text
    return text


def _dump_section(section: Any, dotted: str) -> list[str]:
    """Blocks of TOML text: a section's own keys first, then its inner sections, as TOML wants it."""
    keys = keys_of(type(section), f"{dotted}." if dotted else "")
    lines = [f"{key.name} = {in_toml(getattr(section, key.attribute))}" for key in keys if not key.is_section]
    blocks = ["\n".join([f"[{dotted}]", *lines])] if dotted else []
    for key in keys:
        if key.is_section:
            blocks += _dump_section(getattr(section, key.attribute), key.dotted)
    return blocks
