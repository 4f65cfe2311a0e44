"""Parse TOML files and `--section.key=value` overrides into a `Recipe`, and write a `Recipe` as TOML.

A recipe may have another file as its `base`. Values of the recipe replace those of its base key by key, and overrides
replace both. All problems are reported together, each with the file or command line that it comes from.
"""

import math
import os
import re
import tomllib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, get_args, get_origin

from titan_moe.config.nearest import unknown_key
from titan_moe.config.recipe import Recipe
from titan_moe.config.renamed import REMOVED, values_before
from titan_moe.config.run_length import hidden_length, is_given, without_length
from titan_moe.config.schema import Key, Table, all_keys, counted, cut, in_toml, keys_of, shown, type_in_words
from titan_moe.config.toml_file import read_toml

COMMAND_LINE = "command line"
BOOLEANS = {"true": True, "false": False}
PATHS = {
    "run.folder",
    "data.path",
    "data.mixture.path",
    "data.mixture.files",
    "data.files",
    "data.tokenizer",
    "data.cache_folder",
    "data.chat.template",
    "validation.path",
    "validation.sets",
    "checkpoint.load_from",
}
"""Fields with a path or a glob, in which `~` is the home folder: no shell expands it in `--run.folder=~/run`."""
MAX_BASES = 32
"""In a chain of bases."""
MAX_UNKNOWN = 20
"""Unknown keys with a suggestion each; more are counted."""
MAX_BITS = 63
"""Of the size of an integer, in TOML as in torch."""
BESIDE_A_RUNS_RECIPE = "environment.json"
"""A `recipe.toml` beside a file of this name is the resolved recipe of a run."""


class RecipeError(Exception):
    """What is wrong with a recipe, or with what it names. `problems` has one message per problem."""

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
    settings = _merged(settings, _read_overrides(overrides, problems))
    recipe = _build(Recipe, "", settings, problems)
    if problems:
        raise RecipeError(problems)
    return recipe


def recipe_of(fields: Mapping[str, Any], source: str, overrides: Sequence[str] = ()) -> Recipe:
    """A recipe of a checkpoint's values by dotted key, with overrides. Keys that no longer exist are ignored.

    Raises: RecipeError with all problems, which name `source`.
    """
    problems: list[str] = []
    known = {dotted: value for dotted, value in fields.items() if dotted in all_keys(Recipe)}
    settings = {dotted: Setting(value, source) for dotted, value in known.items()}
    recipe = _build(Recipe, "", _merged(settings, _read_overrides(overrides, problems)), problems)
    if problems:
        raise RecipeError(problems)
    return recipe


def blame(problems: Sequence[str], path: str | Path, overrides: Sequence[str]) -> list[str]:
    """Put the source before each problem of a rule: the command line or the base that set all fields which the problem
    states, else the recipe. What follows a semicolon is a way out."""
    settings = _read_with_bases(Path(path), (), []) | _read_overrides(overrides, [])
    return [f"{_source_of(problem, settings) or path}: {problem}" for problem in problems]


def _source_of(problem: str, settings: dict[str, Setting]) -> str:
    named = re.findall(r"\w+(?:\.\w+)+", problem.partition(";")[0].partition(" (")[0])
    sources = {settings[dotted].source for dotted in named if dotted in settings}
    return sources.pop() if len(sources) == 1 else ""


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
    if len(children) > MAX_BASES:
        problems.append(
            f"{children[-1]}: base = {in_toml(path.name)} is more than {MAX_BASES} bases from {children[0]}"
        )
        return {}
    if os.path.realpath(path) in map(os.path.realpath, children):
        chain = " -> ".join(str(file) for file in (*children, path))
        problems.append(f"{children[-1]}: base = {in_toml(path.name)} closes a cycle: {chain}")
        return {}
    table = read_toml(path, f"{children[-1]}: base: " if children else "", problems)
    base = table.pop("base", None)
    settings = _flatten(table, str(path))
    problems += _lengths(settings, str(path))
    if isinstance(base, str) and not base.isprintable():
        problems.append(f"{path}: base = {shown(base)} must be a path, without control characters")
    elif isinstance(base, str):
        return _merged(_read_with_bases(path.parent / os.path.expanduser(base), (*children, path), problems), settings)
    elif base is not None:
        problems.append(f"{path}: base = {shown(base)} must be a string, the path of a recipe relative to this file")
    return settings


def _merged(below: dict[str, Setting], above: dict[str, Setting]) -> dict[str, Setting]:
    """Settings of two sources. The nearer one decides, and alone says how long a run is if it says anything of it."""
    says_length = any(is_given(dotted, setting.value) for dotted, setting in above.items())
    return (without_length(below) if says_length else below) | above


def _lengths(settings: dict[str, Setting], source: str) -> list[str]:
    problem = hidden_length({dotted: setting.value for dotted, setting in settings.items()})
    return [f"{source}: {problem}"] if problem else []


def _of_a_run(path: Path, settings: dict[str, Setting]) -> dict[str, Setting]:
    """If a run wrote this recipe: its folder, as a setting, and what it did where fields are newer than the recipe."""
    if path.name != "recipe.toml" or not path.with_name(BESIDE_A_RUNS_RECIPE).is_file():
        return {}
    folder = path.parent if path.parent.name else path.absolute().parent  # not "."
    before = values_before({dotted: setting.value for dotted, setting in settings.items()})
    return {dotted: Setting(value, str(path)) for dotted, value in {"run.folder": str(folder), **before}.items()}


def _flatten(table: dict[str, Any], source: str, prefix: str = "") -> dict[str, Setting]:
    """Map dotted keys to settings. An unknown table stays one value, so that it is one problem."""
    known = all_keys(Recipe)
    settings: dict[str, Setting] = {}
    for name, value in table.items():
        dotted = f"{prefix}{name if name and '.' not in name else in_toml(name)}"
        if isinstance(value, dict) and dotted in known and known[dotted].is_section:
            settings |= _flatten(value, source, f"{dotted}.")
        elif isinstance(value, dict) and dotted in known and known[dotted].is_table:
            settings |= {f"{dotted}.{inner}": Setting(entry, source) for inner, entry in value.items()}
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
    problems += [f"{COMMAND_LINE}: {cut(argument)} is not of the form --section.key=value" for argument in others]
    settings: dict[str, Setting] = {}
    known = all_keys(Recipe)
    while overrides:
        dotted, equals, text = overrides.pop(0).removeprefix("--").partition("=")
        if not equals and overrides and not _is_override(overrides[0]):
            text = overrides.pop(0)
        elif not equals:  # --section.key without a value sets a boolean to true
            text = "true"
            if dotted in known and not known[dotted].is_section and known[dotted].plain_type is not bool:
                problems.append(f"{COMMAND_LINE}: --{cut(dotted)} needs a value, {type_in_words(known[dotted])}")
                continue
        settings[dotted] = Setting(text, COMMAND_LINE, is_text=True)
    problems += _lengths(settings, COMMAND_LINE)
    return settings


# Building: the flat table becomes dataclasses. Unknown keys are problems.


def _build(section: type, prefix: str, settings: dict[str, Setting], problems: list[str]) -> Any:
    values: dict[str, Any] = {}
    for key in keys_of(section, prefix):
        if key.is_section:
            values[key.attribute] = _build(key.type, f"{key.dotted}.", settings, problems)
            if key.dotted in settings:
                problems.append(f"{settings[key.dotted].source}: {key.dotted} is a section; set its keys one by one")
        elif key.is_table:
            values[key.attribute] = _table(key, settings, problems)
        elif key.dotted in settings and key.has_tables:
            values[key.attribute] = _tables(key, settings[key.dotted], problems)
        elif key.dotted in settings:
            values[key.attribute] = _convert(key, settings[key.dotted], problems)
    if not prefix:
        tables = tuple(f"{key.dotted}." for key in all_keys(section).values() if key.is_table)
        unknown = [name for name in settings if name not in all_keys(section) and not name.startswith(tables)]
        for dotted in unknown[:MAX_UNKNOWN]:
            value, source, _ = settings[dotted]
            problems.append(f"{source}: {unknown_key(dotted, is_section=isinstance(value, dict))}")
        if rest := unknown[MAX_UNKNOWN:]:
            problems.append(
                f"{settings[rest[0]].source}: {counted(len(rest), 'more key')} not known, from {cut(rest[0])} on"
            )
    return section(**values)


def _table(key: Key, settings: dict[str, Setting], problems: list[str]) -> Table:
    """A table of names, of which each source may set some."""
    inner = {dotted: setting for dotted, setting in settings.items() if dotted.startswith(f"{key.dotted}.")}
    if (whole := settings.get(key.dotted)) is not None:
        value = _from_text(dict, whole.value) if whole.is_text else whole.value
        if not isinstance(value, dict):
            words = f"{key.dotted} = {shown(value)} must be {type_in_words(key)}"
            problems.append(f"{whole.source}: {words}; set its names one by one: {key.dotted}.NAME")
            return key.default
        inner = {f"{key.dotted}.{name}": Setting(entry, whole.source) for name, entry in value.items()} | inner
    values = {}
    for dotted, (value, source, _) in inner.items():
        if must_be := "a string" if type(value) is not str else _limit(value):
            problems.append(f"{source}: {cut(dotted)} = {shown(value)} must be {must_be}")
            continue
        values[dotted.removeprefix(f"{key.dotted}.")] = os.path.expanduser(value) if key.dotted in PATHS else value
    return Table(values)


def _tables(key: Key, setting: Setting, problems: list[str]) -> Any:
    """An array of tables, of one source."""
    value = _from_text(key.type, setting.value) if setting.is_text else setting.value
    if not isinstance(value, (list, tuple)) or not all(isinstance(entry, dict) for entry in value):
        way_out = f"a table [[{key.dotted}]] for each, or [{{ name = value, ... }}, ...]"
        problems.append(f"{setting.source}: {key.dotted} = {shown(value)} must be {type_in_words(key)}: {way_out}")
        return key.default
    tables = []
    for number, table in enumerate(value):
        known = {inner.name: inner for inner in keys_of(key.entry_type, f"{key.dotted}[{number}].")}
        for name in table.keys() - known.keys():
            words = f"{cut(f'{key.dotted}[{number}].{name}')} is not a known key"
            problems.append(f"{setting.source}: {words}; the keys of [[{key.dotted}]] are {', '.join(known)}")
        given = {inner: Setting(table[inner.name], setting.source) for inner in known.values() if inner.name in table}
        tables.append(key.entry_type(**{inner.attribute: _convert(inner, s, problems) for inner, s in given.items()}))
    return tuple(tables)


def _convert(key: Key, setting: Setting, problems: list[str]) -> Any:
    value = _from_text(key.plain_type, setting.value) if setting.is_text else setting.value
    if re.sub(r"\[\d+\]", "", key.dotted) in PATHS and type(value) is str:
        value = os.path.expanduser(value)
    if key.is_list and key.entry_type is float and type(value) is list:
        value = [_as_float(entry) if type(entry) is int else entry for entry in value]
    if key.is_list and type(value) is list and all(type(entry) is key.entry_type for entry in value):
        value = tuple(value)
    if key.is_list and type(value) is str and key.default and not setting.is_text:
        value = (value,)  # one entry
    if key.plain_type is float and type(value) is int:
        value = _as_float(value)
    of_type = (type(value) is str and value in key.choices) if key.choices else type(value) is key.plain_type
    of_type = of_type or (key.is_list and type(value) is tuple) or bool(key.word and value == key.word)
    limit = _limit(value)
    if of_type and not limit:
        return value
    is_number = type(value) is int or (setting.is_text and type(_from_text(int, setting.value)) is int)
    removed = REMOVED.get(f"{key.dotted} = {'a number' if is_number else shown(value)}")
    reason = f" ({removed})" if removed else ""
    way_out = f"; {key.way_to_add}" if key.way_to_add else ""
    written = cut(setting.value) if setting.is_text else shown(setting.value)
    problems.append(
        f"{setting.source}: {key.dotted} = {written} must be {limit or type_in_words(key)}{reason}{way_out}"
    )
    return key.default


def _as_float(value: int) -> float:
    try:
        return float(value)
    except OverflowError:
        return math.inf if value > 0 else -math.inf


def _limit(value: Any) -> str:
    """What a value of the right type breaks: the range of TOML's integers, or characters that no path has."""
    if type(value) is int and value.bit_length() > MAX_BITS:
        return f"an integer of {MAX_BITS + 1} bits"
    if type(value) is tuple:
        return next(filter(None, map(_limit, value)), "")
    if type(value) is str and ("\0" in value or value != value.encode("utf-8", "replace").decode()):
        return "valid text without NUL characters"
    return ""


def _from_text(annotation: Any, text: str) -> Any:
    """Convert a command-line argument to a field's type, or return it unchanged if it does not fit."""
    if annotation is bool:
        return BOOLEANS.get(text.lower(), text)
    if annotation in (int, float):
        try:
            return annotation(text)
        except (ValueError, OverflowError):
            pass
    if annotation is dict and not text:
        return {}
    if get_origin(annotation) is tuple:
        return _list_from_text(text, get_args(annotation)[0])
    return text


def _list_from_text(text: str, of_type: type) -> Any:
    """Convert a list, as TOML or with commas: `["a", "b"]`, `a,b`."""
    try:
        value = tomllib.loads(f"value = {text}")["value"]
    except (ValueError, RecursionError):
        value = [_from_text(of_type, entry.strip()) for entry in text.split(",") if entry.strip()]
    return [value] if of_type in (int, float) and type(value) in (int, of_type) else value


def _dump_section(section: Any, dotted: str) -> list[str]:
    """Blocks of TOML text: the keys of a section first, then its inner sections, as TOML requires."""
    keys = keys_of(type(section), f"{dotted}." if dotted else "")
    lines = [f"{key.name} = {in_toml(getattr(section, key.attribute))}" for key in keys if not key.is_section]
    blocks = ["\n".join([f"[{dotted}]", *lines])] if dotted else []
    for key in keys:
        if key.is_section:
            blocks += _dump_section(getattr(section, key.attribute), key.dotted)
    return blocks
