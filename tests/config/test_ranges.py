"""Every number has a range, and no recipe with odd numbers makes a rule raise."""

import random
from dataclasses import fields, is_dataclass, replace
from typing import Any

from titan_moe.config import Recipe, check_rules
from titan_moe.config.rules.ranges import RANGES
from titan_moe.config.schema import all_keys


def test_ranges_cover_every_number() -> None:
    numbers = {key.dotted for key in all_keys(Recipe).values() if key.plain_type in (int, float)}
    assert set(RANGES) == numbers


def test_rules_raise_for_no_recipe() -> None:
    rng = random.Random(0)
    for _ in range(500):
        check_rules(_with_odd_numbers(Recipe(), rng), rng.choice([None, 1, 6, 8]))


def _with_odd_numbers(section: Any, rng: random.Random) -> Any:
    changes: dict[str, Any] = {}
    for field in fields(section):
        value = getattr(section, field.name)
        if is_dataclass(value):
            changes[field.name] = _with_odd_numbers(value, rng)
        elif type(value) in (int, float) and rng.random() < 0.3:
            changes[field.name] = type(value)(rng.choice([-2, -1, 0, 1, 3, 8]))
    return replace(section, **changes)
