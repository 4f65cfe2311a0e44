"""Every number has a range, and no recipe with odd numbers makes a rule raise."""

import random
from dataclasses import fields, is_dataclass, replace
from pathlib import Path
from typing import Any

import pytest

from titan_moe.config import Recipe, check_rules, load_recipe, refusals
from titan_moe.config.rules.ranges import RANGES
from titan_moe.config.schema import all_keys


def test_ranges_cover_every_number() -> None:
    numbers = {key.dotted for key in all_keys(Recipe).values() if key.plain_type in (int, float)}
    assert set(RANGES) == numbers


def test_rules_raise_for_no_recipe() -> None:
    rng = random.Random(0)
    for _ in range(500):
        check_rules(_with_odd_numbers(Recipe(), rng), rng.choice([None, 1, 6, 8]))


def test_rules_refuse_excessive_numbers_alone_and_at_once(tmp_path: Path) -> None:
    file = tmp_path / "r.toml"
    file.write_text("[model]\nffn_hidden_size = 1\nnum_layers = 1000000\ninit_std = 1e308\n[parallel]\npp = 4000000000")
    problems = refusals(load_recipe(file))
    assert [problem.partition(" (")[0] for problem in problems] == [
        "model.num_layers = 1000000 must be at least 1 and at most 1,000",
        "model.init_std = 1e+308 must be above 0 and at most 10,000",
        "parallel.pp = 4000000000 must be at least 1 and at most 65,536",
    ]


@pytest.mark.parametrize(
    ("value", "expected"),
    [(10**309, "an integer of 1,027 bits must be at most 1,000,000,000,000"), (0, "0 must be at least 1")],
)
def test_ranges_of_a_recipe_that_was_not_parsed(value: int, expected: str) -> None:
    recipe = replace(Recipe(), train=replace(Recipe().train, steps=value))
    (told,) = [problem for problem in refusals(recipe) if problem.startswith("train.steps")]
    assert told.startswith(f"train.steps = {expected} (the value is out of range)")


def _with_odd_numbers(section: Any, rng: random.Random) -> Any:
    changes: dict[str, Any] = {}
    for field in fields(section):
        value = getattr(section, field.name)
        if is_dataclass(value):
            changes[field.name] = _with_odd_numbers(value, rng)
        elif type(value) in (int, float) and rng.random() < 0.3:
            changes[field.name] = type(value)(rng.choice([-2, -1, 0, 1, 3, 8]))
    return replace(section, **changes)
