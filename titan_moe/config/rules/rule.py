"""What a rule is, what a breach of it is, and the arithmetic that rules share."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from titan_moe.config.recipe import Recipe

Check = Callable[[Any, int], Iterator[str]]
"""Yields what is wrong, once for each breach, given a recipe and a number of ranks: key, value, rule. A `Problem` says
more than a text."""


class Problem(str):
    """What is wrong, with what a search for ways out cannot know."""

    fields: tuple[str, ...]  # those of the rule's fields that it concerns, if there are many others
    steps: tuple[int, ...]  # numbers of which a field may have to be a multiple
    hint: str  # a way out in words: a file, an argument of the command line

    def __new__(cls, text: str, *fields: str, steps: Sequence[int] = (), hint: str = "") -> "Problem":
        problem = super().__new__(cls, text)
        problem.fields, problem.steps, problem.hint = fields, tuple(steps), hint
        return problem


@dataclass(frozen=True)
class Rule:
    """A constraint between fields of a recipe, with its reason. Ways out are not written: `config.ways_out` tries other
    values of the fields."""

    name: str
    check: Check  # finds the breaches; must not raise for any recipe, also one that breaks other rules
    why: str  # printed after each problem
    fields: tuple[str, ...]  # those that may mend a breach

    def breaches(self, recipe: Any, world_size: int) -> "Iterator[Breach]":
        """The breaches of this rule."""
        for found in self.check(recipe, world_size):
            yield Breach(self, found if isinstance(found, Problem) else Problem(found))


class Breach(NamedTuple):
    """A rule that a recipe breaks, and how."""

    rule: Rule
    problem: Problem

    def __str__(self) -> str:
        return f"{self.problem} ({self.rule.why})"


def rule(why: str, fields: str) -> Callable[[Check], Rule]:
    """Make a rule of a check, with its name. In `parallel.pp cp`, the second field is of the same section."""
    dotted: list[str] = []
    for field in fields.split():
        dotted.append(field if "." in field else f"{dotted[-1].rpartition('.')[0]}.{field}")
    return lambda check: Rule(check.__name__, check, why, tuple(dotted))


def rules_in(names: Mapping[str, object]) -> list[Rule]:
    """The rules that a module defines, in order."""
    rules = (value for value in names.values() if isinstance(value, Rule))
    return [rule for rule in rules if rule.check.__module__ == names["__name__"]]


def is_no_divisor(divisor: int, number: int) -> bool:
    """Whether `divisor` does not divide `number`; one below 1 breaks another rule."""
    return divisor > 0 and number % divisor != 0


def heads_fit(num_heads: int, num_kv_heads: int, num_ranks: int) -> bool:
    """Whether heads divide by ranks, and key/value heads by ranks or ranks by them."""
    shares = num_kv_heads < 1 or num_kv_heads % num_ranks == 0 or num_ranks % num_kv_heads == 0
    return num_heads % num_ranks == 0 and shares


def key_of_kernel(recipe: Recipe, operation: str) -> str:
    """The field that chooses the implementation of an operation: its override, if it has one."""
    return "perf.kernels" if getattr(recipe.perf.override, operation) == "no" else f"perf.override.{operation}"
