"""Plan which experts are cloned for one exchange, into which replica slots, and which assignments the clones get.

P ranks of the group · E experts · e experts that each rank owns (E/P) · c replica slots of each rank · I all replica
slots (P·c), rank by rank

With unbalanced routing all ranks wait for the fullest one. A clone of a hot expert on a rank with less load computes
some of that expert's assignments, with equal results: it has the same weights for a step. This follows the redundant
experts of DeepSeek-V3 (arXiv:2412.19437 section 3.4), which are placed by past loads, FasterMoE's shadowed experts
(PPoPP 2022) and Megatron's ECHO (arXiv:2603.07685). Here the loads are those of the tokens that are dispatched next.

*Plan*: while the fullest rank has more than 1.05 times the mean, and exceeds it by more assignments than a rank
computes in the time of a clone, its fullest expert passes assignments to a clone on the rank with the most room and a
free replica slot: as many as the expert has, as the fullest rank has above the mean, and as there is room below it,
whichever is least. So a rank that passes stays at the mean or above, and one that receives at the mean or below: no
clone raises the load of the fullest rank, and a balanced exchange has no clones. Ties are broken by index. It is
integer arithmetic on the number of assignments of every rank to every expert, which all ranks have: every rank makes
the same plan, without a host read, in static shapes.

*Assignments*: those of an expert are numbered over all ranks, in rank order starting after the expert's owner, whose
own are the last to move. Its clones get the first of them, in the same order of ranks, so that many stay on their rank.

Physics: latency-bound, a few KB. One program plans in at most I rounds of reductions over E and P numbers; without
clones it ends after the first. Aim: less than the time of a barrier and two small launches.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from titan_moe.kernels.registry import Kernel, register

TOLERANCE = 20
"""The fullest rank may exceed the mean by a part in so many: a twentieth."""
SIZES = ["rank", "cost"]


class ClonePlan(NamedTuple):
    """The experts in the replica slots, equal on every rank, and what each gets of this rank's assignments."""

    experts_Pc: Tensor
    """int64, the expert in each replica slot, -1 for none."""
    begins_I: Tensor
    """int32: a replica slot gets this rank's assignments to its expert from the begins-th, in token order."""
    ends_I: Tensor
    """int32, up to the ends-th, which it does not get."""


def plan_clones_reference(counts_PE: Tensor, num_replicas: int, rank: int, cost: int = 0) -> ClonePlan:
    """The plan of a rank in tensor operations, some 40 a replica slot."""
    num_ranks, num_experts = counts_PE.shape
    counts_PE, num_own = counts_PE.long(), num_experts // num_ranks
    owner_E = torch.arange(num_experts, device=counts_PE.device) // num_own
    load_E = counts_PE.sum(0)
    load_P = load_E.view(num_ranks, num_own).sum(1)
    mean = (load_P.sum() + num_ranks - 1) // num_ranks
    most_excess = (mean // TOLERANCE).clamp(min=cost)
    slot_I = torch.arange(num_ranks * num_replicas, device=counts_PE.device)
    experts_I, moved_I = torch.full_like(slot_I, -1), torch.zeros_like(slot_I)
    free_P = torch.full_like(load_P, num_replicas)
    for _ in range(len(slot_I)):
        fullest = load_P.argmax(0, keepdim=True)
        expert = torch.where(owner_E == fullest, load_E, -1).argmax(0, keepdim=True)
        receiver = torch.where(free_P > 0, mean - load_P, -1).argmax(0, keepdim=True)
        free, excess, room = free_P[receiver], load_P[fullest] - mean, mean - load_P[receiver]
        is_cloned = (free > 0) & (room > 0) & (excess > most_excess)
        moved = torch.where(is_cloned, load_E[expert].minimum(excess).minimum(room), 0)
        slot = receiver * num_replicas + num_replicas - free.clamp(min=1)
        experts_I = experts_I.scatter(0, slot, torch.where(is_cloned, expert, experts_I[slot]))
        moved_I, free_P = moved_I.scatter_add(0, slot, moved), free_P.scatter_add(0, receiver, -is_cloned.long())
        load_E = load_E.scatter_add(0, expert, -moved)
        load_P = load_P.scatter_add(0, fullest, -moved).scatter_add(0, receiver, moved)

    cloned_I = experts_I.clamp(min=0)
    # ranks from the one after the expert's owner, from 0; the assignments of earlier ranks, and of earlier clones
    turn_PI = (torch.arange(num_ranks, device=slot_I.device)[:, None] - cloned_I // num_own - 1) % num_ranks
    order_I = turn_PI.gather(0, slot_I[None] // num_replicas)[0] * num_replicas + slot_I % num_replicas
    is_earlier_II = (experts_I[:, None] == experts_I) & (order_I[:, None] > order_I)
    counts_PI = counts_PE[:, cloned_I]
    begins_I = torch.where(is_earlier_II, moved_I, 0).sum(1) - torch.where(turn_PI < turn_PI[rank], counts_PI, 0).sum(0)
    intervals = (ends_I.clamp(min=0).minimum(counts_PI[rank]).int() for ends_I in (begins_I, begins_I + moved_I))
    return ClonePlan(experts_I.view(num_ranks, num_replicas), *intervals)


@triton.jit
def _at(values, indices, index):
    """The value at an index of a vector."""
    return tl.sum(tl.where(indices == index, values, 0), axis=0)


@triton.jit(do_not_specialize=SIZES)
def _plan_kernel(
    counts_ptr, header_ptr, experts_ptr, begins_ptr, ends_ptr, rank, cost,
    HAS_HEADER: tl.constexpr,
    P: tl.constexpr, E: tl.constexpr, C: tl.constexpr, P2: tl.constexpr, E2: tl.constexpr, I2: tl.constexpr,
    TOLERANCE: tl.constexpr,
):  # fmt: skip
    expert_E, rank_P, slot_I = tl.arange(0, E2), tl.arange(0, P2), tl.arange(0, I2)
    owner_E = expert_E // (E // P)  # past the last expert, no rank's
    is_valid = True
    if HAS_HEADER:
        is_valid = tl.load(header_ptr) == 0
    load_E = tl.zeros((E2,), dtype=tl.int32)
    for source in range(P):
        load_E += tl.load(counts_ptr + source * E + expert_E, mask=is_valid & (expert_E < E), other=0)
    load_P = tl.sum(tl.where(owner_E[None, :] == rank_P[:, None], load_E[None, :], 0), axis=1)
    mean = (tl.sum(load_E, axis=0) + P - 1) // P
    most_excess = tl.maximum(mean // TOLERANCE, cost)
    free_P = tl.where(rank_P < P, C, 0)
    experts_I, moved_I = tl.full((I2,), -1, dtype=tl.int32), tl.zeros((I2,), dtype=tl.int32)
    is_cloned = True
    while is_cloned:
        fullest, receiver = tl.argmax(load_P, axis=0), tl.argmax(tl.where(free_P > 0, mean - load_P, -1), axis=0)
        of_fullest_E = tl.where(owner_E == fullest, load_E, -1)
        expert, most = tl.argmax(of_fullest_E, axis=0), tl.max(of_fullest_E, axis=0)
        free, excess = _at(free_P, rank_P, receiver), tl.max(load_P, axis=0) - mean
        room = mean - _at(load_P, rank_P, receiver)
        is_cloned = (free > 0) & (room > 0) & (excess > most_excess)
        moved = tl.where(is_cloned, tl.minimum(tl.minimum(most, excess), room), 0)
        is_slot_I = is_cloned & (slot_I == receiver * C + C - free)
        experts_I, moved_I = tl.where(is_slot_I, expert, experts_I), tl.where(is_slot_I, moved, moved_I)
        free_P -= tl.where(is_cloned & (rank_P == receiver), 1, 0)
        load_E -= tl.where(expert_E == expert, moved, 0)
        load_P += tl.where(rank_P == receiver, moved, 0) - tl.where(rank_P == fullest, moved, 0)

    cloned_I = tl.maximum(experts_I, 0)
    first_I = cloned_I // (E // P) + 1
    order_I = (slot_I // C + P - first_I) % P * C + slot_I % C
    is_earlier_II = (experts_I[:, None] == experts_I[None, :]) & (order_I[:, None] > order_I[None, :])
    begins_I = tl.sum(tl.where(is_earlier_II, moved_I[None, :], 0), axis=1)
    for source in range(P):
        is_before_I = (source + P - first_I) % P < (rank + P - first_I) % P
        begins_I -= tl.load(counts_ptr + source * E + cloned_I, mask=is_valid & is_before_I, other=0)
    own_I = tl.where(is_valid, tl.load(counts_ptr + rank * E + cloned_I), 0)
    is_slot_I = slot_I < P * C
    tl.store(experts_ptr + slot_I, experts_I.to(tl.int64), mask=is_slot_I)
    tl.store(begins_ptr + slot_I, tl.minimum(tl.maximum(begins_I, 0), own_I), mask=is_slot_I)
    tl.store(ends_ptr + slot_I, tl.minimum(tl.maximum(begins_I + moved_I, 0), own_I), mask=is_slot_I)


def launch_plan(
    counts_PE: Tensor, num_replicas: int, rank: int, cost: int = 0, header: Tensor | None = None
) -> ClonePlan:
    """The plan of a rank, in one launch; `cost` as for `plan_clones`.

    Shapes: counts int32 [P, E], contiguous; `header` int32, of symmetric memory. If its first word is not 0, a barrier
    has failed, the counts are stale, and the plan has no clones.
    """
    num_ranks, num_experts = counts_PE.shape
    num_slots = num_ranks * num_replicas
    plan = empty_plan(counts_PE, num_replicas)
    sizes = {"P2": num_ranks, "E2": num_experts, "I2": num_slots}
    _plan_kernel[(1,)](
        counts_PE, counts_PE if header is None else header, *plan, rank, cost,
        HAS_HEADER=header is not None,
        P=num_ranks, E=num_experts, C=num_replicas, TOLERANCE=TOLERANCE,
        **{name: triton.next_power_of_2(size) for name, size in sizes.items()},
    )  # fmt: skip
    return plan


def empty_plan(counts_PE: Tensor, num_replicas: int) -> ClonePlan:
    """A plan of undefined contents."""
    num_ranks = len(counts_PE)
    experts_Pc = counts_PE.new_empty(num_ranks, num_replicas, dtype=torch.int64)
    begins_I, ends_I = (experts_Pc.new_empty(experts_Pc.numel(), dtype=torch.int32) for _ in range(2))
    return ClonePlan(experts_Pc, begins_I, ends_I)


@torch.library.custom_op("titan_moe::plan_clones", mutates_args=())
def _plan_clones(counts_PE: Tensor, num_replicas: int, rank: int, cost: int) -> tuple[Tensor, Tensor, Tensor]:
    return tuple(launch_plan(counts_PE.contiguous(), num_replicas, rank, cost))


_plan_clones.register_fake(lambda counts_PE, num_replicas, rank, cost: tuple(empty_plan(counts_PE, num_replicas)))


def plan_clones(counts_PE: Tensor, num_replicas: int, rank: int, cost: int = 0) -> ClonePlan:
    """Plan in Triton, on a GPU (or in the interpreter). Capturable: the host reads nothing.

    Args:
        counts_PE: int32, number of assignments of each rank to each expert.
        num_replicas: replica slots of a rank (c).
        rank: this rank, whose intervals are returned.
        cost: what a clone takes, in assignments that a rank computes in this time.
    """
    return ClonePlan(*_plan_clones(counts_PE, num_replicas, rank, cost))


register(Kernel("plan_clones", plan_clones, plan_clones_reference, needs_triton=True))
