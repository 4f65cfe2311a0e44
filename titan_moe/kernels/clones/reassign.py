"""Reassign a rank's assignments to the clones of a plan.

T tokens on this rank · K experts a token · E experts · e experts that each rank owns · c replica slots of each rank · I
all replica slots (P·c), rank by rank

A rank serves e + c experts, its own and then those in its replica slots; new ids number them rank by rank. Physics: 24
bytes an assignment, and I intervals that stay in registers or caches: a few microseconds.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from titan_moe.kernels.registry import Kernel, register

BLOCK = 1024
SIZES = ["num_assignments"]


def reassign_reference(
    ids_TK: Tensor, slots_TK: Tensor, offsets_E: Tensor, experts_Pc: Tensor, begins_I: Tensor, ends_I: Tensor
) -> Tensor:
    """The new ids, in tensor operations."""
    num_replicas, num_own = experts_Pc.shape[1], len(offsets_E) // len(experts_Pc)
    begins_E = offsets_E - offsets_E.diff(prepend=offsets_E.new_zeros(1))
    index_TK = slots_TK - begins_E[ids_TK.clamp(min=0)]
    is_clone_TKI = ids_TK[..., None] == experts_Pc.flatten()
    is_clone_TKI &= (index_TK[..., None] >= begins_I) & (index_TK[..., None] < ends_I)
    clone_TK = is_clone_TKI.int().argmax(-1)
    clone_TK = clone_TK // num_replicas * (num_own + num_replicas) + num_own + clone_TK % num_replicas
    own_TK = ids_TK // num_own * (num_own + num_replicas) + ids_TK % num_own
    return torch.where(ids_TK < 0, -1, torch.where(is_clone_TKI.any(-1), clone_TK.to(ids_TK.dtype), own_TK))


@triton.jit(do_not_specialize=SIZES)
def _reassign_kernel(
    ids_ptr, slots_ptr, offsets_ptr, experts_ptr, begins_ptr, ends_ptr, new_ids_ptr, num_assignments,
    NUM_OWN: tl.constexpr, C: tl.constexpr, NUM_SLOTS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    assignment = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    is_there = assignment < num_assignments
    expert = tl.load(ids_ptr + assignment, mask=is_there, other=-1)
    first = tl.load(offsets_ptr + expert - 1, mask=expert > 0, other=0)
    index = tl.load(slots_ptr + assignment, mask=is_there, other=0) - first
    new = tl.where(expert < 0, -1, expert // NUM_OWN * (NUM_OWN + C) + expert % NUM_OWN)
    for slot in range(NUM_SLOTS):
        is_clone = (expert >= 0) & (expert == tl.load(experts_ptr + slot))
        is_clone &= (index >= tl.load(begins_ptr + slot)) & (index < tl.load(ends_ptr + slot))
        new = tl.where(is_clone, slot // C * (NUM_OWN + C) + NUM_OWN + slot % C, new)
    tl.store(new_ids_ptr + assignment, new, mask=is_there)


@torch.library.custom_op("titan_moe::reassign", mutates_args=())
def _reassign(
    ids_TK: Tensor, slots_TK: Tensor, offsets_E: Tensor, experts_Pc: Tensor, begins_I: Tensor, ends_I: Tensor
) -> Tensor:
    ids_TK = ids_TK.contiguous()
    new_TK, (num_ranks, num_replicas) = torch.empty_like(ids_TK), experts_Pc.shape
    if ids_TK.numel():
        _reassign_kernel[(triton.cdiv(ids_TK.numel(), BLOCK),)](
            ids_TK, slots_TK.contiguous(), offsets_E, experts_Pc.contiguous(), begins_I, ends_I, new_TK, ids_TK.numel(),
            NUM_OWN=len(offsets_E) // num_ranks, C=num_replicas, NUM_SLOTS=experts_Pc.numel(), BLOCK=BLOCK,
        )  # fmt: skip
    return new_TK


_reassign.register_fake(lambda ids_TK, *_: ids_TK.new_empty(ids_TK.shape))


def reassign(
    ids_TK: Tensor, slots_TK: Tensor, offsets_E: Tensor, experts_Pc: Tensor, begins_I: Tensor, ends_I: Tensor
) -> Tensor:
    """Reassign in Triton, on a GPU (or in the interpreter).

    Args:
        ids_TK: int64 or int32, experts, -1 for none.
        slots_TK: int32, slots of this rank's assignments sorted by expert, in token order.
        offsets_E: int32, running ends of each expert's slots.
        experts_Pc, begins_I, ends_I: a `ClonePlan`.

    Returns: ids among the P·(e + c) experts that the ranks serve, -1 for none; same shape and dtype.
    """
    return _reassign(ids_TK, slots_TK, offsets_E, experts_Pc, begins_I, ends_I)


register(Kernel("reassign", reassign, reassign_reference, needs_triton=True))
