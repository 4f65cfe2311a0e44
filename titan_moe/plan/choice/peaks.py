"""Peaks of a recipe's pipeline ranks with many choices of what is computed again, for those who look for one."""

from collections.abc import Iterable
from typing import NamedTuple

from titan_moe.config.recipe import Recipe
from titan_moe.config.recompute import PartsByLayer, with_entries
from titan_moe.plan.cost.peak import Microbatch, RankPeak
from titan_moe.plan.pipeline.parts import RankPart, part_of
from titan_moe.plan.resolved import Resolved

GROWN_FACTOR = 1.25
"""The capacity factor that there is to be room for: that of natural loads, which "auto" follows."""


class _Rank(NamedTuple):
    """A pipeline rank."""

    part: RankPart
    peak: RankPeak
    layers: frozenset[int]
    microbatches: dict[tuple[str, ...], Microbatch]
    """By what is computed again, of all ranks that have such layers."""
    known: dict[tuple[tuple[str, frozenset[int]], ...], int]
    """Its peaks, by what is computed again of its layers."""


class Peaks:
    """Of some pipeline ranks, by default all. What is computed again changes a part of a peak: the rest is counted
    once, and what a microbatch takes once for all ranks with layers that are alike."""

    def __init__(self, recipe: Recipe, world_size: int, ranks: Iterable[int] | None = None) -> None:
        resolved = Resolved(recipe, world_size)
        self.outside = resolved.outside_bytes
        factor = recipe.parallel.fixed_capacity_factor or GROWN_FACTOR
        self.ranks = list[_Rank]()
        for rank in range(recipe.parallel.pp) if ranks is None else ranks:
            part = part_of(recipe, world_size, rank)
            peak = RankPeak(part, factor, resolved.experts)
            alike = next((it.microbatches for it in self.ranks if it.part.recipe == part.recipe), {})
            self.ranks.append(_Rank(part, peak, frozenset(part.layers), alike, {}))

    def gib(self, again: PartsByLayer) -> list[float]:
        """The peak of each rank with these parts computed again."""
        return [(self._bytes_of(rank, again) + self.outside) / 2**30 for rank in self.ranks]

    def _bytes_of(self, rank: _Rank, again: PartsByLayer) -> int:
        key = tuple((name, own) for name, layers in again.layers.items() if (own := layers & rank.layers))
        if key not in rank.known:
            entries = rank.part.own_entries(again)
            if entries not in rank.microbatches:
                rank.microbatches[entries] = rank.peak.microbatch(with_entries(rank.part.recipe, entries))
            rank.known[key] = rank.peak.bytes_with(rank.microbatches[entries], rank.part.slabs_with(again))
        return rank.known[key]
