"""What a rule is, and the arithmetic that rules share."""

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

from titan_moe.config.dispatchers import DispatcherFacts, dispatchers_that
from titan_moe.config.parallel import ep_ranks_of_a_node, ranks_of_a_node
from titan_moe.config.recipe import Recipe

Check = Callable[[Recipe, int], Iterator[str]]
"""Yields one message for each breach, given a recipe and a number of ranks: key, value, rule, way out."""

MAX_DIVISOR = 2**16
"""Ways out list divisors up to this number, and their counterparts."""


@dataclass(frozen=True)
class Rule:
    """A constraint between fields of a recipe, with its reason."""

    name: str
    check: Check  # finds the breaches; must not raise for any recipe, also one that breaks other rules
    why: str  # printed after each message


def rule(why: str) -> Callable[[Check], Rule]:
    """Make a rule of a check, with its name."""
    return lambda check: Rule(check.__name__, check, why)


def rules_in(names: Mapping[str, object]) -> list[Rule]:
    """The rules of a module, in order."""
    return [value for value in names.values() if isinstance(value, Rule)]


def is_no_divisor(divisor: int, number: int) -> bool:
    """Whether `divisor` does not divide `number`; one below 1 breaks another rule."""
    return divisor > 0 and number % divisor != 0


def divisors(*numbers: int) -> str:
    """List the common divisors, for a way out: `1, 2, 4, 8`."""
    return ", ".join(map(str, _common_divisors(*numbers)))


def inner_divisors(number: int, *others: int) -> str:
    """List the common divisors above 1 and below `number`, for a way out; empty for none."""
    return ", ".join(str(n) for n in _common_divisors(number, *others) if 1 < n < number)


def _common_divisors(*numbers: int) -> list[int]:
    if min(numbers) < 1:
        return []
    common = math.gcd(*numbers)
    small = [n for n in range(1, min(math.isqrt(common), MAX_DIVISOR) + 1) if common % n == 0]
    return sorted({*small, *(common // n for n in small)})


def nearest_multiples(number: int, step: int) -> str:
    """The multiples of `step` around `number`, for a way out: `24 or 32`."""
    below = number // step * step
    return f"{below} or {below + step}" if below > 0 else str(step)


def dispatchers_for(recipe: Recipe, world_size: int, have: Callable[[DispatcherFacts], bool]) -> str:
    """List the dispatchers with a fact that suit the recipe's device and the nodes of its ep groups, for a way out;
    empty for none."""
    p, on_host = recipe.parallel, ranks_of_a_node(world_size)
    of_node = ep_ranks_of_a_node(p, world_size)
    has_nodes = 1 < of_node < p.ep and not is_no_divisor(of_node, p.ep) and not is_no_divisor(of_node * p.etp, on_host)

    def suits(facts: DispatcherFacts) -> bool:
        if facts.has_two_levels and not has_nodes or facts.is_one_node and is_no_divisor(p.ep * p.etp, on_host):
            return False
        return not (recipe.run.device == "cpu" and facts.needs_cuda)

    return dispatchers_that(lambda facts: have(facts) and suits(facts))


def key_of_kernel(recipe: Recipe, operation: str) -> str:
    """The field that chooses the implementation of an operation: its override, if it has one."""
    return "perf.kernels" if getattr(recipe.perf.override, operation) == "no" else f"perf.override.{operation}"
