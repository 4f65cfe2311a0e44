"""Permute in Triton: a stable counting sort of the assignments by expert, in three launches.

S rows · K experts a row · N assignments (S·K) · R expert slots, sorted by expert · e local experts · b blocks of
assignments

Physics: memory- and launch-bound. N int64 ids and N scores are read, N slots and R rows and scores are written: 24
bytes an assignment, and 12 more in backward. 262,144 assignments are 6 MB, two microseconds of an H200's bandwidth, so
launches and latency dominate. Aim: three launches. The first counts each block's assignments (a program a block), the
second sums the counts over blocks (a program an expert), the third places the assignments (a program a block). All
arithmetic is on integers, with no atomics on global memory, so the result is deterministic.

Assignments of -1, and indices past the last assignment, are counted for one extra expert, the last. So slots that no
expert fills get a row and a zero score like all others. The reference is `sort_by_expert`.
"""

from collections.abc import Callable
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from titan_moe.kernels.device import refuse_cpu
from titan_moe.kernels.permute.permutation import Permutation, Permute, sort_by_expert
from titan_moe.kernels.registry import Kernel, register

BLOCK, CHUNK = 512, 1024
MIN_BINS = 32
"""Triton's histogram needs at least a warp of bins."""
SIZES = ["num_assignments", "num_slots", "num_blocks"]
"""Arguments that change with the batch and must not specialise a kernel."""


@triton.jit
def _load_experts(ids_ptr, assignments, num_assignments, num_experts):
    """The expert of each assignment, `num_experts` for none."""
    ids = tl.load(ids_ptr + assignments, mask=assignments < num_assignments, other=-1)
    return tl.where((ids >= 0) & (ids < num_experts), ids, num_experts).to(tl.int32)


@triton.jit(do_not_specialize=SIZES)
def _count_kernel(
    ids_ptr, cumulative_ptr, num_assignments, num_experts, num_blocks, BLOCK: tl.constexpr, BINS: tl.constexpr
):  # fmt: skip
    block = tl.program_id(0).to(tl.int64)
    experts = _load_experts(ids_ptr, block * BLOCK + tl.arange(0, BLOCK), num_assignments, num_experts)
    expert = tl.arange(0, BINS)
    cumulative = tl.cumsum(tl.histogram(experts, BINS), axis=0)  # assignments of experts up to and including each
    tl.store(cumulative_ptr + expert.to(tl.int64) * num_blocks + block, cumulative, mask=expert <= num_experts)


@triton.jit(do_not_specialize=SIZES)
def _scan_kernel(
    cumulative_ptr, shifts_ptr, offsets_ptr, overflowed_ptr, num_experts, num_blocks, num_slots, CHUNK: tl.constexpr
):  # fmt: skip
    expert = tl.program_id(0)
    cumulative_ptr += expert.to(tl.int64) * num_blocks
    shifts_ptr += expert.to(tl.int64) * num_blocks
    # the assignments of all experts before this one, summed over blocks, give the expert's first slot
    before = tl.zeros((CHUNK,), dtype=tl.int32)
    for first in range(0, num_blocks, CHUNK):
        block = first + tl.arange(0, CHUNK)
        before += tl.load(cumulative_ptr - num_blocks + block, mask=(block < num_blocks) & (expert > 0), other=0)
    slot = tl.sum(before, axis=0)
    is_unassigned = expert == num_experts
    tl.store(overflowed_ptr, (slot > num_slots).to(tl.int32), mask=is_unassigned)
    for first in range(0, num_blocks, CHUNK):
        block = first + tl.arange(0, CHUNK)
        keep = block < num_blocks
        preceding = tl.load(cumulative_ptr - num_blocks + block, mask=keep & (expert > 0), other=0)
        count = tl.load(cumulative_ptr + block, mask=keep, other=0) - preceding
        # slot of an assignment = this shift + its index in its sorted block
        tl.store(shifts_ptr + block, slot + tl.cumsum(count, axis=0) - count - preceding, mask=keep)
        slot += tl.sum(count, axis=0)
    tl.store(offsets_ptr + expert, tl.minimum(slot, num_slots).to(tl.int32), mask=expert < num_experts)


@triton.jit(do_not_specialize=SIZES)
def _place_kernel(
    ids_ptr, scores_ptr, shifts_ptr, rows_ptr, slots_ptr, slot_scores_ptr,
    num_assignments, num_experts, num_slots, num_blocks, K: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    block = tl.program_id(0).to(tl.int64)
    index = tl.arange(0, BLOCK)
    experts = _load_experts(ids_ptr, block * BLOCK + index, num_assignments, num_experts)
    keys = experts * BLOCK + index  # distinct, so the sort is stable
    if tl.min(experts, axis=0) < num_experts:  # else they are sorted, as in all blocks past the last row
        keys = tl.sort(keys)
    expert, assignment = keys // BLOCK, block * BLOCK + keys % BLOCK
    slot = tl.load(shifts_ptr + expert.to(tl.int64) * num_blocks + block) + index
    is_assignment, is_slot = assignment < num_assignments, slot < num_slots
    has_slot = is_slot & (expert < num_experts)
    score = tl.load(scores_ptr + assignment, mask=has_slot, other=0.0)
    tl.store(slots_ptr + assignment, tl.where(has_slot, slot, -1), mask=is_assignment)
    tl.store(rows_ptr + slot, tl.where(is_assignment, assignment // K, 0).to(tl.int32), mask=is_slot)
    tl.store(slot_scores_ptr + slot, score, mask=is_slot)


@triton.jit(do_not_specialize=SIZES)
def _gather_scores_kernel(slot_scores_ptr, slots_ptr, scores_ptr, num_assignments, BLOCK: tl.constexpr):
    assignment = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    slot = tl.load(slots_ptr + assignment, mask=assignment < num_assignments, other=-1)
    score = tl.load(slot_scores_ptr + slot, mask=slot >= 0, other=0.0)
    tl.store(scores_ptr + assignment, score, mask=assignment < num_assignments)


def empty_permutation(ids_SK: Tensor, scores_SK: Tensor, num_experts: int, num_slots: int) -> Permutation:
    """Uninitialised outputs."""
    shapes = (num_slots, ids_SK.shape, num_experts, ())
    rows_R, slots_SK, offsets_e, overflowed = (ids_SK.new_empty(shape, dtype=torch.int32) for shape in shapes)
    return Permutation(rows_R, slots_SK, scores_SK.new_empty(num_slots), offsets_e, overflowed)


def sort_assignments(
    ids_SK: Tensor, scores_SK: Tensor, num_experts: int, num_slots: int, block: int = BLOCK, chunk: int = CHUNK
) -> Permutation:
    """Launch the sort, with `block` assignments a program in the first and third launch; the second sums `chunk` blocks
    at a time."""
    num_assignments = ids_SK.numel()
    num_blocks = triton.cdiv(max(num_assignments, num_slots), block)
    # two allocations: halves of one buffer are not both aligned for every size, and Triton specialises on alignment
    cumulative, shifts = (ids_SK.new_empty(num_experts + 1, num_blocks, dtype=torch.int32) for _ in range(2))
    permutation = empty_permutation(ids_SK, scores_SK, num_experts, num_slots)
    rows_R, slots_SK, scores_R, offsets_e, overflowed = permutation
    if num_blocks:
        bins = max(MIN_BINS, triton.next_power_of_2(num_experts + 1))
        _count_kernel[(num_blocks,)](
            ids_SK, cumulative, num_assignments, num_experts, num_blocks, BLOCK=block, BINS=bins
        )
    _scan_kernel[(num_experts + 1,)](
        cumulative, shifts, offsets_e, overflowed, num_experts, num_blocks, num_slots, CHUNK=chunk
    )
    if num_blocks:
        _place_kernel[(num_blocks,)](
            ids_SK, scores_SK, shifts, rows_R, slots_SK, scores_R,
            num_assignments, num_experts, num_slots, num_blocks, K=max(ids_SK.shape[1], 1), BLOCK=block,
        )  # fmt: skip
    return permutation


def scores_of_slots(scores_R: Tensor, slots_SK: Tensor) -> Tensor:
    """Launch the inverse: the value in each assignment's slot, 0 for an assignment without a slot."""
    scores_SK = scores_R.new_empty(slots_SK.shape)
    if slots_SK.numel():
        num_programs = triton.cdiv(slots_SK.numel(), CHUNK)
        _gather_scores_kernel[(num_programs,)](scores_R, slots_SK, scores_SK, slots_SK.numel(), BLOCK=CHUNK)
    return scores_SK


@torch.library.custom_op("titan_moe::counting_sort", mutates_args=())
def _counting_sort(
    ids_SK: Tensor, scores_SK: Tensor, num_experts: int, num_slots: int
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    refuse_cpu(ids_SK, "permute", "triton")
    return tuple(sort_assignments(ids_SK, scores_SK, num_experts, num_slots))


_counting_sort.register_fake(lambda *args: tuple(empty_permutation(*args)))
_scores_of_slots = torch.library.custom_op("titan_moe::scores_of_slots", scores_of_slots, mutates_args=())
_scores_of_slots.register_fake(lambda scores_R, slots_SK: scores_R.new_empty(slots_SK.shape))


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    rows_R, slots_SK, _, offsets_e, overflowed = output
    ctx.save_for_backward(slots_SK)
    ctx.mark_non_differentiable(rows_R, slots_SK, offsets_e, overflowed)


def _backward(ctx: Any, *grads: Tensor) -> tuple[None, Tensor, None, None]:
    (slots_SK,) = ctx.saved_tensors
    return None, _scores_of_slots(grads[2].contiguous(), slots_SK), None, None


_counting_sort.register_autograd(_backward, setup_context=_save)


def counting_sort(ids_SK: Tensor, scores_SK: Tensor, num_experts: int, num_slots: int) -> Permutation:
    """Permute in Triton, on a GPU (or in the interpreter). Capturable: the host reads nothing.

    Shapes: ids int64 or int32 [S, K], -1 for none; scores [S, K] -> see `Permutation`.
    """
    # the kernels index assignments as contiguous
    return Permutation(*_counting_sort(ids_SK.contiguous(), scores_SK.contiguous(), num_experts, num_slots))


def _scores_first(permute: Permute) -> Callable[..., Permutation]:
    """A permute with its differentiable argument first, as a `Sample` has it."""
    return lambda scores_SK, ids_SK, *sizes: permute(ids_SK, scores_SK, *sizes)


register(Kernel("counting_sort", _scores_first(counting_sort), _scores_first(sort_by_expert), needs_triton=True))
