"""Turn what a job says into fields of ours: by rows, then by the names of `config.renamed`, else into a comment."""

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from titan_moe.config.migrate import rows_model, rows_parallel, rows_precision, rows_run
from titan_moe.config.migrate.given import Entry, Given, NoCounterpart, Noted, Row, Unreadable, answer_of, key_of
from titan_moe.config.migrate.values import AGREEING, ANYTHING, DEFAULTS, NAMES, OF_EXPERTS, WORDS
from titan_moe.config.parse import RecipeError, recipe_of
from titan_moe.config.recipe import Recipe
from titan_moe.config.renamed import WITHOUT_FIELD
from titan_moe.config.schema import all_keys, shown

ROWS = (*rows_model.ROWS, *rows_parallel.ROWS, *rows_precision.ROWS, *rows_run.ROWS)
OWNED = frozenset(name for row in ROWS for name in row.owns.split())
MATTERS = ("model.", "parallel.", "train.", "optim.", "precision.", "memory.")
"""Sections whose values decide what a run computes. Others are left to comments where a file does not have them."""
TRUE_MEANS = re.compile(r'\(true -> (?P<value>"[^"]*"|[\w.-]+)')
OPPOSITE = "(the opposite value)"
NO_NAME = "no field here is like it"


class Field(NamedTuple):
    """A value of ours, and what it comes from."""

    value: Any
    entries: tuple[Entry, ...]
    note: str = ""


@dataclass
class Translation:
    """A job in our fields."""

    fields: dict[str, Field] = field(default_factory=dict)
    without: list[tuple[Entry, str]] = field(default_factory=list)
    """Entries without a counterpart, and why or what to take."""
    agreeing: list[Entry] = field(default_factory=list)
    """Entries that are so in every recipe."""
    problems: list[str] = field(default_factory=list)


def translate(dialect: str, entries: Iterable[Entry], num_ranks: int | None) -> Translation:
    """What a job says, in our fields; `problems` has what contradicts itself or cannot be read."""
    result = Translation()
    given = _given(dialect, entries, num_ranks, result)
    used: set[str] = set()
    for row in ROWS:
        owned = [name for name in given if name in row.owns.split() or key_of(name) in row.owns.split()]
        used.update(owned)
        if any(given[name] for name in owned if given.get(name)):
            _by_row(row, given, [given[name] for name in owned if given.get(name)], result)
    for name in given:
        if name not in used and given.get(name):
            _by_name(given[name], result)
    return result


def _given(dialect: str, entries: Iterable[Entry], num_ranks: int | None, result: Translation) -> Given:
    """The entries of a file, each name once, and the other framework's defaults."""
    by_name: dict[str, Entry] = {}
    for entry in entries:
        before = by_name.get(entry.name)
        key = answer_of(entry.name).partition(" ")[0]
        if entry.unknown:
            if key.startswith(MATTERS) or (not key and entry.name in OWNED):
                words = f"{entry.place} = {shown(entry.value)}: {entry.unknown} is not in the file; write its value"
                result.problems.append(words)
            else:
                result.without.append((entry, f"{entry.unknown} is not in the file; set {key or 'it'} yourself"))
        elif before is not None and entry.value is None:
            continue
        elif before is not None and before.value not in (None, entry.value) and _matters(entry):
            words = (
                f"{entry.place} = {shown(entry.value)}, but {before.place} = {shown(before.value)}; keep one of them"
            )
            result.problems.append(words)
        else:
            by_name[entry.name] = entry
    keys = {key_of(name) for name, entry in by_name.items() if entry.value is not None} - {""}
    has_experts = "model.moe.num_experts" in keys
    for name, value in DEFAULTS[dialect].items():
        spelt = name if name in OWNED or "." not in name else _as_spelt(name)
        is_said = by_name.get(spelt) is not None or key_of(name) in keys
        if not is_said and (has_experts or not name.startswith(OF_EXPERTS)):
            by_name[spelt] = Entry(spelt, value, f"{NAMES[dialect]}'s {name}")
    return Given(dialect, by_name, num_ranks)


def _as_spelt(name: str) -> str:
    bare = name.rpartition(".")[2]
    return bare if bare in OWNED and name not in OWNED else name


def _matters(entry: Entry) -> bool:
    return entry.name in OWNED or bool(answer_of(entry.name))


def _by_row(row: Row, given: Given, entries: list[Entry], result: Translation) -> None:
    try:
        values = row.to(given)
    except Unreadable as error:
        result.problems.append(str(error))
        return
    except NoCounterpart as reason:
        values, said = reason.values, [entry for entry in entries if entry.line]
        result.without += [(entry, str(reason)) for entry in said or entries[:1]]
    for key, value in values.items():
        noted = value if isinstance(value, Noted) else Noted(value, "")
        namesakes = [entry for entry in entries if answer_of(entry.name).partition(" ")[0] == key]
        _put(key, Field(noted.value, tuple(namesakes or entries), noted.note), result)


def _by_name(entry: Entry, result: Translation) -> None:
    """By the table of other names."""
    if entry.name in AGREEING and AGREEING[entry.name] in (entry.value, ANYTHING):
        result.agreeing.append(entry)
        return
    answer = answer_of(entry.name)
    if not answer:
        bare = entry.name.rpartition(".")[2]
        reason = WITHOUT_FIELD.get(entry.name) or WITHOUT_FIELD.get(bare) or NO_NAME
        result.without.append((entry, reason))
        return
    key, _, words = answer.partition(" ")
    value = entry.value
    if words == OPPOSITE and type(value) is bool:
        value = not value
    elif (means := TRUE_MEANS.match(words)) and type(value) is bool:
        if not value:
            return
        value = means["value"].strip('"')
    elif key in WORDS:
        word = value.lower().removeprefix("torch.") if isinstance(value, str) else value
        if type(word) not in (str, bool, int) or word not in WORDS[key]:
            known = ", ".join(shown(one) for one in WORDS[key])
            result.without.append((entry, f"{key}: {known} are known of others"))
            return
        value = WORDS[key][word]
    elif words:
        result.without.append((entry, f"{key} {words}"))
        return
    if key not in all_keys(Recipe) or all_keys(Recipe)[key].is_section:
        result.without.append((entry, f"take [{key}]"))
        return
    _put(key, Field(value, (entry,)), result)


def _put(key: str, found: Field, result: Translation) -> None:
    """Add a field, unless another entry says something else, or it is none of the field's values."""
    value = tuple(found.value) if isinstance(found.value, list) else found.value
    before = result.fields.get(key)
    if before is not None and before.value != found.value:
        if not _is_said(before):
            pass
        elif not _is_said(found):
            return
        else:
            first, second = before.entries[0], found.entries[0]
            words = (
                f"{second.place} makes {key} = {shown(found.value)}, but {first.place} makes it {shown(before.value)}"
            )
            result.problems.append(f"{words}; keep one of them")
            return
    kind = all_keys(Recipe)[key]
    if isinstance(value, float) and kind.plain_type is int and value.is_integer():
        value = int(value)
    if isinstance(value, int) and type(value) is not bool and kind.plain_type is str:
        value = str(value)
    try:
        recipe_of({key: list(value) if isinstance(value, tuple) else value}, found.entries[0].place)
    except RecipeError as error:
        result.problems += error.problems
        return
    result.fields[key] = found._replace(value=list(value) if isinstance(value, tuple) else value)


def _is_said(found: Field) -> bool:
    return any(entry.line for entry in found.entries)


def values_of(translation: Translation) -> Mapping[str, Any]:
    """The values by key."""
    return {key: found.value for key, found in translation.fields.items()}
