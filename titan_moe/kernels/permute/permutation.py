"""Which way choices are laid out in slots, and what that gives.

S rows · K choices a row · R expert slots, sorted by expert · e local experts

Two candidates. `sort_by_expert` is a stable sort in torch with its bookkeeping, about two dozen launches;
`counting_sort` (counting_sort.py) is three of Triton. R is a static bound: slots that no choice takes are laid out too,
and choices that find no slot are dropped and flagged, so that a captured step can run with fewer slots than the worst
case wants and be run again, exactly, when the flag says so.
"""

from collections.abc import Callable
from functools import cache
from typing import NamedTuple

from torch import Tensor

from titan_moe.kernels.permute.rows import place_scores, plan_slots


class Permutation(NamedTuple):
    """Expert choices, sorted by expert; slots of one expert are in row order."""

    rows_R: Tensor
    """int32, slot -> row; past the last expert's end any row that exists (0 if there is none)."""
    slots_SK: Tensor
    """int32, choice -> slot, -1 for none."""
    scores_R: Tensor
    """Score of each slot, 0 past the last expert's end."""
    offsets_e: Tensor
    """int32, running end of each expert's slots, at most R."""
    overflowed: Tensor
    """int32 scalar on the device, 1 if some choice found no slot (the last ones, of the last experts), else 0."""


Permute = Callable[[Tensor, Tensor, int, int], Permutation]
"""ids_SK (-1 for none), scores_SK, number of local experts, number of slots -> Permutation; differentiable in the scores."""


def sort_by_expert(ids_SK: Tensor, scores_SK: Tensor, num_experts: int, num_slots: int) -> Permutation:
    """Lay out the choices in plain torch, on any device and in any dtype."""
    rows_R, slots_SK, offsets_e, overflowed = plan_slots(ids_SK, num_experts, num_slots)
    return Permutation(rows_R, slots_SK, place_scores(scores_SK, slots_SK, num_slots), offsets_e, overflowed)


@cache
def choose_permute(choice: str) -> Permute:
    """The way for the recipe's choice of slot kernels: "torch", or "triton" on a GPU."""
    if choice == "torch":
        return sort_by_expert
    from titan_moe.kernels.permute.counting_sort import counting_sort

    return {"triton": counting_sort}[choice]
