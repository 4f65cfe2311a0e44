"""Ways out of a refusal, found by trying: nearby values of the fields that a rule concerns, with which it passes.

A way that is printed has been taken: with it the rule passes, and no other rule fails that passed before. Where only
one rule fails, all rules pass with it.
"""

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from itertools import combinations, product
from typing import Any

from titan_moe.config.changes import Way, nearest, neighbours, with_changes
from titan_moe.config.recipe import Recipe
from titan_moe.config.rules import ranks_of, rules_of
from titan_moe.config.rules.rule import Breach, Rule
from titan_moe.config.schema import either, fields_of

MOST_FIELDS = 3
"""Fields of which a message names values, or pairs of fields if no single one has any."""
MOST_VALUES = 4
"""Of a field; of a pair of fields the nearest values are named."""
VALUES_OF_A_FIELD, VALUES_OF_A_PAIR = 80, 6
"""The nearest, which are tried; a try takes less than a millisecond."""


def refusals(recipe: Recipe, world_size: int | None = None) -> list[str]:
    """Each breach of a rule with its reason, and the ways out that were found; empty if the recipe may run."""
    return Search(recipe, rules_of, lambda changed: ranks_of(changed, world_size)).refusals()


@dataclass(frozen=True)
class Search:
    """For ways out of the breaches of a recipe, or of another dataclass with sections and rules of its own."""

    root: Any
    rules_of: Callable[[Any], Sequence[Rule]]
    ranks_of: Callable[[Any], int]

    def refusals(self) -> list[str]:
        """Each breach with its reason and the ways out: `...; take parallel.tp = 1 or 2`."""
        told = []
        for breach in self.breaches(self.root):
            words = [*map(_in_words, self.ways_out(breach).values()), *filter(None, [breach.problem.hint])]
            told.append(f"{breach}; take {', or '.join(words)}" if words else str(breach))
        return told

    def ways_out(self, breach: Breach) -> dict[tuple[str, ...], list[Way]]:
        """Changes of one field each that mend a breach, or of two if none of one does, by these fields."""
        fields = [key for key in breach.problem.fields or breach.rule.fields if key in fields_of(self.root)]
        near = [neighbours(self.root, key, breach.problem.steps)[:VALUES_OF_A_FIELD] for key in fields]
        singles = [(change,) for values in near for change in values]
        pairs = (way for two in combinations([some[:VALUES_OF_A_PAIR] for some in near], 2) for way in product(*two))
        left = partial(self._left, breach)
        return nearest(singles, left, MOST_FIELDS, MOST_VALUES) or nearest(pairs, left, MOST_FIELDS, 1)

    def _left(self, breach: Breach, way: Way) -> int | None:
        """The number of breaches that a change leaves; None if this one is among them, or a new one."""
        changed = with_changes(self.root, way)
        own = [other.problem for other in breach.rule.breaches(changed, self.ranks_of(changed))]
        if breach.problem in own or len(own) >= self._before[breach.rule.name]:
            return None
        after = Counter[str]()
        for other in self.breaches(changed):
            after[other.rule.name] += 1
            if after[other.rule.name] > self._before[other.rule.name]:
                return None
        return after.total()

    def breaches(self, changed: Any) -> Iterator[Breach]:
        """Of all rules."""
        for rule in self.rules_of(changed):
            yield from rule.breaches(changed, self.ranks_of(changed))

    @cached_property
    def _before(self) -> Counter[str]:
        return Counter(breach.rule.name for breach in self.breaches(self.root))


def _in_words(ways: Sequence[Way]) -> str:
    """The values of one field, or of two: `parallel.tp = 1 or 2`, `parallel.ep = 4 with parallel.dispatcher = "x"`."""
    first, *others = ways[0]
    return " with ".join([f"{first.key} = {either(way[0].value for way in ways)}", *map(str, others)])
