"""Weights of clones out of the memory of their homes, and their gradients back, by kernels.

P ranks of the group · e experts at home on each rank · c spare slots of each rank · I all spare slots (P·c), rank by
rank · J places for experts in a rank's memory · N elements of an expert, of which M are gate's and up's, or down's

What lies in the spare slots is known on the device alone, and the same on every rank; -1 is none. Phases and barriers
are those of symm_dispatch.py, over the same memory:

    exchange    writes                                         reads
    weights     those of its experts that somebody cloned      the clones in its slots, from their homes
    gradients   those of the clones in its slots               its experts' clones, which it adds to their own

A cloned expert lies at the place of its own number at home; or, where there are fewer spare slots than experts at home,
at that of its clone, and once for each.

Physics: bound by the links. A rank gets c experts and gives the gradients of as many: 9.4 MB of Qwen3-30B-A3B in bf16
each, 30 microseconds at 320 GB/s. At worst one home has all that is cloned, and is read, and then reads, (P-1)·c times
that.
"""

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from titan_moe.kernels.symm_mem.arrays import HEADER_WORDS, SymmArray, peer_array, signal_bytes

BLOCK = 4096
SIZES = ["rank", "num_experts", "num_replicas", "num_slots"]


def clone_bytes(
    num_ranks: int, num_local_experts: int, num_replicas: int, num_elements: int, dtype: torch.dtype
) -> int:
    """Bytes of shared memory that each rank must have, all of whose experts may be those that the others clone."""
    num_places = _num_places(num_ranks, num_local_experts, num_replicas)
    return signal_bytes(num_ranks) + num_places * num_elements * dtype.itemsize


def clone_arrays(
    memory: Tensor,
    peer_ptrs_P: Tensor,
    num_local_experts: int,
    num_replicas: int,
    num_elements: int,
    dtype: torch.dtype,
) -> tuple[SymmArray, SymmArray]:
    """Lay over a rank's memory the signals of the barrier, where every exchange has them, and places for experts
    [J, N].

    Raises: ValueError if the memory is too small.
    """
    num_ranks = peer_ptrs_P.numel()
    wanted = clone_bytes(num_ranks, num_local_experts, num_replicas, num_elements, dtype)
    if memory.numel() < wanted:
        raise ValueError(
            f"{num_replicas} clones of {num_elements} elements in {dtype} on each of {num_ranks} ranks take {wanted} "
            f"bytes of symmetric memory, and {memory.numel()} were allocated"
        )
    scratch, begin = memory.data, signal_bytes(num_ranks)
    signals = SymmArray(scratch[: (HEADER_WORDS + num_ranks) * 4].view(torch.int32), peer_ptrs_P, 0)
    staged_JN = scratch[begin:wanted].view(dtype).view(-1, num_elements)
    return signals, SymmArray(staged_JN, peer_ptrs_P, begin)


def _num_places(num_ranks: int, num_local_experts: int, num_replicas: int) -> int:
    return max(min(num_local_experts, num_ranks * num_replicas), num_replicas)


def add_clones_reference(own_PeN: Tensor, clones_PcN: Tensor, experts_Pc: Tensor) -> Tensor:
    """Each expert's gradient and those of its clones, added in at least fp32 in the order of slots: [P, e, N]."""
    total_EN = own_PeN.flatten(0, 1).to(torch.promote_types(own_PeN.dtype, torch.float32))
    for expert, clone_N in zip(experts_Pc.flatten().tolist(), clones_PcN.flatten(0, 1), strict=True):
        if expert >= 0:
            total_EN[expert] += clone_N
    return total_EN.to(own_PeN.dtype).view_as(own_PeN)


@triton.jit
def _is_first(experts_ptr, slot, expert):
    """Whether no slot before has a clone of the same expert."""
    is_first = True
    for earlier in range(slot):
        is_first = is_first & (tl.load(experts_ptr + earlier) != expert)
    return is_first


@triton.jit(do_not_specialize=SIZES)
def _stage_kernel(
    own_ptr, experts_ptr, staged_ptr, rank, num_experts, num_slots, M, N: tl.constexpr, BLOCK: tl.constexpr
):  # fmt: skip
    slot = tl.program_id(1)
    expert = tl.load(experts_ptr + slot)
    is_mine = (expert >= 0) & (expert // num_experts == rank)
    place = slot.to(tl.int64)
    if num_experts <= num_slots:
        place = expert % num_experts
        is_mine = is_mine & _is_first(experts_ptr, slot, expert)
    if is_mine:
        element = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
        weight = tl.load(own_ptr + (expert % num_experts) * M + element, mask=element < M, other=0.0)
        tl.store(staged_ptr + place * N + element, weight, mask=element < M)


@triton.jit(do_not_specialize=SIZES)
def _pull_kernel(
    clones_ptr, experts_ptr, peer_ptrs_ptr, offset_bytes, first, rank, num_experts, num_replicas, num_slots,
    M, N: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    spare = tl.program_id(1).to(tl.int64)
    slot = rank * num_replicas + spare
    expert = tl.load(experts_ptr + slot)
    if expert >= 0:
        place = slot
        if num_experts <= num_slots:
            place = expert % num_experts
        staged_ptr = peer_array(peer_ptrs_ptr, expert // num_experts, offset_bytes, clones_ptr) + first
        element = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
        weight = tl.load(staged_ptr + place * N + element, mask=element < M, other=0.0)
        tl.store(clones_ptr + spare * M + element, weight, mask=element < M)


@triton.jit(do_not_specialize=SIZES)
def _add_kernel(
    own_ptr, experts_ptr, peer_ptrs_ptr, offset_bytes, first, rank, num_experts, num_replicas, num_slots,
    M, N: tl.constexpr, BLOCK: tl.constexpr, TOTAL: tl.constexpr,
):  # fmt: skip
    slot = tl.program_id(1)
    expert = tl.load(experts_ptr + slot)
    # the program of the first clone adds all of them
    if (expert >= 0) & (expert // num_experts == rank) & _is_first(experts_ptr, slot, expert):
        element = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
        own_ptrs = own_ptr + (expert % num_experts) * M + element
        total = tl.load(own_ptrs, mask=element < M, other=0.0).to(TOTAL)
        for other in range(slot, num_slots):
            if tl.load(experts_ptr + other) == expert:
                staged_ptr = peer_array(peer_ptrs_ptr, other // num_replicas, offset_bytes, own_ptr) + first
                there = (other % num_replicas).to(tl.int64) * N + element
                total += tl.load(staged_ptr + there, mask=element < M, other=0.0).to(TOTAL)
        tl.store(own_ptrs, total.to(own_ptr.dtype.element_ty), mask=element < M)


def stage_weights(weights: Sequence[Tensor], experts_Pc: Tensor, staged: SymmArray, rank: int) -> None:
    """Lay this rank's cloned experts where their clones find them: of the write phase of weights.

    Shapes: weights [e, ...], side by side in an expert's N elements; experts_Pc int64 [P, c].
    """
    for weight, first, grid in _parts(weights, staged, experts_Pc.numel()):
        _stage_kernel[grid](
            weight, experts_Pc, staged.local[:, first:], rank, len(weight), experts_Pc.numel(), weight[0].numel(),
            N=staged.local.shape[1], BLOCK=BLOCK,
        )  # fmt: skip


def pull_weights(weights: Sequence[Tensor], experts_Pc: Tensor, staged: SymmArray, rank: int) -> tuple[Tensor, ...]:
    """The clones in this rank's slots, [c, ...] of each weight; an empty slot is not written: of the read phase."""
    clones = []
    for weight, first, grid in _parts(weights, staged, experts_Pc.shape[1]):
        clone = weight.new_empty(experts_Pc.shape[1], *weight.shape[1:])
        _pull_kernel[grid](
            clone, experts_Pc, staged.peer_ptrs_P, staged.offset_bytes, first, rank, len(weight), len(clone),
            experts_Pc.numel(), weight[0].numel(), N=staged.local.shape[1], BLOCK=BLOCK,
        )  # fmt: skip
        clones.append(clone)
    return tuple(clones)


def stage_gradients(clones: Sequence[Tensor], staged: SymmArray) -> None:
    """Lay the gradients of this rank's clones, [c, ...] of each weight, where their homes find them: of the write phase
    of gradients."""
    for clone, first, _ in _parts(clones, staged, 1):
        staged.local[: len(clone), first : first + clone[0].numel()].copy_(clone.flatten(1))


def add_gradients(own: Sequence[Tensor], experts_Pc: Tensor, staged: SymmArray, rank: int) -> None:
    """Add to the gradients of this rank's experts, [e, ...] of each weight, contiguous, those of their clones, in at
    least fp32 in the order of slots, rounded once: of the read phase of gradients."""
    for grad, first, grid in _parts(own, staged, experts_Pc.numel()):
        _add_kernel[grid](
            grad, experts_Pc, staged.peer_ptrs_P, staged.offset_bytes, first, rank, len(grad), experts_Pc.shape[1],
            experts_Pc.numel(), grad[0].numel(), N=staged.local.shape[1], BLOCK=BLOCK,
            TOTAL=tl.float64 if grad.dtype == torch.float64 else tl.float32,
        )  # fmt: skip


def _parts(weights: Sequence[Tensor], staged: SymmArray, num_slots: int) -> list[tuple[Tensor, int, tuple[int, int]]]:
    """Each weight, where it begins among an expert's elements, and the programs that move it for so many slots."""
    firsts = [sum(weight[0].numel() for weight in weights[:index]) for index in range(len(weights))]
    grids = [(triton.cdiv(weight[0].numel(), BLOCK), num_slots) for weight in weights]
    return list(zip(weights, firsts, grids, strict=True))
