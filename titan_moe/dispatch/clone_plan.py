"""Which experts are cloned for one exchange, onto which spare slots, and which choices the clones take over.

P ranks of the group · E experts · e experts at home on each rank (E/P) · c spare slots of each rank · I all spare slots
(P·c), rank by rank · T tokens on this rank · K choices a token

Routing that is not balanced makes all ranks wait for the fullest one. A clone of one of its hot experts on a rank that
has room takes over some of that expert's choices, exactly: it is the same expert, for a step. After the redundant
experts of DeepSeek-V3 (arXiv:2412.19437 section 3.4), which are placed from the loads of the past, FasterMoE's
shadowed experts (PPoPP 2022) and Megatron's ECHO (arXiv:2603.07685). Here the loads are those of the very tokens that
are about to travel.

All of it is arithmetic of integers on the device, of one table that every rank has: who asks how often for whom. So
every rank finds the same plan, without a host read, in static shapes.
"""

from typing import NamedTuple

import torch
from torch import Tensor


class ClonePlan(NamedTuple):
    """What lies in the spare slots. The same on every rank."""

    experts_Pc: Tensor
    """int64, the expert in each rank's spare slots, -1 for none."""
    taken_Pc: Tensor
    """int64, how many choices of that expert the slot takes over, 0 for none."""


class Reassigned(NamedTuple):
    """Which of one rank's choices go to clones: intervals on a line where the n-th choice of expert x lies at
    x·stride + n."""

    begins_I: Tensor
    """int64, ascending."""
    ends_I: Tensor
    slots_I: Tensor
    """int64, the spare slot that takes an interval."""
    stride: int


def plan_clones(counts_PE: Tensor, num_replicas: int) -> ClonePlan:
    """Fill the spare slots so that ranks above the mean load give what they have too much to ranks below it.

    In each of c rounds every rank below the mean takes at most one piece of one expert. A piece is no wider than the
    most room that a rank has; a rank above the mean gives its widest ones, as few as cover what it has too much. Pieces
    of the fullest ranks come first, and the widest of those that are taken goes to the rank with the most room. Nobody
    sinks below the mean by giving or rises above it by taking, so the fullest rank is never fuller than without clones.

    Args:
        counts_PE: how many choices each rank has for each expert.
        num_replicas: spare slots of a rank (c).
    """
    num_ranks, num_experts = counts_PE.shape
    left_Pe = counts_PE.long().sum(0).view(num_ranks, num_experts // num_ranks)
    load_P = left_Pe.sum(1)
    mean = (load_P.sum() + num_ranks - 1) // num_ranks
    rounds = []
    for _ in range(num_replicas):
        experts_P, taken_P = _match(left_Pe, load_P, mean)
        is_none_P = taken_P == 0
        left_Pe = left_Pe.flatten().scatter_add(0, experts_P, -taken_P).view_as(left_Pe)
        given_P = torch.zeros_like(load_P).scatter_add(0, experts_P // left_Pe.shape[1], taken_P)
        load_P = load_P + taken_P - given_P
        rounds.append((torch.where(is_none_P, -1, experts_P), taken_P))
    experts, taken = zip(*rounds, strict=True)
    return ClonePlan(torch.stack(experts, dim=1), torch.stack(taken, dim=1))


def _match(left_Pe: Tensor, load_P: Tensor, mean: Tensor) -> tuple[Tensor, Tensor]:
    """One round: the expert that each rank takes, and how many of its choices (0: any expert)."""
    num_ranks, num_local_experts = left_Pe.shape
    room_P, takers_P = (mean - load_P).clamp(min=0).sort(descending=True, stable=True)
    widest = room_P[0].clamp(min=1)
    # an expert that is hotter than any room comes in pieces, as many as there are ranks if need be
    cut_P = torch.arange(num_ranks, device=left_Pe.device) * widest
    piece_PeP = (left_Pe[:, :, None] - cut_P).clamp(min=0).minimum(widest)
    piece_Pn, order_Pn = piece_PeP.flatten(1).sort(dim=1, descending=True, stable=True)
    before_Pn = piece_Pn.cumsum(1) - piece_Pn
    given_Pn = ((load_P - mean).clamp(min=0)[:, None] - before_Pn).clamp(min=0).minimum(piece_Pn)
    # how full its rank is when a piece's turn comes; ties by index, so that the order depends on nothing else
    level_Pn = torch.where(given_Pn > 0, load_P[:, None] - before_Pn, 0)
    size = level_Pn.numel()
    keys = level_Pn.flatten() * size + torch.arange(size - 1, -1, -1, device=left_Pe.device)
    chosen_P = keys.topk(num_ranks).indices
    given_P, by_width_P = given_Pn.flatten()[chosen_P].sort(descending=True, stable=True)
    chosen_P = chosen_P[by_width_P]
    giver_P, local_P = chosen_P // order_Pn.shape[1], order_Pn.flatten()[chosen_P] // num_ranks
    experts_P = torch.zeros_like(local_P).scatter(0, takers_P, giver_P * num_local_experts + local_P)
    return experts_P, torch.zeros_like(given_P).scatter(0, takers_P, given_P.minimum(room_P))


def reassign(counts_PE: Tensor, plan: ClonePlan, rank: int, stride: int) -> Reassigned:
    """Say which of a rank's choices go to which spare slot; the others stay with the expert's home.

    A slot first takes the choices of its own rank, whose rows need not travel; what it still lacks comes from the
    ranks in order, beginning behind the expert's home, so that the home's own choices leave last. `stride` must exceed
    the choices that the rank has for an expert.
    """
    num_ranks, num_experts = counts_PE.shape
    num_replicas = plan.experts_Pc.shape[1]
    counts_PE = counts_PE.long()
    slots_I = torch.arange(num_ranks * num_replicas, device=counts_PE.device)
    taker_I, expert_I, taken_I = (
        slots_I // num_replicas,
        plan.experts_Pc.flatten().clamp(min=0),
        plan.taken_Pc.flatten(),
    )
    home_I = expert_I // (num_experts // num_ranks)
    earlier_II = (expert_I[:, None] == expert_I) & (slots_I[:, None] > slots_I)

    ahead_I = _sum_where(earlier_II & (taker_I[:, None] == taker_I), taken_I)
    near_I = (counts_PE[taker_I, expert_I] - ahead_I).clamp(min=0).minimum(taken_I)
    far_PE = counts_PE.flatten().scatter_add(0, taker_I * num_experts + expert_I, -near_I).view_as(counts_PE)
    ends_PE = far_PE.cumsum(0)
    # where this rank's choices lie among those of all ranks, in an order that begins behind the expert's home
    turn_I = torch.where(home_I >= rank, ends_PE[-1, expert_I], 0) - ends_PE[home_I, expert_I]
    end_I = ends_PE[rank, expert_I] + turn_I
    begin_I = end_I - far_PE[rank, expert_I]
    # and where the slot's share of them does
    wanted_I = taken_I - near_I
    from_I = _sum_where(earlier_II, wanted_I)
    far_I = (end_I.minimum(from_I + wanted_I) - begin_I.maximum(from_I)).clamp(min=0)

    share_I = far_I + torch.where(taker_I == rank, near_I, 0)
    first_I = expert_I * stride + _sum_where(earlier_II, share_I)
    nowhere = num_experts * stride
    begins_I, order_I = torch.where(share_I > 0, first_I, nowhere).sort(stable=True)
    return Reassigned(begins_I, begins_I + share_I[order_I], slots_I[order_I], stride)


def _sum_where(mask_II: Tensor, values_I: Tensor) -> Tensor:
    return torch.where(mask_II, values_I, 0).sum(1)


def replica_slots(ids_TK: Tensor, nth_TK: Tensor, taken: Reassigned) -> Tensor:
    """The spare slot, of all ranks' slots, that takes a choice; -1 where it stays at home, or is none.

    `nth_TK` is a choice's number among this rank's choices of the same expert.
    """
    places_TK = ids_TK.long() * taken.stride + nth_TK
    found_TK = (torch.searchsorted(taken.begins_I, places_TK, right=True) - 1).clamp(min=0)
    is_taken_TK = (places_TK >= taken.begins_I[found_TK]) & (places_TK < taken.ends_I[found_TK]) & (ids_TK >= 0)
    return torch.where(is_taken_TK, taken.slots_I[found_TK], -1)
