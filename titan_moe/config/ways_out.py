"""Ways out of a refusal, found by trying: nearby values of the fields that a rule concerns, with which it passes.

A way that is printed has been taken: with it the rule passes, and no other rule fails that passed before. Where only
one rule fails, all rules pass with it.
"""

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import combinations, product
from typing import Any

from titan_moe.config.changes import Way, cost_of, fields_of, neighbours, with_changes
from titan_moe.config.recipe import Recipe
from titan_moe.config.rules import ranks_of, rules_of
from titan_moe.config.rules.rule import Breach, Rule
from titan_moe.config.schema import either

MOST_FIELDS = 3
"""Fields of which a message names values, or pairs of fields if no single one has any."""
MOST_VALUES = 4
"""Of a field; of a pair of fields the nearest values are named."""
MOST_TRIES = 200
"""Of single fields, and of pairs. A try takes less than a millisecond."""
VALUES_OF_A_FIELD = 40
VALUES_OF_A_PAIR = 8
"""Of each field."""


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
        """Each breach with its reason and the ways out."""
        return [f"{breach}{self.in_words(breach)}" for breach in self.breaches(self.root)]

    def in_words(self, breach: Breach) -> str:
        """The ways out of a breach, as the end of a message: `; take parallel.tp = 1 or 2`; empty for none."""
        of_fields: dict[tuple[str, ...], list[Way]] = {}
        for way in self.ways_out(breach):
            of_fields.setdefault(tuple(change.key for change in way), []).append(way)
        words = [_listed(ways) for ways in of_fields.values()]
        words += [breach.problem.hint] if breach.problem.hint else []
        return f"; take {', or '.join(words)}" if words else ""

    def ways_out(self, breach: Breach) -> list[Way]:
        """Changes of one field each that mend a breach, or of two if none of one does, the nearest first."""
        fields = [key for key in breach.problem.fields or breach.rule.fields if key in fields_of(self.root)]
        near = [neighbours(self.root, key, breach.problem.steps)[:VALUES_OF_A_FIELD] for key in fields]
        singles = [(change,) for values in near for change in values]
        pairs = [way for two in combinations([some[:VALUES_OF_A_PAIR] for some in near], 2) for way in product(*two)]
        return self._nearest(breach, singles, MOST_VALUES) or self._nearest(breach, pairs, 1)

    def _nearest(self, breach: Breach, ways: Sequence[Way], most_values: int) -> list[Way]:
        """Those that mend a breach, of a few fields, with a few values of each: of these, those that mend most others
        too."""
        found: dict[tuple[str, ...], list[tuple[int, Way]]] = {}
        for way in sorted(ways, key=cost_of)[:MOST_TRIES]:
            keys = tuple(change.key for change in way)
            is_full = sum(left == 0 for left, _ in found.get(keys, ())) == most_values
            if is_full or (keys not in found and len(found) == MOST_FIELDS):
                continue
            left = self._left(breach, way)
            if left is not None:
                found.setdefault(keys, []).append((left, way))
        fewest = {keys: min(left for left, _ in ways) for keys, ways in found.items()}
        best = {keys: [way for left, way in ways if left == fewest[keys]] for keys, ways in found.items()}
        return [way for ways in best.values() for way in ways[:most_values]]

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


def _listed(ways: Sequence[Way]) -> str:
    """The values of one field, or of two: `parallel.tp = 1 or 2`, `parallel.ep = 4 with parallel.dispatcher = "x"`."""
    first, *others = ways[0]
    return " with ".join([f"{first.key} = {either(way[0].value for way in ways)}", *map(str, others)])
