"""Permute: sort (token, expert) assignments by expert into slots. The result's type, and the reference.

S rows · K experts a row · R expert slots, sorted by expert · e local experts

There are two implementations. `sort_by_expert` is a stable sort in torch with its bookkeeping, about two dozen
launches. `counting_sort` (counting_sort.py) is three launches of Triton. R is static: surplus slots belong to no
expert, and assignments that do not fit get no slot and set a flag. So a captured step can run with fewer slots than the
worst case, and is taken again with enough of them if the flag is set.
"""

from collections.abc import Callable
from typing import NamedTuple

from torch import Tensor

from titan_moe.kernels.permute.rows import place_scores, plan_slots


class Permutation(NamedTuple):
    """(token, expert) assignments sorted by expert; slots of one expert are in row order."""

    rows_R: Tensor
    """int32, slot -> row; past the last expert's end any existing row (0 if there is none)."""
    slots_SK: Tensor
    """int32, row and k -> slot, -1 for none."""
    scores_R: Tensor
    """Score of each slot, 0 past the last expert's end."""
    offsets_e: Tensor
    """int32, running end of each expert's slots, at most R."""
    overflowed: Tensor
    """int32 scalar on the device, 1 if assignments got no slot (the last ones, of the last experts), else 0."""


Permute = Callable[[Tensor, Tensor, int, int], Permutation]
"""ids_SK (-1 for none), scores_SK, num_experts (local), num_slots -> Permutation; differentiable in the scores."""


def sort_by_expert(ids_SK: Tensor, scores_SK: Tensor, num_experts: int, num_slots: int) -> Permutation:
    """Permute in plain torch, on any device and in any dtype."""
    rows_R, slots_SK, offsets_e, overflowed = plan_slots(ids_SK, num_experts, num_slots)
    return Permutation(rows_R, slots_SK, place_scores(scores_SK, slots_SK, num_slots), offsets_e, overflowed)
