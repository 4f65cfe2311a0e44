"""The shape of a rule, and the small arithmetic that rules share."""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

from titan_moe.config.recipe import Recipe

Check = Callable[[Recipe, int], Iterator[str]]
"""Yields one message for each breach, given a recipe and a number of ranks: key, value, rule, way out."""


@dataclass(frozen=True)
class Rule:
    """Something that the fields of a recipe must keep together, with the reason."""

    name: str
    """The rule as a sentence."""
    check: Check
    """Finds the breaches. It must survive any recipe whatsoever: other rules tell what else is broken."""
    why: str
    """What would go wrong; printed after each message."""


def rule(name: str, why: str) -> Callable[[Check], Rule]:
    """Make a rule of the check below."""
    return lambda check: Rule(name, check, why)


def rules_in(names: Mapping[str, object]) -> list[Rule]:
    """The rules of a file, in the order in which they are written."""
    return [value for value in names.values() if isinstance(value, Rule)]


def leaves_a_rest(part: int, whole: int) -> bool:
    """Whether `part` fails to divide `whole`; a part below 1 is another rule's business."""
    return part > 0 and whole % part != 0


def divisors(*wholes: int) -> str:
    """List the numbers that divide every one of `wholes`, for a way out: `1, 2, 4, 8`."""
    smallest = min(wholes)
    return ", ".join(str(n) for n in range(1, smallest + 1) if all(whole % n == 0 for whole in wholes))


def nearest_multiples(number: int, step: int) -> str:
    """Name the multiples of `step` around `number`, for a way out: `24 or 32`."""
    below = number // step * step
    return f"{below} or {below + step}" if below > 0 else str(step)
