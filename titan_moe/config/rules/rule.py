"""What a rule is, what a breach of it is, and the arithmetic that rules share."""

import math
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from operator import attrgetter
from typing import Any, Literal, NamedTuple

from titan_moe.config.modules import Split, modules_of
from titan_moe.config.recipe import Recipe
from titan_moe.config.schema import in_toml, value_of

Check = Callable[[Any, int], Iterator[str]]
"""Yields what is wrong, once for each breach, given a recipe and a number of ranks: key, value, rule. A `Problem` says
more than a text."""

Condition = Callable[[Recipe], object]
"""Whether a recipe breaks a rule, or is one that it is for."""
Steps = Callable[[Recipe], Sequence[int]]
FIELD = re.compile(r"\{(=?)([\w.]+)\}")
"""A field in a message."""


class Problem(str):
    """What is wrong, with what a search for ways out cannot know."""

    fields: tuple[str, ...]  # those of the rule's fields that it concerns, if there are many others
    steps: tuple[int, ...]  # numbers of which a field may have to be a multiple
    hint: str  # a way out in words: a file, an argument of the command line

    def __new__(cls, text: str, *fields: str, steps: Sequence[int] = (), hint: str = "") -> "Problem":
        problem = super().__new__(cls, text)
        problem.fields, problem.steps, problem.hint = fields, tuple(steps), hint
        return problem


@dataclass(eq=False)
class Rule:
    """A constraint between fields of a recipe, with its reason. Ways out are not written: `config.ways_out` tries other
    values of the fields."""

    name: str
    check: Check  # finds the breaches; must not raise for any recipe, also one that breaks other rules
    why: str  # printed after each problem
    fields: tuple[str, ...]  # those that may mend a breach

    def breaches(self, recipe: Any, world_size: int) -> "Iterator[Breach]":
        """The breaches of this rule."""
        return map(self._breach, self.check(recipe, world_size))

    def _breach(self, found: str) -> "Breach":
        return Breach(self, found if isinstance(found, Problem) else Problem(found))


class Breach(NamedTuple):
    """A rule that a recipe breaks, and how."""

    rule: Rule
    problem: Problem

    def __str__(self) -> str:
        return f"{self.problem} ({self.rule.why})"


def rule(why: str, fields: str) -> Callable[[Check], Rule]:
    """Make a rule of a check. In `parallel.pp cp`, the second field is of the same section."""
    dotted: list[str] = []
    for field in fields.split():
        dotted.append(field if "." in field else f"{dotted[-1].rpartition('.')[0]}.{field}")
    return lambda check: Rule(check.__name__, check, why, tuple(dotted))


def row(
    why: str, is_broken: Condition, says: str, fields: str = "", *, steps: Steps = lambda recipe: (), hint: str = ""
) -> Rule:
    """Make a rule of a condition and its message, as `said` takes it; its fields are those of the message."""

    def check(recipe: Recipe, world_size: int) -> Iterator[str]:
        if is_broken(recipe):
            yield Problem(said(recipe, says), steps=steps(recipe), hint=hint)

    check.__name__ = ""  # that of its variable, from `rules_in`
    of_message = dict.fromkeys(name for bare, name in FIELD.findall(says) if not bare)
    return rule(why, fields or " ".join(of_message))(check)


def divides(why: str, divisor: str, number: str, applies: Condition = lambda recipe: True) -> Rule:
    """Make a rule of a field that must divide another one."""
    values = attrgetter(divisor, number)
    return row(
        why,
        lambda recipe: applies(recipe) and is_no_divisor(*values(recipe)),
        f"{{{divisor}}} does not divide {{{number}}}",
        steps=lambda recipe: values(recipe)[:1],
    )


def at_most(why: str, smaller: str, larger: str, applies: Condition = lambda recipe: True) -> Rule:
    """Make a rule of a field that may not exceed another one."""
    small, large = attrgetter(smaller), attrgetter(larger)
    says = f"{{{smaller}}} exceeds {{{larger}}}"
    return row(why, lambda recipe: applies(recipe) and small(recipe) > large(recipe), says)


def said(recipe: Recipe, text: str) -> str:
    """Write out the fields of a message: `{parallel.ep}` as `parallel.ep = 6`, `{=parallel.ep}` as `6`."""

    def written_out(found: re.Match[str]) -> str:
        value = value_of(recipe, found[2])
        shown = f"{value:g}" if isinstance(value, float) else in_toml(value)
        return shown if found[1] else f"{found[2]} = {shown}"

    return FIELD.sub(written_out, text)


def rules_in(names: Mapping[str, object]) -> list[Rule]:
    """The rules that a module defines, in order. Rows get the names of their variables."""
    rules = {name: value for name, value in names.items() if isinstance(value, Rule)}
    own = {n: rule for n, rule in rules.items() if not rule.name or rule.check.__module__ == names["__name__"]}
    for name, found in own.items():
        found.name = name
    return list(own.values())


def product(recipe: Recipe, fields: str) -> tuple[int, str]:
    """The product of fields of `parallel`, and in words: `parallel.pp * tp = 2 * 3 = 6`."""
    sizes = [getattr(recipe.parallel, field) for field in fields.split()]
    words = f"parallel.{' * '.join(fields.split())} = {' * '.join(map(str, sizes))}"
    return math.prod(sizes), f"{words} = {math.prod(sizes)}" if len(sizes) > 1 else words


def is_no_divisor(divisor: int, number: int) -> bool:
    """Whether `divisor` does not divide `number`; one below 1 breaks another rule."""
    return divisor > 0 and number % divisor != 0


def splits_of(recipe: Recipe, num_ranks: int, name: Literal["tp_split", "fsdp_split"] = "tp_split") -> Iterable[Split]:
    """What so many ranks divide of a model's modules, each once; nothing for one rank."""
    rows = modules_of(recipe.model, recipe.parallel) if num_ranks > 1 else ()
    return dict.fromkeys(split for row in rows if row.number and (split := getattr(row, name)))


def in_words(split: Split) -> str:
    """`model.attention.num_heads = 12 over 6 key/value heads`."""
    shared = f" over {split.shared} key/value heads" if split.shared else ""
    return f"model.{split.key} = {split.number}{shared}"


def data_parallel_ranks(recipe: Recipe, world_size: int) -> int:
    """The ranks that read different sequences, of any number of ranks."""
    p = recipe.parallel
    return world_size // max(p.pp * p.cp * p.tp, 1)


def key_of_kernel(recipe: Recipe, operation: str) -> str:
    """The field that chooses the implementation of an operation: its override, if it has one."""
    return "perf.kernels" if getattr(recipe.perf.override, operation) == "no" else f"perf.override.{operation}"
