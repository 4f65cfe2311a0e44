"""Products of slots with low-rank factors, and the gradients of factors.

S rows · R expert slots, sorted by expert · e local experts · P parts of a row, each with a factor of its own · I width
of a part · r rank, or that of several matrices side by side · O output width

Physics: 2·R·I·r FLOPs for 2·R·I bytes in bf16, so ranks up to 200 are bound by memory. `low_products` and
`low_weight_grads` read rows once, through `rows_R` if they are those of tokens, so no permuted copy of them exists;
what they write is e·I·r or R·r. The way back to the width O is no launch of its own: `add_low` and `add_low_pair` add
it to the sums of a GEMM of weights, 1/64 more FLOPs for ranks of 16 of gate and up beside a width of 2,048, where it
would be a pass of 6·R·O bytes. The sum over an expert's slots runs in order, so gradients are deterministic.
"""

from typing import NamedTuple

import triton
import triton.language as tl
from torch import Tensor

from titan_moe.kernels.experts.tiles import Tiles

MAX_BLOCK = 64
"""Columns of a factor that are multiplied at a time."""


class LowTiles(NamedTuple):
    """How the kernels cut the width of rows, and slots of a gradient; `tools/time_adapters.py` times others."""

    width: int
    slots: int = 64
    """Of an iteration; products have tiles of their own."""
    num_warps: int = 4
    num_stages: int = 3


PRODUCT_CUT, GRADIENT_CUT = LowTiles(128), LowTiles(256)


def low_block(rank: int) -> int:
    """Columns of a factor that are multiplied at a time: matrix units take no fewer than 16."""
    return min(max(triton.next_power_of_2(rank), 16), MAX_BLOCK)


@triton.jit
def add_low(
    total, low_ptr, factor_ptr, expert, slots, is_slot, outputs,
    O: tl.constexpr, RANK: tl.constexpr, IS_TRANSPOSED: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Add low products [R, r] times an expert's factor, [e, r, O], or [e, O, r] if it is transposed."""
    factor_ptr += expert.to(tl.int64) * (RANK * O)
    for first in tl.range(0, RANK, BLOCK, num_stages=1):
        inner = first + tl.arange(0, BLOCK)
        low_ptrs = low_ptr + slots.to(tl.int64)[:, None] * RANK + inner[None, :]
        low = tl.load(low_ptrs, mask=is_slot[:, None] & (inner < RANK)[None, :], other=0.0)
        if IS_TRANSPOSED:
            keep = (outputs < O)[:, None] & (inner < RANK)[None, :]
            factor = tl.load(factor_ptr + outputs[:, None] * RANK + inner[None, :], mask=keep, other=0.0).T
        else:
            keep = (inner < RANK)[:, None] & (outputs < O)[None, :]
            factor = tl.load(factor_ptr + inner[:, None] * O + outputs[None, :], mask=keep, other=0.0)
        total = tl.dot(low, factor, total, input_precision="ieee")
    return total


@triton.jit
def add_low_pair(
    total, low_ptr, factor_ptr, expert, slots, is_slot, first_feature,
    F: tl.constexpr, RANK: tl.constexpr, BLOCK_F: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Add low products of gate and up, [R, 2·r], times their factors [e, 2, F, r]: to sums of gate in the first BLOCK_F
    columns and of up in the others. A product with the other's low product is one with zero."""
    column = tl.arange(0, 2 * BLOCK_F)
    half, feature = column // BLOCK_F, first_feature + column % BLOCK_F
    factor_ptr += expert.to(tl.int64) * (2 * F * RANK)
    factor_ptrs = factor_ptr + (half * F + feature) * RANK - half * RANK
    for first in tl.range(0, 2 * RANK, BLOCK, num_stages=1):
        inner = first + tl.arange(0, BLOCK)
        low_ptrs = low_ptr + slots.to(tl.int64)[:, None] * (2 * RANK) + inner[None, :]
        low = tl.load(low_ptrs, mask=is_slot[:, None] & (inner < 2 * RANK)[None, :], other=0.0)
        keep = (feature < F)[:, None] & (half[:, None] == (inner // RANK)[None, :])
        factor = tl.load(factor_ptrs[:, None] + inner[None, :], mask=keep, other=0.0)
        total = tl.dot(low, factor.T, total, input_precision="ieee")
    return total


@triton.jit
def _low_products_kernel(
    x_ptr, rows_ptr, factor_ptr, out_ptr, experts_ptr, begins_ptr, ends_ptr, scale,
    I: tl.constexpr, RANK: tl.constexpr, PARTS: tl.constexpr, IS_TRANSPOSED: tl.constexpr,
    BLOCK_R: tl.constexpr, BLOCK_I: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    tile, part = tl.program_id(0) // PARTS, tl.program_id(0) % PARTS
    expert = tl.load(experts_ptr + tile)
    if expert < 0:
        return
    slots = tl.load(begins_ptr + tile) + tl.arange(0, BLOCK_R)
    is_slot = slots < tl.load(ends_ptr + tile)
    rows = slots
    if rows_ptr is not None:
        rows = tl.load(rows_ptr + slots, mask=is_slot, other=0)
    inner = tl.arange(0, BLOCK_I)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    row_ptrs = x_ptr + rows.to(tl.int64) * (PARTS * I) + part * I
    factor_ptr += (expert.to(tl.int64) * PARTS + part) * (I * RANK)
    total = tl.zeros((BLOCK_R, BLOCK), dtype=tl.float32)
    for k in range(0, I, BLOCK_I):
        is_inner = inner < I - k
        x = tl.load(row_ptrs[:, None] + (k + inner)[None, :], mask=is_slot[:, None] & is_inner[None, :], other=0.0)
        if IS_TRANSPOSED:
            keep = (columns < RANK)[:, None] & is_inner[None, :]
            factor = tl.load(factor_ptr + columns[:, None] * I + (k + inner)[None, :], mask=keep, other=0.0).T
        else:
            keep = is_inner[:, None] & (columns < RANK)[None, :]
            factor = tl.load(factor_ptr + (k + inner)[:, None] * RANK + columns[None, :], mask=keep, other=0.0)
        total = tl.dot(x, factor, total, input_precision="ieee")
    out_ptrs = out_ptr + slots.to(tl.int64)[:, None] * (PARTS * RANK) + (part * RANK + columns)[None, :]
    keep = is_slot[:, None] & (columns < RANK)[None, :]
    tl.store(out_ptrs, (total * scale).to(out_ptr.dtype.element_ty), mask=keep)


def low_products(
    x: Tensor,
    factor: Tensor,
    tiles: Tiles,
    scale: float,
    *,
    rows_R: Tensor | None = None,
    cut: LowTiles = PRODUCT_CUT,
) -> Tensor:
    """Each slot's row, or x's own, times its expert's factor and the scale: -> [R, P·r].

    Slots past the last expert are not written.

    Args:
        x: [S, P·I] with `rows_R`, else [R, P·I].
        factor: [e, P, I, r], contiguous, or the transpose of what is.
    """
    num_slots, (_, parts, width, rank) = len(x) if rows_R is None else rows_R.numel(), factor.shape
    out = x.new_empty(num_slots, parts * rank)
    if num_slots:
        block = low_block(rank)
        _low_products_kernel[(tiles.experts_M.numel() * parts, triton.cdiv(rank, block))](
            x, rows_R, factor, out, *tiles[:3], scale,
            I=width, RANK=rank, PARTS=parts, IS_TRANSPOSED=not factor.is_contiguous(),
            BLOCK_R=tiles.rows, BLOCK_I=cut.width, BLOCK=block, num_warps=cut.num_warps, num_stages=cut.num_stages,
        )  # fmt: skip
    return out


@triton.jit
def _low_weight_grads_kernel(
    low_ptr, x_ptr, rows_ptr, offsets_ptr, out_ptr,
    I: tl.constexpr, RANK: tl.constexpr, PARTS: tl.constexpr, IS_TRANSPOSED: tl.constexpr,
    BLOCK_R: tl.constexpr, BLOCK_I: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    tiles_i: tl.constexpr = (I + BLOCK_I - 1) // BLOCK_I
    expert, program = tl.program_id(0) // (PARTS * tiles_i), tl.program_id(0) % (PARTS * tiles_i)
    part = program // tiles_i
    wide = program % tiles_i * BLOCK_I + tl.arange(0, BLOCK_I)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    begin = tl.load(offsets_ptr + expert - 1, mask=expert > 0, other=0)
    end = tl.load(offsets_ptr + expert)
    lane = tl.arange(0, BLOCK_R)
    total = tl.zeros((BLOCK_I, BLOCK), dtype=tl.float32)
    rows = begin + lane
    if rows_ptr is not None:
        rows = tl.load(rows_ptr + begin + lane, mask=begin + lane < end, other=0)
    for first in range(begin, end, BLOCK_R):
        slots = first + lane
        is_slot = slots < end
        x_ptrs = x_ptr + rows.to(tl.int64)[:, None] * (PARTS * I) + (part * I + wide)[None, :]
        x = tl.load(x_ptrs, mask=is_slot[:, None] & (wide < I)[None, :], other=0.0)
        low_ptrs = low_ptr + slots.to(tl.int64)[:, None] * (PARTS * RANK) + (part * RANK + columns)[None, :]
        low = tl.load(low_ptrs, mask=is_slot[:, None] & (columns < RANK)[None, :], other=0.0)
        total = tl.dot(tl.trans(x), low, total, input_precision="ieee")
        rows = slots + BLOCK_R
        if rows_ptr is not None:  # an iteration ahead, in registers
            rows = tl.load(rows_ptr + slots + BLOCK_R, mask=slots + BLOCK_R < end, other=0)
    out = total.to(out_ptr.dtype.element_ty)
    out_ptr += (expert.to(tl.int64) * PARTS + part) * (I * RANK)
    if IS_TRANSPOSED:
        keep = (columns < RANK)[:, None] & (wide < I)[None, :]
        tl.store(out_ptr + columns[:, None] * I + wide[None, :], tl.trans(out), mask=keep)
    else:
        keep = (wide < I)[:, None] & (columns < RANK)[None, :]
        tl.store(out_ptr + wide[:, None] * RANK + columns[None, :], out, mask=keep)


def low_weight_grads(
    low_RX: Tensor,
    x: Tensor,
    like: Tensor,
    offsets_e: Tensor,
    *,
    rows_R: Tensor | None = None,
    cut: LowTiles = GRADIENT_CUT,
) -> Tensor:
    """Sum low products, or their gradients, times rows over each expert's slots: the gradient of a factor.

    Args:
        low_RX: [R, P·r].
        x: [S, P·I] with `rows_R`, else [R, P·I].
        like: the factor, [e, P, I, r], contiguous, or the transpose of what is, as the result is.
    """
    (num_experts, parts, width, rank), is_transposed = like.shape, not like.is_contiguous()
    out = low_RX.new_empty(like.mT.shape if is_transposed else like.shape)
    if len(low_RX):
        block, wide = low_block(rank), min(max(triton.next_power_of_2(width), 16), cut.width)
        grid = num_experts * parts * triton.cdiv(width, wide), triton.cdiv(rank, block)
        _low_weight_grads_kernel[grid](
            low_RX, x, rows_R, offsets_e, out,
            I=width, RANK=rank, PARTS=parts, IS_TRANSPOSED=is_transposed,
            BLOCK_R=cut.slots, BLOCK_I=wide, BLOCK=block, num_warps=cut.num_warps, num_stages=cut.num_stages,
        )  # fmt: skip
    else:
        out.zero_()
    return out.mT if is_transposed else out
