"""Parse TOML files and `--section.key=value` overrides into a `Recipe`, and write a `Recipe` as TOML.

A recipe may have another file as its `base`. Values of the recipe replace those of its base key by key, and overrides
replace both. All problems are reported together, each with the file or command line that it comes from.
"""

import os
import tomllib
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple, get_origin

from titan_moe.config.nearest import unknown_key
from titan_moe.config.recipe import Recipe
from titan_moe.config.renamed import REMOVED, values_before
from titan_moe.config.schema import Key, all_keys, in_toml, keys_of, type_in_words

COMMAND_LINE = "command line"
BOOLEANS = {"true": True, "false": False}
PATHS = {
    "run.folder",
    "data.path",
    "data.files",
    "data.tokenizer",
    "data.cache_folder",
    "checkpoint.load_from",
}
"""Fields with a path or a glob, in which `~` is the home folder: no shell expands it in `--run.folder=~/run`."""
BESIDE_A_RUNS_RECIPE = "environment.json"
"""A `recipe.toml` beside a file of this name is the resolved recipe of a run."""


class RecipeError(Exception):
    """An invalid recipe. `problems` has one message per problem."""

    def __init__(self, problems: list[str]) -> None:
        super().__init__("\n".join(problems))
        self.problems = problems

    def __reduce__(self) -> tuple[type["RecipeError"], tuple[list[str]]]:
        return type(self), (self.problems,)


class Setting(NamedTuple):
    """A value and its source, a file or the command line. Text of a command line has no type yet."""

    value: Any
    source: str
    is_text: bool = False


def load_recipe(path: str | Path, overrides: Sequence[str] = ()) -> Recipe:
    """Read a recipe file with its bases, and apply overrides.

    `overrides` are command-line arguments: `--train.steps=50`, or `--train.steps` followed by `50`. The recipe that a
    run wrote into its folder means this folder, also if it was moved since; a copy elsewhere is an ordinary recipe.

    Raises: RecipeError with all problems.
    """
    problems: list[str] = []
    settings = _read_with_bases(Path(path), (), problems)
    settings |= _of_a_run(Path(path), settings)
    settings |= _read_overrides(overrides, problems)
    recipe = _build(Recipe, "", settings, problems)
    if problems:
        raise RecipeError(problems)
    return recipe


def split_overrides(argv: Sequence[str]) -> tuple[list[str], list[str]]:
    """Separate `--section.key` arguments and their values from the other arguments of a command line."""
    overrides: list[str] = []
    others: list[str] = []
    remaining = list(argv)
    while remaining:
        argument = remaining.pop(0)
        if not _is_override(argument):
            others.append(argument)
        elif "=" in argument or not remaining or remaining[0].startswith("--") or _is_switch(argument, remaining[0]):
            overrides.append(argument)
        else:
            overrides += [argument, remaining.pop(0)]
    return overrides, others


def dump_recipe(recipe: Recipe) -> str:
    """Write all fields of a recipe as TOML. Reading it returns an equal recipe."""
    return "\n\n".join(_dump_section(recipe, "")) + "\n"


# Reading: all files and the command line become one flat table, dotted key -> Setting.


def _read_with_bases(path: Path, children: tuple[Path, ...], problems: list[str]) -> dict[str, Setting]:
    """Read a file and its base. `children` are the files whose base chain leads to this one."""
    if path.resolve() in (child.resolve() for child in children):
        chain = " -> ".join(str(file) for file in (*children, path))
        problems.append(f"{children[-1]}: base = {in_toml(path.name)} closes a cycle: {chain}")
        return {}
    table = _read_toml(path, children, problems)
    base = table.pop("base", None)
    settings = _flatten(table, str(path))
    if isinstance(base, str):
        return _read_with_bases(path.parent / os.path.expanduser(base), (*children, path), problems) | settings
    if base is not None:
        problems.append(f"{path}: base = {in_toml(base)} must be a string, the path of a recipe relative to this file")
    return settings


def _of_a_run(path: Path, settings: dict[str, Setting]) -> dict[str, Setting]:
    """If a run wrote this recipe: its folder, as a setting, and what it did where fields are newer than the recipe."""
    if path.name != "recipe.toml" or not path.with_name(BESIDE_A_RUNS_RECIPE).is_file():
        return {}
    folder = path.parent if path.parent.name else path.absolute().parent  # not "."
    before = values_before({dotted: setting.value for dotted, setting in settings.items()})
    return {dotted: Setting(value, str(path)) for dotted, value in {"run.folder": str(folder), **before}.items()}


def _read_toml(path: Path, children: tuple[Path, ...], problems: list[str]) -> dict[str, Any]:
    referrer = f"{children[-1]}: base: " if children else ""
    try:
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        problems.append(f"{referrer}{path} does not exist; {_recipes_in(path.parent)}")
    except IsADirectoryError:
        problems.append(f"{referrer}{path} is a folder; {_recipes_in(path)}")
    except OSError as error:
        problems.append(f"{referrer}{path} cannot be read: {error.strerror}")
    except ValueError as error:  # TOMLDecodeError contains line and column, UnicodeDecodeError the byte
        problems.append(f"{path} is not valid TOML: {error}")
    return {}


def _recipes_in(folder: Path) -> str:
    """The recipes of a folder or, if it has none, of its folder `recipes`, for a way out."""
    for place in (folder, folder / "recipes"):
        names = {file.name for file in place.glob("*.toml")} if place.is_dir() else set()
        if recipes := sorted(names - {"pyproject.toml"}):
            return f"{place}/ contains {', '.join(recipes)}"
    return f"{folder}/ contains no recipe"


def _flatten(table: dict[str, Any], source: str, prefix: str = "") -> dict[str, Setting]:
    """Map dotted keys to settings. An unknown table stays one value, so that it is one problem."""
    known = all_keys(Recipe)
    settings: dict[str, Setting] = {}
    for name, value in table.items():
        dotted = f"{prefix}{name}"
        if isinstance(value, dict) and dotted in known and known[dotted].is_section:
            settings |= _flatten(value, source, f"{dotted}.")
        else:
            settings[dotted] = Setting(value, source)
    return settings


def _is_override(argument: str) -> bool:
    return argument.startswith("--") and "." in argument.partition("=")[0]


def _is_switch(argument: str, following: str) -> bool:
    """Whether an argument sets a boolean without a value, as the word after it is none."""
    key = all_keys(Recipe).get(argument.removeprefix("--"))
    return key is not None and key.type is bool and following.lower() not in BOOLEANS


def _read_overrides(argv: Sequence[str], problems: list[str]) -> dict[str, Setting]:
    overrides, others = split_overrides(argv)
    problems += [f"{COMMAND_LINE}: {argument} is not of the form --section.key=value" for argument in others]
    settings: dict[str, Setting] = {}
    known = all_keys(Recipe)
    while overrides:
        dotted, equals, text = overrides.pop(0).removeprefix("--").partition("=")
        if not equals and overrides and not _is_override(overrides[0]):
            text = overrides.pop(0)
        elif not equals:  # --section.key without a value sets a boolean to true
            text = "true"
            if dotted in known and not known[dotted].is_section and known[dotted].plain_type is not bool:
                problems.append(f"{COMMAND_LINE}: --{dotted} needs a value, {type_in_words(known[dotted])}")
                continue
        settings[dotted] = Setting(text, COMMAND_LINE, is_text=True)
    return settings


# Building: the flat table becomes dataclasses. Unknown keys are problems.


def _build(section: type, prefix: str, settings: dict[str, Setting], problems: list[str]) -> Any:
    values: dict[str, Any] = {}
    for key in keys_of(section, prefix):
        if key.is_section:
            values[key.attribute] = _build(key.type, f"{key.dotted}.", settings, problems)
            if key.dotted in settings:
                problems.append(f"{settings[key.dotted].source}: {key.dotted} is a section; set its keys one by one")
        elif key.dotted in settings:
            values[key.attribute] = _convert(key, settings[key.dotted], problems)
    if not prefix:
        unknown = [dotted for dotted in settings if dotted not in all_keys(section)]
        for dotted in unknown:
            value, source, _ = settings[dotted]
            problems.append(f"{source}: {unknown_key(dotted, is_section=isinstance(value, dict))}")
    return section(**values)


def _convert(key: Key, setting: Setting, problems: list[str]) -> Any:
    value = _from_text(key.plain_type, setting.value) if setting.is_text else setting.value
    if key.dotted in PATHS and type(value) is str:
        value = os.path.expanduser(value)
    if key.is_list and type(value) is list and all(type(entry) is str for entry in value):
        return tuple(value)
    if key.plain_type is float and type(value) is int:
        value = float(str(value))  # an integer of 400 digits becomes infinite; float(value) would raise
    if (type(value) is str and value in key.choices) if key.choices else type(value) is key.plain_type:
        return value
    if key.word and value == key.word:
        return value
    shown = setting.value if setting.is_text else in_toml(setting.value)
    removed = REMOVED.get(f"{key.dotted} = {in_toml(value)}")
    reason = f" ({removed})" if removed else ""
    way_out = f"; {key.way_to_add}" if key.way_to_add else ""
    problems.append(f"{setting.source}: {key.dotted} = {shown} must be {type_in_words(key)}{reason}{way_out}")
    return key.default


def _from_text(annotation: Any, text: str) -> Any:
    """Convert a command-line argument to a field's type, or return it unchanged if it does not fit."""
    if annotation is bool:
        return BOOLEANS.get(text.lower(), text)
    if annotation in (int, float):
        try:
            return annotation(text)
        except ValueError:
            pass
    if get_origin(annotation) is tuple:
        return _list_from_text(text)
    return text


def _list_from_text(text: str) -> Any:
    """Convert a list of strings, as TOML or with commas: `["a", "b"]`, `a,b`."""
    try:
        return tomllib.loads(f"value = {text}")["value"]
    except tomllib.TOMLDecodeError:
        return [entry.strip() for entry in text.split(",") if entry.strip()]


def _dump_section(section: Any, dotted: str) -> list[str]:
    """Blocks of TOML text: the keys of a section first, then its inner sections, as TOML requires."""
    keys = keys_of(type(section), f"{dotted}." if dotted else "")
    lines = [f"{key.name} = {in_toml(getattr(section, key.attribute))}" for key in keys if not key.is_section]
    blocks = ["\n".join([f"[{dotted}]", *lines])] if dotted else []
    for key in keys:
        if key.is_section:
            blocks += _dump_section(getattr(section, key.attribute), key.dotted)
    return blocks
