"""Plan which experts are cloned for one exchange, into which replica slots, and which assignments the clones get.

P ranks of the group · E experts · e experts that each rank owns (E/P) · c replica slots of each rank · I all replica
slots (P·c), rank by rank · T tokens on this rank · K experts a token · n pieces of experts, sorted

With unbalanced routing all ranks wait for the fullest one. A clone of a hot expert on a rank with less load computes
some of that expert's assignments, with equal results: it has the same weights for a step. This follows the redundant
experts of DeepSeek-V3 (arXiv:2412.19437 section 3.4), which are placed by past loads, FasterMoE's shadowed experts
(PPoPP 2022) and Megatron's ECHO (arXiv:2603.07685). Here the loads are those of the tokens that are dispatched next.

The plan is integer arithmetic on the device, from the number of assignments of every rank to every expert, which all
ranks have. So every rank computes the same plan, without a host read, in static shapes.
"""

from typing import NamedTuple

import torch
from torch import Tensor


class ClonePlan(NamedTuple):
    """The contents of the replica slots, equal on every rank."""

    experts_Pc: Tensor
    """int64, the expert in each replica slot, -1 for none."""
    counts_Pc: Tensor
    """int64, how many assignments of that expert the replica slot gets, 0 for none."""


class Reassigned(NamedTuple):
    """Intervals of one rank's assignments that clones get; the n-th assignment of expert x has position
    x·stride + n."""

    begins_I: Tensor
    """int64, ascending."""
    ends_I: Tensor
    slots_I: Tensor
    """int64, the replica slot that gets each interval."""
    stride: int


def plan_clones(counts_PE: Tensor, num_replicas: int) -> ClonePlan:
    """Fill the replica slots so that ranks above the mean load pass their excess to ranks below it.

    In each of c rounds every rank below the mean receives at most one piece of one expert's assignments. A piece is at
    most as large as the largest room of a rank. A rank above the mean passes its largest pieces, as few as cover its
    excess. Pieces of the fullest ranks come first, and the largest of the selected pieces goes to the rank with the
    most room. No rank falls below the mean by passing pieces or rises above it by receiving them, so the fullest rank
    is never fuller than without clones.

    Args:
        counts_PE: number of assignments of each rank to each expert.
        num_replicas: replica slots of a rank (c).
    """
    num_ranks, num_experts = counts_PE.shape
    load_Pe = counts_PE.long().sum(0).view(num_ranks, num_experts // num_ranks)
    load_P = load_Pe.sum(1)
    mean = (load_P.sum() + num_ranks - 1) // num_ranks
    rounds = []
    for _ in range(num_replicas):
        experts_P, received_P = _plan_round(load_Pe, load_P, mean)
        is_none_P = received_P == 0
        load_Pe = load_Pe.flatten().scatter_add(0, experts_P, -received_P).view_as(load_Pe)
        passed_P = torch.zeros_like(load_P).scatter_add(0, experts_P // load_Pe.shape[1], received_P)
        load_P = load_P + received_P - passed_P
        rounds.append((torch.where(is_none_P, -1, experts_P), received_P))
    experts, counts = zip(*rounds, strict=True)
    return ClonePlan(torch.stack(experts, dim=1), torch.stack(counts, dim=1))


def _plan_round(load_Pe: Tensor, load_P: Tensor, mean: Tensor) -> tuple[Tensor, Tensor]:
    """One round: the expert that each rank clones, and how many of its assignments it gets (0: no clone)."""
    num_ranks, num_local_experts = load_Pe.shape
    room_P, receivers_P = (mean - load_P).clamp(min=0).sort(descending=True, stable=True)
    max_piece = room_P[0].clamp(min=1)
    # an expert with more assignments than any rank has room for is cut into pieces, at most P
    start_P = torch.arange(num_ranks, device=load_Pe.device) * max_piece
    piece_PeP = (load_Pe[:, :, None] - start_P).clamp(min=0).minimum(max_piece)
    piece_Pn, order_Pn = piece_PeP.flatten(1).sort(dim=1, descending=True, stable=True)
    preceding_Pn = piece_Pn.cumsum(1) - piece_Pn
    passed_Pn = ((load_P - mean).clamp(min=0)[:, None] - preceding_Pn).clamp(min=0).minimum(piece_Pn)
    # load of the piece's rank before it is passed on; ties are broken by index, so the order is deterministic
    level_Pn = torch.where(passed_Pn > 0, load_P[:, None] - preceding_Pn, 0)
    size = level_Pn.numel()
    keys = level_Pn.flatten() * size + torch.arange(size - 1, -1, -1, device=load_Pe.device)
    selected_P = keys.topk(num_ranks).indices
    passed_P, by_size_P = passed_Pn.flatten()[selected_P].sort(descending=True, stable=True)
    selected_P = selected_P[by_size_P]
    owner_P, local_P = selected_P // order_Pn.shape[1], order_Pn.flatten()[selected_P] // num_ranks
    experts_P = torch.zeros_like(local_P).scatter(0, receivers_P, owner_P * num_local_experts + local_P)
    return experts_P, torch.zeros_like(passed_P).scatter(0, receivers_P, passed_P.minimum(room_P))


def reassign(counts_PE: Tensor, plan: ClonePlan, rank: int, stride: int) -> Reassigned:
    """Assign intervals of a rank's assignments to replica slots; the others stay with the expert's owner.

    A replica slot first gets the assignments of its own rank, whose rows need no communication. The rest comes from the
    other ranks in order, starting after the expert's owner, so that the owner's assignments are the last to move.
    `stride` must exceed the number of assignments of the rank to any expert.
    """
    num_ranks, num_experts = counts_PE.shape
    num_replicas = plan.experts_Pc.shape[1]
    counts_PE = counts_PE.long()
    slots_I = torch.arange(num_ranks * num_replicas, device=counts_PE.device)
    rank_I, expert_I = slots_I // num_replicas, plan.experts_Pc.flatten().clamp(min=0)
    count_I = plan.counts_Pc.flatten()
    owner_I = expert_I // (num_experts // num_ranks)
    earlier_II = (expert_I[:, None] == expert_I) & (slots_I[:, None] > slots_I)

    preceding_I = _sum_where(earlier_II & (rank_I[:, None] == rank_I), count_I)
    local_I = (counts_PE[rank_I, expert_I] - preceding_I).clamp(min=0).minimum(count_I)
    remote_PE = counts_PE.flatten().scatter_add(0, rank_I * num_experts + expert_I, -local_I).view_as(counts_PE)
    ends_PE = remote_PE.cumsum(0)
    # positions of this rank's assignments among those of all ranks, in rank order starting after the expert's owner
    rotation_I = torch.where(owner_I >= rank, ends_PE[-1, expert_I], 0) - ends_PE[owner_I, expert_I]
    end_I = ends_PE[rank, expert_I] + rotation_I
    begin_I = end_I - remote_PE[rank, expert_I]
    # and those of the replica slot's part of them
    remote_count_I = count_I - local_I
    remote_begin_I = _sum_where(earlier_II, remote_count_I)
    remote_I = (end_I.minimum(remote_begin_I + remote_count_I) - begin_I.maximum(remote_begin_I)).clamp(min=0)

    size_I = remote_I + torch.where(rank_I == rank, local_I, 0)
    first_I = expert_I * stride + _sum_where(earlier_II, size_I)
    past_the_end = num_experts * stride
    begins_I, order_I = torch.where(size_I > 0, first_I, past_the_end).sort(stable=True)
    return Reassigned(begins_I, begins_I + size_I[order_I], slots_I[order_I], stride)


def _sum_where(mask_II: Tensor, values_I: Tensor) -> Tensor:
    return torch.where(mask_II, values_I, 0).sum(1)


def replica_slots(ids_TK: Tensor, index_TK: Tensor, reassigned: Reassigned) -> Tensor:
    """Replica slot (of all ranks' slots) of each assignment; -1 if it stays with the owner, or is none.

    `index_TK` is an assignment's index among this rank's assignments to the same expert.
    """
    position_TK = ids_TK.long() * reassigned.stride + index_TK
    interval_TK = (torch.searchsorted(reassigned.begins_I, position_TK, right=True) - 1).clamp(min=0)
    is_reassigned_TK = (
        (position_TK >= reassigned.begins_I[interval_TK])
        & (position_TK < reassigned.ends_I[interval_TK])
        & (ids_TK >= 0)
    )
    return torch.where(is_reassigned_TK, reassigned.slots_I[interval_TK], -1)
