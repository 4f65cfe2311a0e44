"""Changes of fields, and values near those of a recipe, nearest first: what a search for a way out tries."""

import math
from collections.abc import Callable, Collection, Iterable, Iterator
from dataclasses import replace
from functools import reduce
from operator import attrgetter
from typing import Any, NamedTuple

from titan_moe.config.rules.ranges import RANGES
from titan_moe.config.schema import Key, fields_of, in_toml, path_of, value_of

ALL_SMALL = 64
"""Numbers up to this one have all others as neighbours."""
MULTIPLES = 4
"""Of a step, so many below and above a number are its neighbours."""
TYPICAL = {"data.holdout_fraction": 0.01, "parallel.expert_rank_capacity_factor": 1.25}
"""Numbers with a fraction that are tried beside the default."""
SWITCH = 2.0
"""How much farther the numbers are that switch on what 0 leaves out."""
COSTS = {
    "model": 3.0,  # another model
    "train.seq_len_tokens": 1.5,
    "train.global_batch_sequences": 1.0,
    "optim": 1.0,
    "data": 1.0,
    "perf.override": 1.0,
    "run.device": 0.5,
    "precision": 0.5,
}
"""Section or field -> how much farther than others its values are, in factors of two of a number."""


class Change(NamedTuple):
    """A value for a field, and how far that is from the present one."""

    key: str
    value: Any
    cost: float

    def __str__(self) -> str:
        return f"{self.key} = {in_toml(self.value)}"


Way = tuple[Change, ...]


def with_changes(root: Any, way: Way) -> Any:
    """A recipe with these values."""
    return reduce(lambda so_far, change: _with(so_far, path_of(root, change.key), change.value), way, root)


def listed(way: Way) -> str:
    """In words: `parallel.ep = 4 and parallel.cp = 2`."""
    *others, last = map(str, way)
    return f"{', '.join(others)} and {last}" if others else last


def nearest(
    ways: Iterable[Way], left: Callable[[Way], int | None], most_fields: int, most_values: int
) -> dict[tuple[str, ...], list[Way]]:
    """The ways that mend something, by their fields, the cheapest first. `left` tells how much each leaves of other
    things, or None if it does not mend this one; of the same fields those are taken that leave least."""
    found: dict[tuple[str, ...], list[tuple[int, Way]]] = {}
    for way in sorted(ways, key=lambda way: sum(change.cost for change in way)):
        keys = tuple(change.key for change in way)
        is_full = sum(rest == 0 for rest, _ in found.get(keys, ())) == most_values
        if is_full or (keys not in found and len(found) == most_fields):
            continue
        if (rest := left(way)) is not None:
            found.setdefault(keys, []).append((rest, way))
    least = {keys: min(rest for rest, _ in ways) for keys, ways in found.items()}
    return {keys: [way for rest, way in ways if rest == least[keys]][:most_values] for keys, ways in found.items()}


def neighbours(root: Any, dotted: str, steps: Collection[int] = ()) -> list[Change]:
    """Other values of a field, the nearest first. `steps` are numbers whose multiples may be wanted."""
    key, value, allowed = fields_of(root)[dotted], value_of(root, dotted), RANGES.get(dotted)
    extra = max((cost for name, cost in COSTS.items() if f"{dotted}.".startswith(f"{name}.")), default=0.0)
    experimental = key.experimental
    costs: dict[Any, float] = {}
    for near, cost in _near(key, value, steps):
        if near != value and (allowed is None or isinstance(near, str) or near in allowed):
            costs[near] = min(cost + extra + (near in experimental), costs.get(near, math.inf))
    return sorted((Change(dotted, near, cost) for near, cost in costs.items()), key=attrgetter("cost"))


def _near(key: Key, value: Any, steps: Collection[int]) -> Iterator[tuple[Any, float]]:
    """Values with their distance, in factors of two of a number."""
    if key.choices:
        for number, choice in enumerate(key.choices):
            yield choice, 1.0 if choice == key.default else 1.1 + number / 100
    elif key.is_list:
        yield from ((tuple(other for other in value if other != entry), 1.0) for entry in value)
        yield key.default, 1.05
        yield (), 1.1
    elif key.plain_type is bool:
        yield not value, 1.0
    else:
        yield from ((word, 1.0) for word in (key.word,) if word)
        yield key.default, 1.5
        yield TYPICAL.get(key.dotted, key.default), 1.6
    if key.plain_type is int and isinstance(value, int):
        middle = value or min(steps, default=0)
        yield from ((near, _distance(near, middle) + SWITCH * (value == 0)) for near in _numbers(value, steps))


def _numbers(value: int, steps: Collection[int]) -> Iterator[int]:
    """Small numbers, powers of two, fractions and multiples of the number, and multiples of steps around it."""
    yield from range(ALL_SMALL + 1) if abs(value) <= ALL_SMALL else ()
    yield from (2**exponent for exponent in range(abs(value).bit_length() + 2))
    for factor in (2, 3, 4, 8):
        yield value * factor
        if value % factor == 0:
            yield value // factor
    for step in steps:
        middle = value // max(step, 1)
        yield from (step * number for number in range(max(middle - MULTIPLES, 0) + 1, middle + MULTIPLES))


def _distance(near: int, value: int) -> float:
    """In factors of two; 0 is farther than 1, as it switches something off."""
    return round(abs(math.log2(abs(near) or 0.4) - math.log2(abs(value) or 0.4)), 3)


def _with(section: Any, path: list[str], value: Any) -> Any:
    inner = _with(getattr(section, path[0]), path[1:], value) if len(path) > 1 else value
    return replace(section, **{path[0]: inner})
