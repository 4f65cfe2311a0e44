"""Exchange the weights of clones, and their gradients, over symmetric memory.

P ranks of the group · e experts that a rank owns · c replica slots of each rank · I all replica slots (P·c), rank by
rank · J staging places for experts in a rank's memory · N elements of an expert, of which M are gate and up, or down

The experts in the replica slots are known on the device alone; every rank has the same list, -1 for none. Phases and
barriers are those of arrays.py, over the same memory:

    exchange    write phase                            read phase
    counts      its own to each expert, to every peer  those of all ranks
    weights     its own experts that are cloned        the clones in its replica slots, from their owners
    gradients   of the clones in its replica slots     of all clones of its own experts, added to their own

An owner stages a cloned expert at the place of its local id. If there are fewer replica slots than experts on a rank,
places are numbered by replica slot, and an expert is staged once for each of its clones.

Physics: bound by the links. A rank reads c experts and the gradients of as many are read from it: 9.4 MB of
Qwen3-30B-A3B in bf16 each, 30 microseconds at 320 GB/s. In the worst case one rank owns all cloned experts, and
(P-1)·c experts are read from it, and gradients by it.
"""

from collections.abc import Sequence
from math import prod

import torch
import triton
import triton.language as tl
from torch import Tensor

from titan_moe.kernels.symm_mem.arrays import HEADER_WORDS, SymmArray, peer_array, signal_bytes

BLOCK = 4096
SIZES = ["rank", "num_experts", "num_replicas", "num_all_replicas"]


def clone_bytes(
    num_ranks: int, num_local_experts: int, num_replicas: int, num_elements: int, dtype: torch.dtype
) -> int:
    """Bytes of symmetric memory that each rank needs; any of its experts may be cloned by the others."""
    num_places = _num_places(num_ranks, num_local_experts, num_replicas)
    counts = num_ranks * num_ranks * num_local_experts * torch.int32.itemsize
    return signal_bytes(num_ranks) + max(num_places * num_elements * dtype.itemsize, counts)


def clone_arrays(
    memory: Tensor,
    peer_ptrs_P: Tensor,
    num_local_experts: int,
    num_replicas: int,
    num_elements: int,
    dtype: torch.dtype,
) -> tuple[SymmArray, SymmArray]:
    """View a rank's memory as the barrier's signals, at the offset of every exchange, and staging places [J, N].

    Raises: ValueError if the memory is too small.
    """
    num_ranks = peer_ptrs_P.numel()
    needed = clone_bytes(num_ranks, num_local_experts, num_replicas, num_elements, dtype)
    if memory.numel() < needed:
        raise ValueError(
            f"{num_replicas} clones of {num_elements} elements in {dtype} on each of {num_ranks} ranks need {needed} "
            f"bytes of symmetric memory, but {memory.numel()} are allocated; allocate clone_bytes(...)"
        )
    num_places = _num_places(num_ranks, num_local_experts, num_replicas)
    return _signals_and(memory, peer_ptrs_P, (num_places, num_elements), dtype)


def count_arrays(memory: Tensor, peer_ptrs_P: Tensor, num_experts: int) -> tuple[SymmArray, SymmArray]:
    """View a rank's memory as the barrier's signals and every rank's number of assignments to each expert, int32
    [P, E]. Memory that fits clones fits it.

    Raises: ValueError if the memory is too small.
    """
    num_ranks = peer_ptrs_P.numel()
    needed = signal_bytes(num_ranks) + num_ranks * num_experts * torch.int32.itemsize
    if memory.numel() < needed:
        raise ValueError(
            f"the loads of {num_experts} experts on {num_ranks} ranks need {needed} bytes of symmetric memory, but "
            f"{memory.numel()} are allocated; allocate clone_bytes(...)"
        )
    return _signals_and(memory, peer_ptrs_P, (peer_ptrs_P.numel(), num_experts), torch.int32)


def _signals_and(
    memory: Tensor, peer_ptrs_P: Tensor, shape: tuple[int, int], dtype: torch.dtype
) -> tuple[SymmArray, SymmArray]:
    num_ranks, scratch = peer_ptrs_P.numel(), memory.data
    begin = signal_bytes(num_ranks)
    signals = SymmArray(scratch[: (HEADER_WORDS + num_ranks) * 4].view(torch.int32), peer_ptrs_P, 0)
    array = scratch[begin : begin + prod(shape) * dtype.itemsize].view(dtype).view(shape)
    return signals, SymmArray(array, peer_ptrs_P, begin)


def _num_places(num_ranks: int, num_local_experts: int, num_replicas: int) -> int:
    return max(min(num_local_experts, num_ranks * num_replicas), num_replicas)


def add_clones_reference(own_PeN: Tensor, clones_PcN: Tensor, experts_Pc: Tensor) -> Tensor:
    """Each expert's gradient plus those of its clones, in at least fp32 in the order of replica slots: [P, e, N]."""
    total_EN = own_PeN.flatten(0, 1).to(torch.promote_types(own_PeN.dtype, torch.float32))
    for expert, clone_N in zip(experts_Pc.flatten().tolist(), clones_PcN.flatten(0, 1), strict=True):
        if expert >= 0:
            total_EN[expert] += clone_N
    return total_EN.to(own_PeN.dtype).view_as(own_PeN)


@triton.jit
def _is_first(experts_ptr, replica, expert):
    """Whether no earlier replica slot has a clone of the same expert."""
    is_first = True
    for earlier in range(replica):
        is_first = is_first & (tl.load(experts_ptr + earlier) != expert)
    return is_first


@triton.jit(do_not_specialize=SIZES)
def _stage_kernel(
    own_ptr, experts_ptr, staged_ptr, rank, num_experts, num_all_replicas, M, N: tl.constexpr, BLOCK: tl.constexpr
):  # fmt: skip
    replica = tl.program_id(1)
    expert = tl.load(experts_ptr + replica)
    is_staged = (expert >= 0) & (expert // num_experts == rank)
    place = replica.to(tl.int64)
    if num_experts <= num_all_replicas:
        place = expert % num_experts
        is_staged = is_staged & _is_first(experts_ptr, replica, expert)
    if is_staged:
        element = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
        weight = tl.load(own_ptr + (expert % num_experts) * M + element, mask=element < M, other=0.0)
        tl.store(staged_ptr + place * N + element, weight, mask=element < M)


@triton.jit(do_not_specialize=SIZES)
def _pull_kernel(
    clones_ptr, experts_ptr, peer_ptrs_ptr, offset_bytes, first, rank, num_experts, num_replicas, num_all_replicas,
    M, N: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    local_replica = tl.program_id(1).to(tl.int64)
    replica = rank * num_replicas + local_replica
    expert = tl.load(experts_ptr + replica)
    if expert >= 0:
        place = replica
        if num_experts <= num_all_replicas:
            place = expert % num_experts
        staged_ptr = peer_array(peer_ptrs_ptr, expert // num_experts, offset_bytes, clones_ptr) + first
        element = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
        weight = tl.load(staged_ptr + place * N + element, mask=element < M, other=0.0)
        tl.store(clones_ptr + local_replica * M + element, weight, mask=element < M)


@triton.jit(do_not_specialize=SIZES)
def _add_kernel(
    own_ptr, experts_ptr, peer_ptrs_ptr, offset_bytes, first, rank, num_experts, num_replicas, num_all_replicas,
    M, N: tl.constexpr, BLOCK: tl.constexpr, TOTAL: tl.constexpr,
):  # fmt: skip
    replica = tl.program_id(1)
    expert = tl.load(experts_ptr + replica)
    # the program of an expert's first clone adds all its clones
    if (expert >= 0) & (expert // num_experts == rank) & _is_first(experts_ptr, replica, expert):
        element = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
        own_ptrs = own_ptr + (expert % num_experts) * M + element
        total = tl.load(own_ptrs, mask=element < M, other=0.0).to(TOTAL)
        for other in range(replica, num_all_replicas):
            if tl.load(experts_ptr + other) == expert:
                staged_ptr = peer_array(peer_ptrs_ptr, other // num_replicas, offset_bytes, own_ptr) + first
                offset = (other % num_replicas).to(tl.int64) * N + element
                total += tl.load(staged_ptr + offset, mask=element < M, other=0.0).to(TOTAL)
        tl.store(own_ptrs, total.to(own_ptr.dtype.element_ty), mask=element < M)


@triton.jit(do_not_specialize=SIZES)
def _send_counts_kernel(
    offsets_ptr, counts_ptr, peer_ptrs_ptr, offset_bytes, rank, num_experts, BLOCK: tl.constexpr
):  # fmt: skip
    expert = tl.arange(0, BLOCK)
    end = tl.load(offsets_ptr + expert, mask=expert < num_experts, other=0)
    begin = tl.load(offsets_ptr + expert - 1, mask=(expert > 0) & (expert < num_experts), other=0)
    there_ptr = peer_array(peer_ptrs_ptr, tl.program_id(0), offset_bytes, counts_ptr)
    tl.store(there_ptr + rank * num_experts + expert, end - begin, mask=expert < num_experts)


def send_counts(offsets_E: Tensor, counts: SymmArray, rank: int) -> None:
    """Write this rank's number of assignments to each expert to every peer; the write phase of counts.

    Shapes: offsets int32 [E], their running ends, contiguous.
    """
    num_ranks, num_experts = counts.local.shape
    _send_counts_kernel[(num_ranks,)](
        offsets_E, counts.local, counts.peer_ptrs_P, counts.offset_bytes, rank, num_experts,
        BLOCK=triton.next_power_of_2(num_experts),
    )  # fmt: skip


def stage_weights(weights: Sequence[Tensor], experts_Pc: Tensor, staged: SymmArray, rank: int) -> None:
    """Stage this rank's cloned experts for their peers; the write phase of weights.

    Shapes: weights [e, ...], concatenated in an expert's N elements; experts_Pc int64 [P, c].
    """
    for weight, first, grid in _parts(weights, experts_Pc.numel()):
        _stage_kernel[grid](
            weight, experts_Pc, staged.local[:, first:], rank, len(weight), experts_Pc.numel(), weight[0].numel(),
            N=staged.local.shape[1], BLOCK=BLOCK,
        )  # fmt: skip


def pull_weights(
    weights: Sequence[Tensor],
    experts_Pc: Tensor,
    staged: SymmArray,
    rank: int,
    out: Sequence[Tensor] | None = None,
) -> tuple[Tensor, ...]:
    """Read the clones of this rank's replica slots, [c, ...] of each weight, into `out` if it is given; the read phase
    of weights. Empty replica slots are not written."""
    num_replicas, clones = experts_Pc.shape[1], []
    for index, (weight, first, grid) in enumerate(_parts(weights, num_replicas)):
        clone = weight.new_empty(num_replicas, *weight.shape[1:]) if out is None else out[index]
        _pull_kernel[grid](
            clone, experts_Pc, staged.peer_ptrs_P, staged.offset_bytes, first, rank, len(weight), len(clone),
            experts_Pc.numel(), weight[0].numel(), N=staged.local.shape[1], BLOCK=BLOCK,
        )  # fmt: skip
        clones.append(clone)
    return tuple(clones)


@triton.jit(do_not_specialize=SIZES)
def _stage_gradients_kernel(
    clones_ptr, experts_ptr, staged_ptr, rank, num_replicas, M, N: tl.constexpr, BLOCK: tl.constexpr
):  # fmt: skip
    replica = tl.program_id(1).to(tl.int64)
    if tl.load(experts_ptr + rank * num_replicas + replica) >= 0:
        element = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
        grad = tl.load(clones_ptr + replica * M + element, mask=element < M, other=0.0)
        tl.store(staged_ptr + replica * N + element, grad, mask=element < M)


def stage_gradients(clones: Sequence[Tensor], experts_Pc: Tensor, staged: SymmArray, rank: int) -> None:
    """Stage the gradients of this rank's clones, [c, ...] of each weight, contiguous; the write phase of gradients."""
    for clone, first, grid in _parts(clones, experts_Pc.shape[1]):
        _stage_gradients_kernel[grid](
            clone, experts_Pc, staged.local[:, first:], rank, len(clone), clone[0].numel(),
            N=staged.local.shape[1], BLOCK=BLOCK,
        )  # fmt: skip


def add_gradients(own: Sequence[Tensor], experts_Pc: Tensor, staged: SymmArray, rank: int) -> None:
    """Add the gradients of clones to those of this rank's experts, [e, ...] of each weight, contiguous, in place; the
    read phase of gradients. Sums are in at least fp32, in the order of replica slots, and rounded once."""
    for grad, first, grid in _parts(own, experts_Pc.numel()):
        _add_kernel[grid](
            grad, experts_Pc, staged.peer_ptrs_P, staged.offset_bytes, first, rank, len(grad), experts_Pc.shape[1],
            experts_Pc.numel(), grad[0].numel(), N=staged.local.shape[1], BLOCK=BLOCK,
            TOTAL=tl.float64 if grad.dtype == torch.float64 else tl.float32,
        )  # fmt: skip


def _parts(weights: Sequence[Tensor], num_slots: int) -> list[tuple[Tensor, int, tuple[int, int]]]:
    """Each weight, its first element among an expert's, and the grid that moves it for `num_slots` replica slots."""
    firsts = [sum(weight[0].numel() for weight in weights[:index]) for index in range(len(weights))]
    grids = [(triton.cdiv(weight[0].numel(), BLOCK), num_slots) for weight in weights]
    return list(zip(weights, firsts, grids, strict=True))
