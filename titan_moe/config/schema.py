"""The schema of recipes: all dotted keys with type, default and docstring, read from the config dataclasses.

Parsing, writing and explaining recipes use this schema, so a new field needs nothing else.
"""

import ast
import inspect
import json
import re
import textwrap
from collections.abc import Hashable, Iterable, Iterator, Mapping
from dataclasses import MISSING, asdict, dataclass, fields, is_dataclass
from functools import cache
from operator import attrgetter
from types import UnionType
from typing import Annotated, Any, Literal, NamedTuple, Union, cast, get_args, get_origin, get_type_hints

from titan_moe.config.experimental import EXPERIMENTAL

SHOWN_ENTRIES = 5
SHOWN_CHARACTERS = 120
"""Of a value in a message."""
ENTRIES = {int: "integers", float: "numbers", str: "strings"}
"""Type of the entries of a list -> in words."""


class OneOf(NamedTuple):
    """Marks a string as a key of an extensible table: `Annotated[str, OneOf(TABLE)]`. Every row of the table has a
    `purpose`, the explanation of the value."""

    table: Mapping[str, Any]
    way_to_add: str = ""
    """How a user adds a row, for errors."""


class Table(dict[str, Any]):
    """Texts by names of the user's own, as `ValidationConfig(sets=Table(code="code/*.jsonl"))`, or the fields of a
    table of an array. It is never changed, so that a recipe can be hashed."""

    def __hash__(self) -> int:  # type: ignore[override]
        return hash(frozenset(self.items()))


@dataclass(frozen=True)
class Key:
    """A field or a section of recipes, with its dotted name."""

    dotted: str
    """`model.moe.top_k`."""
    attribute: str
    """Name of the field in Python: `class_` for the key `class`."""
    type: Any
    """`int`, `float`, `bool`, `str`, a tuple of `str`, `int`, `float` or a dataclass (an array of tables), a `Literal`,
    a string annotated with `OneOf`, a number or one word (`float | Literal["auto"]`), a `Table`, or the dataclass of a
    section."""
    default: Any
    """Default of a field; None for a section."""
    owner: type
    """The dataclass that defines the field."""

    @property
    def name(self) -> str:
        """The last part of the dotted name."""
        return self.dotted.rpartition(".")[2]

    @property
    def is_section(self) -> bool:
        """Whether this is a section and not a field."""
        return is_dataclass(self.type)

    @property
    def choices(self) -> dict[str, str]:
        """The allowed values of a string, with their purpose if a table has it; empty for other types."""
        if get_origin(self.type) is Literal:
            return dict.fromkeys(get_args(self.type), "")
        if get_origin(self.type) is Annotated:
            return {name: row.purpose for name, row in get_args(self.type)[1].table.items()}
        return {}

    @property
    def experimental(self) -> dict[Any, str]:
        """The values that have not won a measurement, with what is not measured."""
        return {row.value: f"EXPERIMENTAL: {row.reason}" for row in EXPERIMENTAL if row.key == self.dotted}

    @property
    def way_to_add(self) -> str:
        """How a user adds a choice; empty if that is not possible."""
        return get_args(self.type)[1].way_to_add if get_origin(self.type) is Annotated else ""

    @property
    def word(self) -> str:
        """The word that may stand for a number; empty for other types."""
        literals = [choice for choice in self._alternatives if get_origin(choice) is Literal]
        return get_args(literals[0])[0] if literals else ""

    @property
    def plain_type(self) -> Any:
        """The type, without a word that may stand for it."""
        return self._alternatives[0] if self.word else self.type

    @property
    def is_list(self) -> bool:
        """Whether the value is a list."""
        return get_origin(self.type) is tuple

    @property
    def is_table(self) -> bool:
        """Whether the value has names of the user's own."""
        return self.type is Table

    @property
    def has_tables(self) -> bool:
        """Whether the value is a list of tables."""
        return self.is_list and is_dataclass(self.entry_type)

    @property
    def entry_type(self) -> type:
        """The type of the entries of a list."""
        return cast(type, get_args(self.type)[0])

    @property
    def _alternatives(self) -> tuple[Any, ...]:
        return get_args(self.type) if get_origin(self.type) in (Union, UnionType) else ()


def keys_of(section: type, prefix: str = "") -> list[Key]:
    """List the keys directly in a section, in the order of definition."""
    types = get_type_hints(section, include_extras=True)
    return [
        Key(
            dotted=f"{prefix}{field.name.rstrip('_')}",
            attribute=field.name,
            type=types[field.name],
            default=None if field.default is MISSING else field.default,
            owner=section,
        )
        for field in fields(section)
    ]


def walk(section: type, prefix: str = "") -> Iterator[Key]:
    """Yield all keys below a section, each section before its keys."""
    for key in keys_of(section, prefix):
        yield key
        if key.is_section:
            yield from walk(key.type, f"{key.dotted}.")


@cache
def all_keys(root: type) -> dict[str, Key]:
    """Dotted name -> key, for all keys of a recipe."""
    return {key.dotted: key for key in walk(root)}


def fields_of(root: Any) -> dict[str, Key]:
    """The fields of a recipe or of another dataclass with sections, by dotted name."""
    return all_keys(cast(Hashable, type(root)))


def value_of(root: Any, dotted: str) -> Any:
    """The value of a field of a recipe."""
    return attrgetter(".".join(path_of(root, dotted)))(root)


def path_of(root: Any, dotted: str) -> list[str]:
    """The names of a field and its sections in Python: `class_` for `class`."""
    return [*dotted.split(".")[:-1], fields_of(root)[dotted].attribute]


def type_in_words(key: Key) -> str:
    """Describe the type of a value: `an integer`, `one of "bf16", "fp32"`."""
    if key.choices:
        return "one of " + ", ".join(in_toml(choice) for choice in key.choices)
    if key.is_table:
        return "a table of strings"
    if key.is_list:
        return f"a list of {'tables' if key.has_tables else ENTRIES[key.entry_type]}"
    words = {int: "an integer", float: "a number", bool: "true or false", str: "a string"}[key.plain_type]
    return f"{words} or {in_toml(key.word)}" if key.word else words


def in_toml(value: Any) -> str:
    """Format a value as TOML."""
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, str):
        return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")  # which JSON does not escape
    if isinstance(value, (list, tuple)):
        return f"[{', '.join(in_toml(entry) for entry in value)}]"
    if is_dataclass(value) and not isinstance(value, type):
        return in_toml(given_in(value))
    if isinstance(value, dict):
        entries = ", ".join(f"{_name(name)} = {in_toml(entry)}" for name, entry in value.items())
        return f"{{ {entries} }}" if entries else "{}"
    return str(value)


def given_in(entry: Any) -> Table:
    """The fields of a table of an array that differ from their defaults."""
    return Table({key: value for key, value in asdict(entry).items() if value != getattr(type(entry), key)})


def _name(name: str) -> str:
    return name if re.fullmatch(r"[\w-]+", name, re.ASCII) else in_toml(name)


def shown(value: Any) -> str:
    """Format any value for a message, however large or nested it is."""
    if isinstance(value, dict):
        return "a table"
    if isinstance(value, (list, tuple)):
        entries = ["[...]" if isinstance(entry, (list, tuple)) else shown(entry) for entry in value[:SHOWN_ENTRIES]]
        return f"[{', '.join(entries + ['...'] * (len(value) > SHOWN_ENTRIES))}]"
    if isinstance(value, int) and value.bit_length() > 64:
        return f"an integer of {value.bit_length():,} bits"
    return cut(in_toml(value))


def cut(text: str) -> str:
    """Shorten a long text for a message, without characters that no terminal shows."""
    short = text if len(text) <= SHOWN_CHARACTERS else f"{text[:SHOWN_CHARACTERS]}..."
    return "".join(one if one.isprintable() else one.encode("unicode_escape").decode() for one in short)


def either(values: Iterable[str]) -> str:
    """List values for a way out: `"allgather", "alltoall" or "symm_mem"`; empty for none."""
    *others, last = [in_toml(value) for value in values] or [""]
    return f"{', '.join(others)} or {last}" if others else last


def counted(number: int, noun: str, plural: str = "s") -> str:
    """A number with its noun: `1 layer`, `2 layers`."""
    return f"{number} {noun}" if number == 1 else f"{number} {noun}{plural}"


def docstring_of(key: Key) -> str:
    """Return the docstring after a field's definition, from the source: Python does not keep it."""
    body = ast.parse(textwrap.dedent(inspect.getsource(key.owner))).body[0]
    assert isinstance(body, ast.ClassDef)
    for statement, following in zip(body.body, body.body[1:], strict=False):
        is_definition = isinstance(statement, ast.AnnAssign) and ast.unparse(statement.target) == key.attribute
        if is_definition and isinstance(following, ast.Expr) and isinstance(following.value, ast.Constant):
            return str(following.value.value)
    return ""
