"""Trials of candidates: whether rules allow one, and the least of a ladder that it computes again to fit."""

from collections.abc import Mapping
from dataclasses import replace
from typing import NamedTuple

from titan_moe.config.perf import PerfConfig
from titan_moe.config.recipe import Recipe
from titan_moe.config.recompute import AUTO, recompute_of, with_entries
from titan_moe.config.rules import check_rules
from titan_moe.plan.choice.hardware import Hardware
from titan_moe.plan.choice.kernels import as_run_on
from titan_moe.plan.choice.peaks import Peaks
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
    """Of a recipe on so many GPUs. `smallest` has the candidate of each family with the smallest microbatch."""

    def __init__(
        self, recipe: Recipe, world_size: int, hardware: Hardware, smallest: Mapping[Candidate, Candidate]
    ) -> None:
        self.recipe, self.world_size, self.hardware, self.smallest = recipe, world_size, hardware, smallest
        self.limit = hardware.free_gib(recipe.run.ranks_per_gpu)
        self.of_smallest: dict[Candidate, _Needs | None] = {}
        self.repeats: dict[tuple[object, ...], bool] = {}
        self.number, self.refusal, self.is_allowed = 0, "", False

    def attempt(self, candidate: Candidate) -> Tried | None:
        """What a candidate computes again, if it passes the rules and fits."""
        given, family = tuple(self.recipe.memory.recompute), candidate.family
        if family not in self.of_smallest:
            self.of_smallest[family] = self._allowed(self.smallest[family])
        of_smallest = self.of_smallest[family]
        if of_smallest and of_smallest.gib(LADDER[-1] if AUTO in given else given) > self.limit:
            return None
        self.number += 1
        needs = (candidate == self.smallest[family] and of_smallest) or self._allowed(candidate)
        if not needs:
            return None
        if AUTO not in given:
            return Tried(needs.recipe, given, given, 1.0)
        rung = self._rung(needs)
        if rung is None:
            return None
        if not rung:
            return Tried(needs.recipe, LADDER[0], LADDER[0], 1.0)
        if not self._may_repeat(candidate, needs.recipe, rung):
            return None
        without, with_them = (needs.gib(LADDER[step]) for step in (rung - 1, rung))
        share = min((without - self.limit) / max(without - with_them, 1e-9), 1.0)
        return Tried(needs.recipe, LADDER[rung], LADDER[rung - 1], share)

    def _allowed(self, candidate: Candidate) -> "_Needs | None":
        """What a candidate needs, launched if it cannot be captured; None if it breaks a rule."""
        recipe = candidate.of(self.recipe)
        launched = replace(recipe, compile=replace(recipe.compile, cudagraph="off"))
        for way in dict.fromkeys((recipe, launched)):
            if not (breaches := check_rules(way, self.world_size)):
                self.is_allowed = True
                return _Needs(way, self.world_size, self.hardware)
            self.refusal = breaches[0]
        return None

    def _rung(self, needs: "_Needs") -> int | None:
        """The first of the ladder with which a step fits."""
        few, many = 0, len(LADDER) - 1
        while few < many:
            middle = (few + many) // 2
            if needs.gib(LADDER[middle]) <= self.limit:
                many = middle
            else:
                few = middle + 1
        return many if needs.gib(LADDER[many]) <= self.limit else None

    def _may_repeat(self, candidate: Candidate, recipe: Recipe, step: int) -> bool:
        """Whether rules allow this step of the ladder with the schedule and the overlap: blocks in pieces refuse norms,
        and split backwards blocks, and experts as these. All models have both; what else a step names, some lack."""
        probe = LADDER[-1] if step >= OF_EXPERTS else ("norms",)
        options = candidate.pp_schedule, candidate.overlap, candidate.dispatcher, candidate.layout.pp > 1, probe
        if options not in self.repeats:
            self.repeats[options] = not check_rules(with_entries(recipe, probe), self.world_size)
        return self.repeats[options]


class _Needs:
    """The memory that a recipe needs by what it computes again: of the first and the last pipeline rank, whichever
    needs more. The search asks the others."""

    def __init__(self, recipe: Recipe, world_size: int, hardware: Hardware) -> None:
        self.recipe, self.world_size, self.hardware = recipe, world_size, hardware
        self.peaks: dict[tuple[str, PerfConfig], Peaks] = {}  # by clones and kernels, which some parts change

    def gib(self, entries: tuple[str, ...]) -> float:
        """With these parts computed again."""
        recipe = as_run_on(with_entries(self.recipe, entries), self.world_size, self.hardware)
        key = recipe.parallel.expert_clones, recipe.perf
        if key not in self.peaks:
            self.peaks[key] = Peaks(recipe, self.world_size, dict.fromkeys((0, recipe.parallel.pp - 1)))
        return max(self.peaks[key].gib(recompute_of(recipe)))
