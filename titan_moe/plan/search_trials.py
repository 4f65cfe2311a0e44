"""Trials of candidates: whether rules allow one, and the least of a ladder that it computes again to fit."""

from collections.abc import Mapping
from dataclasses import replace
from typing import NamedTuple

from titan_moe.config.clones import resolve_clones
from titan_moe.config.recipe import Recipe
from titan_moe.config.recompute import AUTO
from titan_moe.config.rules import check_rules
from titan_moe.plan.choice.recompute import GROWN_FACTOR, with_entries
from titan_moe.plan.cost.peak import peak_bytes
from titan_moe.plan.pipeline.parts import part_of
from titan_moe.plan.resolved import Resolved
from titan_moe.plan.search_space import Candidate

LADDER = (
    (),
    ("norms", "qkv_rope", "mla_up"),
    ("norms", "expert_weights"),
    ("norms", "moe_act", "shared_experts", "dense_mlp"),
    ("norms", "experts", "shared_experts", "dense_mlp"),
    ("qkv_rope", "mla_up", "norms", "experts", "shared_experts", "dense_mlp", "attention"),
    ("block",),
)
"""What is computed again while layouts are compared; for those that are found "auto" is asked."""
OF_EXPERTS = 3
"""The step of the ladder from which experts are computed again."""


class Tried(NamedTuple):
    """A candidate that passes the rules and fits."""

    recipe: Recipe
    entries: tuple[str, ...]
    fewer: tuple[str, ...]
    """What is computed again on the step of the ladder before, with which it does not fit: "auto" is between both."""
    share: float
    """Where between both it just fits, by memory."""


class Trials:
    """Of a recipe on so many ranks, each with so many GiB for a step. `smallest` has the candidate of each family with
    the smallest microbatch."""

    def __init__(
        self, recipe: Recipe, world_size: int, limit_gib: float, smallest: Mapping[Candidate, Candidate]
    ) -> None:
        self.recipe, self.world_size, self.limit, self.smallest = recipe, world_size, limit_gib, smallest
        self.fits: dict[Candidate, bool] = {}
        self.repeats: dict[tuple[object, ...], bool] = {}
        self.number, self.refusal, self.is_allowed = 0, "", False

    def attempt(self, candidate: Candidate) -> Tried | None:
        """What a candidate computes again, if it passes the rules and fits."""
        if not self._family_fits(candidate):
            return None
        self.number += 1
        if (recipe := self._allowed(candidate)) is None:
            return None
        given = self.recipe.memory.recompute
        if AUTO not in given:
            return Tried(recipe, tuple(given), tuple(given), 1.0)
        gibs: dict[int, float] = {}
        rung = self._rung(recipe, gibs, is_known=candidate == self.smallest[candidate.family])
        if rung is None:
            return None
        if not rung:
            return Tried(recipe, LADDER[0], LADDER[0], 1.0)
        if not self._may_repeat(candidate, recipe, rung):
            return None
        without, with_them = (self._gib_at(recipe, gibs, step) for step in (rung - 1, rung))
        share = min((without - self.limit) / max(without - with_them, 1e-9), 1.0)
        return Tried(recipe, LADDER[rung], LADDER[rung - 1], share)

    def _family_fits(self, candidate: Candidate) -> bool:
        """Whether the smallest microbatch fits with all computed again."""
        family = candidate.family
        if family not in self.fits:
            smallest = self._allowed(self.smallest[family])
            again = LADDER[-1] if AUTO in self.recipe.memory.recompute else self.recipe.memory.recompute
            self.fits[family] = smallest is None or self._fits(smallest, tuple(again))
        return self.fits[family]

    def _allowed(self, candidate: Candidate) -> Recipe | None:
        """The recipe of a candidate, launched if it cannot be captured; None if it breaks a rule."""
        recipe = candidate.of(self.recipe)
        launched = replace(recipe, compile=replace(recipe.compile, cudagraph="off"))
        for way in dict.fromkeys((recipe, launched)):
            if not (breaches := check_rules(way, self.world_size)):
                self.is_allowed = True
                return way
            self.refusal = breaches[0]
        return None

    def _rung(self, recipe: Recipe, gibs: dict[int, float], *, is_known: bool) -> int | None:
        """The first of the ladder with which a step fits; of the last `is_known` that it does."""
        few, many = 0, len(LADDER) - 1
        if not is_known and self._gib_at(recipe, gibs, many) > self.limit:
            return None
        while few < many:
            middle = (few + many) // 2
            if self._gib_at(recipe, gibs, middle) <= self.limit:
                many = middle
            else:
                few = middle + 1
        return many

    def _may_repeat(self, candidate: Candidate, recipe: Recipe, step: int) -> bool:
        """Whether rules allow this step of the ladder with the schedule and the overlap: blocks in pieces refuse norms,
        and split backwards blocks, and experts as these. All models have both; what else a step names, some lack."""
        probe = LADDER[-1] if step >= OF_EXPERTS else ("norms",)
        options = candidate.pp_schedule, candidate.overlap, candidate.dispatcher, candidate.layout.pp > 1, probe
        if options not in self.repeats:
            self.repeats[options] = not check_rules(with_entries(recipe, probe), self.world_size)
        return self.repeats[options]

    def _gib_at(self, recipe: Recipe, gibs: dict[int, float], step: int) -> float:
        """The memory on a step of the ladder; `gibs` has those that are known."""
        if step not in gibs:
            gibs[step] = self._gib(recipe, LADDER[step])
        return gibs[step]

    def _fits(self, recipe: Recipe, entries: tuple[str, ...]) -> bool:
        """Whether the first and the last pipeline rank fit; the search asks the others."""
        return self._gib(recipe, entries) <= self.limit

    def _gib(self, recipe: Recipe, entries: tuple[str, ...]) -> float:
        """The memory that the first or the last pipeline rank needs, whichever needs more."""
        recipe = resolve_clones(with_entries(recipe, entries), self.world_size)
        pp = recipe.parallel.pp
        resolved = Resolved(recipe, self.world_size)
        factor = recipe.parallel.fixed_capacity_factor or GROWN_FACTOR
        parts = (part_of(recipe, self.world_size, rank) for rank in dict.fromkeys((0, pp - 1)))
        peak = max(peak_bytes(part, factor, resolved.experts) for part in parts)
        return (peak + resolved.outside_bytes) / 2**30
