"""Codes of slots, transposed, as the gradients of weights sum over slots.

R expert slots, sorted by expert · M tiles of 128 slots · e experts · S rows · W width

The matrix units read fp8 along the summed dimension alone. That is slots here, so no slot's scale can leave the sum.
Those of a slot and of its row move to one factor: its codes are multiplied by both, and one scale an expert remains,
the largest product of its slots. Scales are powers of two, so only codes that fall below the smallest one are rounded:
slots whose product is 2 ** 12 below the largest one lose digits, at 2 ** 18 all. The other factor's codes are copied
as they are.

Physics: memory-bound, reads R·W bytes and writes as many.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from titan_moe.kernels.experts.fp8.packed import CODES, WHOLE_ROW, codes_width
from titan_moe.kernels.experts.fp8.rows import SMALLEST
from titan_moe.kernels.experts.tiles import Tiles

BLOCK_COLUMNS = 128
"""Of a thread block."""


@triton.jit
def _expert_scales_kernel(factors_ptr, offsets_ptr, scales_ptr, BLOCK: tl.constexpr):
    """An expert's two scales."""
    expert = tl.program_id(0)
    begin = tl.load(offsets_ptr + expert - 1, mask=expert > 0, other=0)
    end = tl.load(offsets_ptr + expert)
    first_most, second_most = tl.zeros((BLOCK,), tl.float32), tl.zeros((BLOCK,), tl.float32)
    for first in range(begin, end, BLOCK):
        slots = first + tl.arange(0, BLOCK)
        keep = slots < end
        first_most = tl.maximum(first_most, tl.load(factors_ptr + slots * 2, mask=keep, other=0.0))
        second_most = tl.maximum(second_most, tl.load(factors_ptr + slots * 2 + 1, mask=keep, other=0.0))
    # products may underflow to zero
    tl.store(scales_ptr + expert * 2, tl.maximum(tl.max(first_most, axis=0), SMALLEST))
    tl.store(scales_ptr + expert * 2 + 1, tl.maximum(tl.max(second_most, axis=0), SMALLEST))


def expert_scales(factors_R2: Tensor, offsets_e: Tensor) -> Tensor:
    """For each expert the largest factors of its slots, powers of two [e, 2]."""
    scales_e2 = factors_R2.new_empty(offsets_e.numel(), 2)
    _expert_scales_kernel[(offsets_e.numel(),)](factors_R2, offsets_e, scales_e2, BLOCK=4096, num_warps=8)
    return scales_e2


@triton.jit
def _transposed_kernel(
    codes_ptr, rows_ptr, factors_ptr, expert_scales_ptr, experts_ptr, begins_ptr, ends_ptr, base_ptr, out_ptr,
    num_columns, W: tl.constexpr, ROW: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_W: tl.constexpr,
):  # fmt: skip
    if base_ptr is not None:  # a product with the width keeps its alignment
        codes_ptr += tl.load(base_ptr) * ROW
    tile = tl.program_id(0)
    expert = tl.load(experts_ptr + tile)
    if expert < 0:
        return
    slots = tl.load(begins_ptr + tile) + tl.arange(0, BLOCK_R)
    is_slot = slots < tl.load(ends_ptr + tile)
    row = slots.to(tl.int64)
    if rows_ptr is not None:
        row = tl.load(rows_ptr + slots, mask=is_slot, other=0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK_W + tl.arange(0, BLOCK_W)
    is_column = columns < W
    keep = is_slot[:, None] & is_column[None, :]
    codes_ptrs = codes_ptr + row[:, None] * ROW + columns[None, :]
    if factors_ptr is None:
        codes = tl.load(codes_ptrs, mask=keep, other=0)
    else:
        # a quotient of powers of two: exact
        factor = tl.load(factors_ptr + slots * 2, mask=is_slot, other=0.0) / tl.load(expert_scales_ptr + expert * 2)
        codes = tl.load(codes_ptrs, mask=keep, other=0.0).to(tl.float32) * factor[:, None]
    place = tile * BLOCK_R + tl.arange(0, BLOCK_R)
    out_ptrs = out_ptr + columns.to(tl.int64)[:, None] * num_columns + place[None, :]
    tl.store(out_ptrs, tl.trans(codes.to(out_ptr.dtype.element_ty)), mask=is_column[:, None])


def transposed_rows(packed: Tensor, rows_R: Tensor, tiles: Tiles, base: Tensor | None = None) -> Tensor:
    """Packed rows [S, W + 16] -> codes [W, 128·M]: column 128·m + i is the row of the i-th slot of tile m.

    It is zero past the tile's last slot, and is not written in tiles past the last. With `base`, rows are those of
    several layers.
    """
    packed = packed.view(torch.uint8)
    width = codes_width(packed.shape[1], WHOLE_ROW)
    return _transpose(packed, width, tiles, rows_R, base=base).view(CODES)


def transposed_slots(codes_RW: Tensor, factors_R2: Tensor, scales_e2: Tensor, index: int, tiles: Tiles) -> Tensor:
    """Codes of slots, each times its factor over its expert's scale: [R, W] -> [W, 128·M], as in `transposed_rows`.

    `index` is the column of factors and scales.
    """
    return _transpose(codes_RW, codes_RW.shape[1], tiles, factors=(factors_R2[:, index:], scales_e2[:, index:]))


def _transpose(
    codes: Tensor,
    width: int,
    tiles: Tiles,
    rows_R: Tensor | None = None,
    factors: tuple[Tensor | None, Tensor | None] = (None, None),
    base: Tensor | None = None,
) -> Tensor:
    num_columns = tiles.rows * tiles.experts_M.numel()
    out = codes.new_empty(width, num_columns)
    _transposed_kernel[(tiles.experts_M.numel(), triton.cdiv(width, BLOCK_COLUMNS))](
        codes, rows_R, *factors, *tiles[:3], base, out, num_columns,
        W=width, ROW=codes.shape[1], BLOCK_R=tiles.rows, BLOCK_W=BLOCK_COLUMNS, num_warps=4,
    )  # fmt: skip
    return out
