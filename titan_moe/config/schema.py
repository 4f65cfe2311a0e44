"""Read a recipe's own definition: which dotted keys exist, of which type, with which default and docstring.

Parsing, writing and explaining recipes all walk the same dataclasses through this file: a new field is known to all.
"""

import ast
import inspect
import textwrap
from collections.abc import Iterator, Mapping
from dataclasses import MISSING, Field, dataclass, fields, is_dataclass
from functools import cache
from typing import Annotated, Any, Literal, NamedTuple, get_args, get_origin, get_type_hints


class OneOf(NamedTuple):
    """Marks a string that names a row of a table, which may grow: `Annotated[str, OneOf(TABLE)]`.

    Every row has a `purpose`, the line that explains the value.
    """

    table: Mapping[str, Any]


@dataclass(frozen=True)
class Key:
    """One field of a recipe, or one section of it, under the dotted name that a user writes."""

    dotted: str
    """`model.moe.top_k`."""
    attribute: str
    """Name of the field in Python: `class_` where the recipe says `class`."""
    type: Any
    """`int`, `float`, `bool`, `str`, a `Literal`, a string that is `OneOf` a table or, for a section, its dataclass."""
    default: Any
    """Value of a field that the recipe does not mention; None for a section."""
    owner: type
    """The dataclass that declares the field."""

    @property
    def name(self) -> str:
        """The last part of the dotted name."""
        return self.dotted.rpartition(".")[2]

    @property
    def is_section(self) -> bool:
        """Whether this is a table of further keys."""
        return is_dataclass(self.type)

    @property
    def choices(self) -> dict[str, str]:
        """The values that a string may have, each with its purpose where its table tells one; empty for any other."""
        if get_origin(self.type) is Literal:
            return dict.fromkeys(get_args(self.type), "")
        if get_origin(self.type) is Annotated:
            return {name: row.purpose for name, row in get_args(self.type)[1].table.items()}
        return {}


def keys_of(section: type, prefix: str = "") -> list[Key]:
    """List the keys directly inside a section, in the order of its definition."""
    types = get_type_hints(section, include_extras=True)
    return [
        Key(
            dotted=f"{prefix}{field.name.rstrip('_')}",
            attribute=field.name,
            type=types[field.name],
            default=_default_of(field),
            owner=section,
        )
        for field in fields(section)
    ]


def _default_of(field: Field[Any]) -> Any:
    return None if field.default is MISSING else field.default


def walk(section: type, prefix: str = "") -> Iterator[Key]:
    """Yield every key below a section, sections before what they hold."""
    for key in keys_of(section, prefix):
        yield key
        if key.is_section:
            yield from walk(key.type, f"{key.dotted}.")


@cache
def all_keys(root: type) -> dict[str, Key]:
    """Index every key of a recipe by its dotted name."""
    return {key.dotted: key for key in walk(root)}


def type_in_words(key: Key) -> str:
    """Say what a value must be: `an integer`, `one of "bf16", "fp32"`."""
    if key.choices:
        return "one of " + ", ".join(in_toml(choice) for choice in key.choices)
    return {int: "an integer", float: "a number", bool: "true or false", str: "a string"}[key.type]


def in_toml(value: Any) -> str:
    """Write a value as a recipe would."""
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, str):
        return '"' + "".join(_escaped(letter) for letter in value) + '"'
    return str(value)


def _escaped(letter: str) -> str:
    if letter in '"\\':
        return "\\" + letter
    named = {"\n": "\\n", "\t": "\\t", "\r": "\\r"}
    is_control = ord(letter) < 0x20 or letter == "\x7f"
    return named.get(letter, f"\\u{ord(letter):04x}") if is_control else letter


def docstring_of(key: Key) -> str:
    """Find the docstring that follows a field's definition; Python itself forgets it, so this reads the source."""
    body = ast.parse(textwrap.dedent(inspect.getsource(key.owner))).body[0]
    assert isinstance(body, ast.ClassDef)
    for statement, following in zip(body.body, body.body[1:], strict=False):
        declares_it = isinstance(statement, ast.AnnAssign) and ast.unparse(statement.target) == key.attribute
        if declares_it and isinstance(following, ast.Expr) and isinstance(following.value, ast.Constant):
            return str(following.value.value)
    return ""
