"""What to write instead of an unknown key of a recipe: no answer is better than a wrong one.

A name of another framework has its row in `config.renamed`. The same name in another section is found. Letters decide
only within a section, and only between names that differ by a typing error.
"""

import difflib
import re
from collections.abc import Iterable
from dataclasses import fields

from titan_moe.config.kernels import KernelOverrides
from titan_moe.config.recipe import Recipe
from titan_moe.config.renamed import NAMES_ELSEWHERE, REMOVED, RENAMED, SECTIONS_ELSEWHERE, WITHOUT_FIELD
from titan_moe.config.schema import Key, all_keys, cut, keys_of

LONGEST_NAME = 64
"""A longer name than any field has; nothing is spelt like it."""
SHORTEST_MISSPELT = 4
"""Shorter names, such as `cp` and `pp`, differ by a letter from each other."""
FREQUENT_NAMES = {"backend", "class", "files", "format", "kind", "name", "num_steps", "path", "source", "split"} | {
    key.name for key in keys_of(KernelOverrides)
}
"""Names that mean something else in another section."""


def unknown_key(dotted: str, *, is_section: bool = False) -> str:
    """The error message for an unknown key, with the new name of an old one or the nearest known one."""
    if dotted in RENAMED:
        return f"{dotted} is now {RENAMED[dotted]}"
    if dotted in REMOVED:
        return f"{dotted} was removed: {REMOVED[dotted]}; drop it"
    what = "section" if is_section else "key"
    return f"{cut(dotted)} is not a known {what}; {nearest_key(dotted, is_section=is_section)}"


def nearest_key(dotted: str, *, is_section: bool = False) -> str:
    """Suggest the known key for an unknown one or, if there is none, say what to do instead or where to look."""
    known = all_keys(Recipe)
    spelt = dotted.replace("-", "_").strip(".").lower()
    section, _, name = spelt.rpartition(".")
    if (key := known.get(spelt)) and key.is_section:
        return f"{key.dotted} is a section; set its keys, such as {keys_of(key.type, f'{key.dotted}.')[0].dotted}"
    if key:
        return f"did you mean {key.dotted}?"
    if len(name) > LONGEST_NAME:
        return _where_to_look(section)
    if is_section:
        return _nearest_section(section, name)
    for end in {f"{section.rpartition('.')[2]}.{name}": None, name: None}:
        if end in NAMES_ELSEWHERE:
            return f"did you mean {NAMES_ELSEWHERE[end]}?"
        if end in WITHOUT_FIELD:
            return f"there is no field for it: {WITHOUT_FIELD[end]}"
    candidates = _of_this_name(section, name) or _alike(section, name)
    return f"did you mean {' or '.join(candidates)}?" if candidates else _where_to_look(section)


def _nearest_section(section: str, name: str) -> str:
    """For an unknown table: the one of this name elsewhere, one beside it of nearly this name, or what others call
    so."""
    known = all_keys(Recipe)
    sections = [key for key in known.values() if key.is_section]
    beside = [key for key in sections if key.dotted.rpartition(".")[0] == section]
    guesses = _dotted(key for key in sections if key.name == name)
    guesses = guesses or _dotted(key for key in beside if _is_misspelt(name, key.name))
    if not guesses and f"{name}.mode" in NAMES_ELSEWHERE:  # a table that is one field here
        guesses = [NAMES_ELSEWHERE[f"{name}.mode"]]
    if not guesses and name in WITHOUT_FIELD and name not in SECTIONS_ELSEWHERE:
        return f"there is no field for it: {WITHOUT_FIELD[name]}"
    ours = SECTIONS_ELSEWHERE.get(name, "")
    if not guesses and ours and (section not in known or f"{ours}.".startswith(f"{section}.")):
        guesses = [ours]
    return f"did you mean {' or '.join(guesses)}?" if guesses else _where_to_look(section)


def _of_this_name(section: str, name: str) -> list[str]:
    """The keys of this name in other sections. If a section is given, frequent names are not looked for."""
    if section and name in FREQUENT_NAMES:
        return []
    return _dotted(key for key in all_keys(Recipe).values() if key.name == name)


def _alike(section: str, name: str) -> list[str]:
    """The key that a typing error makes of `name`: of its section; without one, of all. Only if there is one alone."""
    keys = [key for key in all_keys(Recipe).values() if _is_misspelt(name, key.name)]
    if section:
        found = _dotted(key for key in keys if key.dotted == f"{section}.{key.name}")
    else:
        found = _dotted(key for key in keys if not key.is_section and key.name not in FREQUENT_NAMES)
    return found if len(found) == 1 else []


def _is_misspelt(name: str, known: str) -> bool:
    """Whether a typing error makes `name` of a known one: every word is like its own, and numbers are equal."""
    words, known_words = name.split("_"), known.split("_")
    if "".join(words) == "".join(known_words):
        return True
    is_short = len(known) < SHORTEST_MISSPELT
    if is_short or len(words) != len(known_words) or re.findall(r"\d+", name) != re.findall(r"\d+", known):
        return False
    return min(map(_likeness, words, known_words)) >= 0.7 and _likeness(name, known) >= 0.75


def _likeness(first: str, second: str) -> float:
    return difflib.SequenceMatcher(None, first, second).ratio()


def _dotted(keys: Iterable[Key]) -> list[str]:
    return [key.dotted for key in keys]


def _where_to_look(section: str) -> str:
    """Where the known keys are listed."""
    ours = section if section in all_keys(Recipe) else SECTIONS_ELSEWHERE.get(section, "")
    if ours:
        return f"titan-moe check --explain {ours} lists the keys of [{ours}]"
    return f"the sections are {', '.join(field.name for field in fields(Recipe))}"
