"""Rows and expert slots of a rank under expert parallelism: balanced, and in the worst case."""

import math
from functools import lru_cache
from typing import NamedTuple

from titan_moe.config.clones import num_clones
from titan_moe.config.dropping import expert_capacity
from titan_moe.config.recipe import Recipe, expert_slots, max_batch_tokens, microbatch_tokens, text_tokens

SLOTS_ALIGNMENT = 128
"""Numbers of slots and rows are multiples of a tile of the expert kernels."""


class LayerLoads(NamedTuple):
    """Numbers of rows and slots of the MoE layers on a rank, for one microbatch."""

    num_layers: int
    """Number of MoE layers."""
    rows: float
    """Rows of a layer under random routing."""
    slots: int
    """Slots of a layer with a balanced load."""
    worst_rows: int
    """Rows of a layer whose tokens all choose experts of this rank, in the largest batch."""
    worst_slots: int
    """Slots of such a layer."""
    num_hidden_layers: int | None = None
    """The layers whose hidden states are kept, a slot each; None for all."""
    largest: float = 1.0
    """Tokens of the largest batch over those of a microbatch."""

    def bounded(self, factor: float) -> "LayerLoads":
        """The same where a layer has no more than `factor` times its balanced rows and slots; 0 bounds nothing."""
        if not factor:
            return self
        factor *= self.largest
        rows, slots = (aligned(balanced * factor, SLOTS_ALIGNMENT) for balanced in (self.rows, self.slots))
        return self._replace(worst_rows=min(rows, self.worst_rows), worst_slots=min(slots, self.worst_slots))

    def of_all_layers(self) -> tuple[float, int]:
        """Rows and slots of all layers together, balanced."""
        return self.num_layers * self.rows, self._num_hidden * self.slots

    @property
    def _num_hidden(self) -> int:
        return self.num_layers if self.num_hidden_layers is None else min(self.num_hidden_layers, self.num_layers)

    def room(self, factor: float) -> tuple[int, int]:
        """Rows and slots of an arena of this capacity factor: at least those of one layer's worst case, at most those
        of all layers'."""
        rows, slots = (balanced * factor for balanced in self.of_all_layers())
        return (
            _limit(rows, self.worst_rows, self.num_layers),
            _limit(slots, self.worst_slots, self._num_hidden),
        )

    def largest_factor(self, row_bytes: int, slot_bytes: int, num_bytes: float) -> float:
        """The largest factor, a multiple of 1/8, whose arena takes no more than `num_bytes`. Infinite if the worst case
        of all layers fits; 0 if the worst case of one layer does not fit."""
        if self.num_layers == 0:  # of a pipeline stage without experts
            return math.inf

        def size(factor: float) -> float:
            rows, slots = self.room(factor)
            return rows * row_bytes + slots * slot_bytes

        if size(math.inf) <= num_bytes:
            return math.inf
        factor = 0.0
        while size(factor + 1 / 8) <= num_bytes:
            factor += 1 / 8
        return factor


def aligned(number: float, multiple: int) -> int:
    """The next multiple of a number that is not less."""
    return math.ceil(number / multiple) * multiple


def _limit(number: float, worst: int, num_layers: int) -> int:
    return math.ceil(min(max(number, worst), num_layers * worst)) if num_layers else 0


def layer_loads(recipe: Recipe) -> LayerLoads:
    """Compute the loads of a recipe whose dispatcher sends a row once to each rank. With etp a rank receives the rows
    of all ranks of its etp group. With `pad_to_capacity` experts have no more than their capacity, but in text, which
    drops nothing."""
    p, moe = recipe.parallel, recipe.model.moe
    num_tokens, num_local = microbatch_tokens(recipe) * p.etp, moe.num_experts // p.ep
    rows = p.ep * num_tokens * visit_probability(moe.num_experts, num_local, moe.top_k)
    worst_rows = p.ep * max_batch_tokens(recipe)
    most_choices = min(moe.top_k, num_local + num_clones(recipe))
    worst_slots = worst_rows * most_choices
    if moe.pad_to_capacity and p.facts.pads_to_capacity:
        capacity = expert_capacity(num_tokens, moe.num_experts, moe.top_k, moe.capacity_factor)
        padded = p.ep * min(num_tokens * most_choices, num_local * capacity)
        worst_slots = max(padded, p.ep * text_tokens(recipe) * most_choices)
    of_largest = max_batch_tokens(recipe) / max(num_tokens, 1)
    slots = expert_slots(recipe)
    return LayerLoads(recipe.model.num_moe_layers, rows, slots, worst_rows, worst_slots, largest=of_largest)


@lru_cache(maxsize=64)
def visit_probability(num_experts: int, num_local_experts: int, top_k: int) -> float:
    """The probability that random routing gives a token one of a rank's experts; 0 without experts."""
    if num_experts == 0:
        return 0.0
    return 1 - math.comb(num_experts - num_local_experts, top_k) / math.comb(num_experts, top_k)
