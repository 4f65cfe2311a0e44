"""Gradients of the experts' biases, and what the down bias adds to those of scores.

S rows · R expert slots, sorted by expert · e experts that the rank computes · W width of a row · D model width

Physics: memory-bound. A bias's gradient is a sum over its expert's slots: it reads R·W elements, once, and writes e·W.
A thread block sums some columns of an expert in a fixed order, so results are deterministic; gathered rows are read by
index. A score weighs the down bias too, so its gradient has ⟨dy, bias⟩ beside what swiglu_backward.py finds, and R·D
elements are read. The biases themselves are added in epilogues (up.py, slot_mm.py).
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from titan_moe.kernels.experts.tiles import Tiles


def expert_sums_reference(
    x_SW: Tensor, offsets_e: Tensor, rows_R: Tensor | None = None, scores_R: Tensor | None = None
) -> Tensor:
    """The definition of `expert_sums`, expert by expert on the host."""
    x_RW = x_SW if rows_R is None else x_SW[rows_R]
    if scores_R is not None:
        x_RW = x_RW * scores_R[:, None]
    ends = offsets_e.tolist()
    return torch.stack([x_RW[a:b].sum(0) for a, b in zip([0, *ends[:-1]], ends, strict=True)])


def add_bias_scores_reference(
    dscores_R: Tensor, dy_SD: Tensor, rows_R: Tensor, bias_eD: Tensor, offsets_e: Tensor
) -> Tensor:
    """The definition of `add_bias_scores`, as a new tensor."""
    total_R, begin = dscores_R.clone(), 0
    for bias_D, end in zip(bias_eD, offsets_e.tolist(), strict=True):
        total_R[begin:end] += (dy_SD[rows_R[begin:end]].to(total_R.dtype) * bias_D).sum(1)
        begin = end
    return total_R


@triton.jit
def _expert_sums_kernel(
    x_ptr, rows_ptr, scores_ptr, offsets_ptr, out_ptr, base_ptr,
    W: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_W: tl.constexpr,
):  # fmt: skip
    if base_ptr is not None:  # a product with the width keeps its alignment
        x_ptr += tl.load(base_ptr) * W
    expert = tl.program_id(1)
    columns = tl.program_id(0) * BLOCK_W + tl.arange(0, BLOCK_W)
    begin = tl.load(offsets_ptr + expert - 1, mask=expert > 0, other=0)
    end = tl.load(offsets_ptr + expert)
    total = tl.zeros((BLOCK_R, BLOCK_W), dtype=tl.float32)
    for first in tl.range(begin, end, BLOCK_R, num_stages=4):  # loads of several iterations are in flight
        slots = first + tl.arange(0, BLOCK_R)
        is_slot = slots < end
        rows = slots if rows_ptr is None else tl.load(rows_ptr + slots, mask=is_slot, other=0)
        x_ptrs = x_ptr + rows.to(tl.int64)[:, None] * W + columns[None, :]
        x = tl.load(x_ptrs, mask=is_slot[:, None] & (columns < W)[None, :], other=0.0).to(tl.float32)
        if scores_ptr is not None:
            x *= tl.load(scores_ptr + slots, mask=is_slot, other=0.0)[:, None]
        total += x
    sums = tl.sum(total, axis=0).to(out_ptr.dtype.element_ty)
    tl.store(out_ptr + expert.to(tl.int64) * W + columns, sums, mask=columns < W)


def expert_sums(
    x_SW: Tensor,
    offsets_e: Tensor,
    rows_R: Tensor | None = None,
    scores_R: Tensor | None = None,
    base: Tensor | None = None,
) -> Tensor:
    """Sum x over each expert's slots, in fp32: -> [e, W] in x's dtype. Slots past the last expert are not read.

    Args:
        rows_R: the row of each slot; None if x is that of slots.
        scores_R: fp32, factors of the slots.
        base: int64 [2] on the device. x_SW is that of several layers; this layer's begins at row base[0].
    """
    num_experts, width = offsets_e.numel(), x_SW.shape[1]
    out_eW, block_w = x_SW.new_empty(num_experts, width), min(triton.next_power_of_2(width), 64)
    _expert_sums_kernel[(triton.cdiv(width, block_w), num_experts)](
        x_SW, rows_R, scores_R, offsets_e, out_eW, base, W=width, BLOCK_R=64, BLOCK_W=block_w, num_warps=4
    )
    return out_eW


@triton.jit
def _add_bias_scores_kernel(
    dy_ptr, rows_ptr, bias_ptr, dscores_ptr, experts_ptr, begins_ptr, ends_ptr, num_tiles_ptr, base_ptr,
    D: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    if base_ptr is not None:
        dy_ptr += tl.load(base_ptr) * D
    for tile in tl.range(tl.program_id(0), tl.load(num_tiles_ptr), tl.num_programs(0), num_stages=1):
        slots = tl.load(begins_ptr + tile) + tl.program_id(1) * BLOCK_R + tl.arange(0, BLOCK_R)
        is_slot = slots < tl.load(ends_ptr + tile)
        rows = tl.load(rows_ptr + slots, mask=is_slot, other=0).to(tl.int64)
        bias_D_ptr = bias_ptr + tl.load(experts_ptr + tile).to(tl.int64) * D
        total = tl.zeros((BLOCK_R, BLOCK_D), dtype=tl.float32)
        for first in tl.range(0, D, BLOCK_D, num_stages=4):
            columns = first + tl.arange(0, BLOCK_D)
            keep = is_slot[:, None] & (columns < D)[None, :]
            dy = tl.load(dy_ptr + rows[:, None] * D + columns[None, :], mask=keep, other=0.0).to(tl.float32)
            total += dy * tl.load(bias_D_ptr + columns, mask=columns < D, other=0.0).to(tl.float32)[None, :]
        dscore = tl.load(dscores_ptr + slots, mask=is_slot, other=0.0) + tl.sum(total, axis=1)
        tl.store(dscores_ptr + slots, dscore, mask=is_slot)


def add_bias_scores(
    dscores_R: Tensor, dy_SD: Tensor, rows_R: Tensor, bias_eD: Tensor, tiles: Tiles, base: Tensor | None = None
) -> None:
    """Add to each slot's the product of its row's gradient with its expert's bias, in place.

    With `base`, int64 [2] on the device, dy_SD is that of several layers; this layer's begins at row base[0].
    """
    width, block_r = dy_SD.shape[1], 32
    if rows_R.numel():
        _add_bias_scores_kernel[(tiles.usual, tiles.rows // block_r)](
            dy_SD, rows_R, bias_eD, dscores_R, *tiles[:3], tiles.count, base,
            D=width, BLOCK_R=block_r, BLOCK_D=min(triton.next_power_of_2(width), 128), num_warps=4,
        )  # fmt: skip
