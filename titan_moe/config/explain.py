"""Explain the keys of recipes: `titan-moe check --explain [KEY]` and `titan-moe recipe`."""

import inspect
import re
import textwrap
from collections.abc import Iterator

from titan_moe.config.field_docs import purpose_of
from titan_moe.config.nearest import unknown_key
from titan_moe.config.parse import RecipeError
from titan_moe.config.recipe import Recipe
from titan_moe.config.resume import change_of
from titan_moe.config.schema import Key, all_keys, docstring_of, in_toml, keys_of, type_in_words

LINE_WIDTH = 100
SHORT_WIDTH = 44
"""Of a field and its default in a list of all."""
VALUE = re.compile(r"^`([^`]+)`: ", re.MULTILINE)
"""The start of a value's explanation in a docstring: a line "`value`: ..."."""
BASE = "base"
BASE_TITLE = "base: a string, the path of another recipe, relative to this file"
BASE_PURPOSE = (
    "At the top of a recipe that starts from the values of another one. Its own values replace those of the base key "
    "by key, and the command line replaces both. A base may have a base. recipes/models/ has shapes of models."
)


def explain(dotted_key: str) -> str:
    """Describe a field (type, default, purpose, values, whether a resume may change it) or a section (its
    purpose and its fields).

    Raises: RecipeError for an unknown key, with the nearest known one.
    """
    if dotted_key == BASE:  # no field of the data that results
        return f"{BASE_TITLE}\n{_wrap(BASE_PURPOSE)}"
    key = all_keys(Recipe).get(dotted_key)
    if key is None:
        raise RecipeError([unknown_key(dotted_key)])
    if not key.is_section:
        title = f"{key.dotted}: {type_in_words(key)}, {in_toml(key.default)} by default"
        tables = "\n".join(_fields_of_tables(key)) if key.has_tables else ""
        return f"{title}\n{_purpose(key)}\n{_wrap(change_of(key.dotted).value)}{tables}"
    lines = [f"[{key.dotted}]", textwrap.indent(purpose_of(key.type), "    "), ""]
    for inner in keys_of(key.type, f"{key.dotted}."):
        title = f"[{inner.dotted}]" if inner.is_section else f"{inner.name} = {in_toml(inner.default)}"
        lines.append(f"{title}\n{_purpose(inner)}")
        if inner.choices and not _explained_values(inner):
            lines.append(_wrap(f"Values: {', '.join(map(in_toml, inner.choices))}."))
    return "\n".join(lines)


def _fields_of_tables(key: Key) -> Iterator[str]:
    yield f"\n\n[[{key.dotted}]]"
    for inner in keys_of(key.entry_type, f"{key.dotted}."):
        yield f"{inner.name} = {in_toml(inner.default)}\n{_purpose(inner)}"


def list_fields() -> str:
    """Every field by section, with its default and the first sentence of its purpose."""
    lines = []
    for section, fields in _sections():
        lines += ["", f"[{section.dotted}]  {_first_sentence(purpose_of(section.type))}"]
        for key in fields:
            short = _first_sentence(split_values(docstring_of(key))[0])
            lines.append(f"  {key.name} = {in_toml(key.default)}".ljust(SHORT_WIDTH) + f"  {short}")
    return "\n".join(lines[1:])


def recipe_with_explanations() -> str:
    """A recipe of all fields at their defaults, as TOML, with their explanations as comments."""
    lines = ["# All fields of a recipe at their defaults. A recipe needs only what differs."]
    for section, fields in _sections():
        lines += ["", _as_comment(purpose_of(section.type)), f"[{section.dotted}]"]
        for key in fields:
            lines += [_as_comment(textwrap.dedent(_purpose(key))), f"{key.name} = {in_toml(key.default)}"]
    return "\n".join(lines)


def _sections() -> Iterator[tuple[Key, list[Key]]]:
    """Each section with the fields that are directly in it."""
    for key in all_keys(Recipe).values():
        if key.is_section:
            yield key, [inner for inner in keys_of(key.type, f"{key.dotted}.") if not inner.is_section]


def _first_sentence(text: str) -> str:
    return re.split(r"(?<=[.:])\s", " ".join(text.split()), maxsplit=1)[0]


def _as_comment(text: str) -> str:
    return textwrap.indent(text, "# ", lambda _: True).replace("# \n", "#\n")


def _purpose(key: Key) -> str:
    """The purpose of a field, and one line for each value that its docstring or its table explains."""
    purpose, _ = split_values(docstring_of(key))
    if key.type in (bool, int, float):
        purpose += "".join(f" {said}." for said in key.experimental.values())
    values = {in_toml(value): text for value, text in _explained_values(key).items()}
    width = max(map(len, values), default=0) + 1
    return "\n".join([_wrap(purpose), *(_wrap(f"{v:<{width}}{text}", hanging=width) for v, text in values.items())])


def _explained_values(key: Key) -> dict[str, str]:
    """The values that the docstring of a field or its table explains, and which of them are experimental."""
    _, values = split_values(docstring_of(key))
    experimental = {value: f" {said}." for value, said in key.experimental.items()}
    return {value: text + experimental.get(value, "") for value, text in (key.choices | values).items() if text}


def split_values(docstring: str) -> tuple[str, dict[str, str]]:
    """Split a docstring into the purpose of the field and value -> explanation."""
    purpose, *parts = VALUE.split(inspect.cleandoc(docstring))
    texts = [" ".join(text.split()) for text in (purpose, *parts[1::2])]
    return texts[0], dict(zip(parts[0::2], texts[1:], strict=True))


def _wrap(text: str, hanging: int = 0) -> str:
    indent = " " * 4
    return textwrap.fill(
        text, LINE_WIDTH, initial_indent=indent, subsequent_indent=indent + " " * hanging, break_long_words=False
    )
