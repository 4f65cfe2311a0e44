"""Whether the estimated peak of a recipe fits the memory of a GPU, and the nearest changes with which it does.

The changes are found by trying: one field, then two, then three, those that cost least first. Each passes all rules, so
a way out that is printed can be taken.
"""

import math
from collections.abc import Callable, Iterable, Iterator
from functools import cached_property
from itertools import combinations
from typing import Any

from titan_moe.config.changes import Change, Way, listed, nearest, with_changes
from titan_moe.config.recipe import Recipe
from titan_moe.config.rules import check_rules
from titan_moe.config.schema import value_of
from titan_moe.plan.choice.hardware import find_hardware

Need = Callable[[Recipe, int], float]
"""GiB of a GPU with a number of ranks, on the rank that needs most."""
Values = Callable[[Any], Iterable[tuple[Any, int]]]
"""Given the value of a field, those that need less, and what each costs."""

MOST_FIELDS = 3
MOST_WAYS = 3
"""The number of ways that are printed."""
HOPELESS = 1.25
"""If all changes together need more than so many times the memory, pairs and larger sets are not tried."""
MORE_RANKS = (2, 4, 8, 16, 32)
"""The factors that are tried where no change of fields fits."""


def _after(**costs: int) -> Values:
    """Of values in the order of the memory that they need, most first, those after the present one; of any other value
    none."""
    names = list(costs)
    return lambda value: [(name, costs[name]) for name in (names[names.index(value) + 1 :] if value in names else [])]


def _set_to(least: Any, cost: int) -> Values:
    """One value, unless it is the present one."""
    return lambda value: [] if value == least else [(least, cost)]


def _halves(cost: int, least: int) -> Values:
    """A number halved, once and again, down to `least`; each time costs the same."""

    def values(number: int) -> Iterator[tuple[int, int]]:
        halvings = 0
        while number % 2 == 0 and number // 2 >= least:
            number, halvings = number // 2, halvings + 1
            yield number, cost * halvings

    return values


def _doubled(cost: int) -> Values:
    """A number of ranks, twice and four times; each doubling costs the same."""
    return lambda number: [(2 * number, cost), (4 * number, 2 * cost)]


BLOCKS = ("block",)
RECOMPUTED = (("auto",), 1), (("experts",), 12), (BLOCKS, 30)


CHANGES: dict[str, Values] = {
    "optim.kind": _after(adamw=0, fused_adamw=1),
    "parallel.expert_rank_capacity_factor": _set_to("auto", 1),
    "precision.moments": _after(master=0, fp32=0, bf16=1, fp8=2),
    "perf.loss_chunk_tokens": lambda tokens: [(4096, 1)] if tokens == 0 else _halves(1, least=1024)(tokens),
    "compile.cudagraph": _after(step=0, off=2),
    "parallel.expert_clones": _set_to("off", 5),
    "parallel.overlap": _after(microbatch=0, none=6),
    "parallel.accumulate_unsharded": _set_to(False, 7),
    "train.micro_batch_sequences": _halves(9, least=1),
    "parallel.dp_replicate": _set_to(1, 10),
    "memory.recompute": lambda entries: (
        [] if entries in (("auto",), BLOCKS) else [way for way in RECOMPUTED if way[0] != entries]
    ),
    "parallel.ep": _doubled(14),
    "parallel.cp": _doubled(16),
    "run.ranks_per_gpu": _set_to(1, 40),
}
"""Fields that decide how much memory a step needs. A cost is, roughly, the share of a step's time in percent; of a set
of changes the sum. Fields that change what is trained, other than the rounding of moments, are left out."""


def warn_of_excess(recipe: Recipe, world_size: int, need: Need, devices: list[str]) -> Iterator[str]:
    """A line for each device with less memory free than the recipe needs, with the nearest changes that fit. Of an
    unknown device nothing is said."""
    needed, search = need(recipe, world_size), _Search(recipe, world_size, need)
    for device in devices:
        hardware = find_hardware(device)
        if hardware is None or needed <= hardware.free_gib():
            continue
        excess = f"WARNING: {needed:.3g} GiB exceed {hardware.room(device)}"
        if ways := search.ways(hardware.free_gib()):
            yield f"{excess}; {'; or '.join(map(search.in_words, ways))}"
        else:
            yield f"{excess}; {search.why_none(hardware.free_gib())}"


class _Search:
    """Tries sets of changes of a recipe: those of the fewest fields first, and of these the cheapest. Each is tried
    once, for all devices."""

    def __init__(self, recipe: Recipe, world_size: int, need: Need) -> None:
        self.recipe, self.world_size, self.need = recipe, world_size, need
        self._tried: dict[Way, float] = {}

    def ways(self, limit_gib: float) -> list[Way]:
        """The cheapest sets that fit, of the fewest fields that do; of the same fields only the cheapest values. Beyond
        `MOST_FIELDS` there is one set, of all that saves."""
        for number in range(1, MOST_FIELDS + 1):
            if ways := nearest(self._sets(number), lambda way: 0 if self._fits(way, limit_gib) else None, MOST_WAYS, 1):
                return [way for (way,) in ways.values()]
            if self._gib(self._most) > HOPELESS * limit_gib:
                return []
        return [self._most] if self._gib(self._most) <= limit_gib else []

    def _fits(self, way: Way, limit_gib: float) -> bool:
        """Whether a set fits. First its fields are tried at the values that need least, unless these break a rule."""
        least = {change.key: change for change in self._useful} if len(way) > 1 else {}
        gib = self._gib(tuple(least[change.key] for change in way)) if least else math.inf
        return (gib <= limit_gib or gib == math.inf) and self._gib(way) <= limit_gib

    def in_words(self, changes: Way) -> str:
        """A set that fits, and what is needed with it."""
        return f"{listed(changes)} {'fits' if len(changes) == 1 else 'fit'}: {self._gib(changes):.3g} GiB"

    def why_none(self, limit_gib: float) -> str:
        """The nearest of the sets that were tried, and what to do where none fits."""
        closest = min(self._tried, key=self._tried.__getitem__)
        words = "no changes fit"
        if closest:
            words += f"; the nearest, {listed(closest)}, {'need' if len(closest) > 1 else 'needs'} "
            words += f"{self._gib(closest):.3g} GiB"
        for number in (factor * self.world_size for factor in MORE_RANKS):
            for changes in ((), closest):
                changed = with_changes(self.recipe, changes)
                if not check_rules(changed, number) and (gib := self.need(changed, number)) <= limit_gib:
                    return f"{words}; {number:,} ranks {'with them ' if changes else ''}fit: {gib:.3g} GiB"
        return f"{words}; take fewer layers, or another layout on more ranks"

    def _gib(self, changes: Way) -> float:
        """What is needed with these changes; infinite if they break a rule."""
        if changes not in self._tried:
            changed = with_changes(self.recipe, changes)
            is_allowed = not changes or not check_rules(changed, self.world_size)
            self._tried[changes] = self.need(changed, self.world_size) if is_allowed else math.inf
        return self._tried[changes]

    @cached_property
    def _singles(self) -> list[Way]:
        of_fields = ((key, values(value_of(self.recipe, key))) for key, values in CHANGES.items())
        return [(Change(key, *value),) for key, values in of_fields for value in values]

    @cached_property
    def _useful(self) -> list[Change]:
        """The changes that can matter beside others: less is needed with them, alone or beside the change that saves
        most; or they break a rule alone; or one that breaks a rule alone does not beside them. A peak is the highest of
        several moments, so a change may lower it only beside another."""
        before, most = self._gib(()), min(self._singles, key=self._gib, default=())
        refused = [single[0] for single in self._singles if self._gib(single) == math.inf]

        def is_useful(change: Change) -> bool:
            if change in refused or self._gib((change,)) < before:
                return True
            if change.key != most[0].key and self._gib((*most, change)) < self._gib(most):
                return True
            return any(other.key != change.key and self._gib((change, other)) < math.inf for other in refused)

        return [single[0] for single in self._singles if is_useful(single[0])]

    @cached_property
    def _most(self) -> Way:
        """All changes that save more than a hundredth, taken in the order of the table, each at the value that needs
        least."""
        taken: Way = ()
        for key in dict.fromkeys(change.key for change in self._useful):
            tries = [(*taken, change) for change in self._useful if change.key == key]
            taken = min([*tries, taken], key=self._gib)  # an equal one is taken: it may allow others
        for change in taken:
            without = tuple(other for other in taken if other != change)
            taken = without if self._gib(without) <= 1.01 * self._gib(taken) else taken
        return taken

    def _sets(self, number: int) -> Iterable[Way]:
        """All sets of so many fields, in the order of these."""
        if number == 1:
            return self._singles
        return (way for way in combinations(self._useful, number) if len({change.key for change in way}) == number)
