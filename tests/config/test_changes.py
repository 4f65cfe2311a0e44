"""Neighbours of a field are values that it may have, nearest first, and a change sets one of them."""

import pytest

from titan_moe.config import Recipe, check_rules
from titan_moe.config.changes import Change, listed, nearest, neighbours, with_changes
from titan_moe.config.rules.ranges import RANGES
from titan_moe.config.schema import fields_of, value_of


@pytest.mark.parametrize(
    ("dotted", "values", "steps", "expected"),
    [
        ("parallel.tp", 6, [], [7, 5, 8, 4]),
        ("train.seq_len_tokens", 130, [8], [128, 136, 120, 144]),
        ("model.ffn_hidden_size", 0, [128], [128, 64, 256]),
        ("train.steps", 10**400, [], [Recipe().train.steps, 2**39, 2**38]),
        ("memory.recompute", ("block",), [], [(), ("auto",)]),
        ("run.is_deterministic", True, [], [False]),
        ("parallel.expert_rank_capacity_factor", 0.5, [], ["auto", 1.25]),
        ("precision.modules_in_compute", ("*.qkv", "*.out"), [], [("*.out",), ("*.qkv",), ()]),
        ("model.class", "mine:Model", [], [Recipe().model.class_]),
    ],
)
def test_neighbours_are_the_nearest_first(
    dotted: str, values: object, steps: list[int], expected: list[object]
) -> None:
    recipe = with_changes(Recipe(), (Change(dotted, values, 0),))
    found = [change.value for change in neighbours(recipe, dotted, steps)]
    assert value_of(recipe, dotted) == values and found[: len(expected)] == expected and values not in found


@pytest.mark.parametrize("dotted", [dotted for dotted, key in fields_of(Recipe()).items() if not key.is_section])
def test_neighbours_of_every_field_may_be_set(dotted: str) -> None:
    for change in neighbours(Recipe(), dotted, [3]):
        changed = with_changes(Recipe(), (change,))
        assert value_of(changed, dotted) == change.value
        assert dotted not in RANGES or not any("out of range" in problem for problem in check_rules(changed))


def test_nearest_ways_are_those_that_leave_least() -> None:
    ways = [(Change("a.b", number, number),) for number in range(5, 0, -1)] + [
        (Change("a.c", 1, 9), Change("a.d", 2, 9))
    ]
    left = {1: None, 2: 1, 3: 0, 4: 0, 5: 0}
    found = nearest(ways, lambda way: left[way[0].value] if len(way) == 1 else 2, 2, 2)
    assert {keys: [way[0].value for way in some] for keys, some in found.items()} == {
        ("a.b",): [3, 4],
        ("a.c", "a.d"): [1],
    }
    assert nearest(ways, lambda way: 0, 1, 1) == {("a.b",): [ways[4]]}
    assert listed(ways[-1]) == "a.c = 1 and a.d = 2"
