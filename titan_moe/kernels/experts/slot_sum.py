"""Sum each row's slots, or copy each slot's row, from memory to memory.

S rows · R expert slots · K choices a row · D width

Physics: memory-bound, reads at most S·K·D elements and writes S·D; a choice without a slot reads nothing.
Thread blocks take rows or slots in turn up to the last one, so that room for more is free.
"""

import triton
import triton.language as tl
from torch import Tensor

from titan_moe.kernels.experts.tiles import MAX_PROGRAMS

COPIED_ROWS = 4
"""Rows that a thread block of `slot_rows` has in flight."""


@triton.jit(do_not_specialize=["num_rows"])
def _slot_sum_kernel(y_ptr, slots_ptr, out_ptr, count_ptr, num_rows, D, K: tl.constexpr, BLOCK_D: tl.constexpr):
    if count_ptr is not None:
        num_rows = tl.minimum(num_rows, tl.load(count_ptr))
    columns = tl.program_id(1) * BLOCK_D + tl.arange(0, BLOCK_D)
    for index in range(tl.program_id(0), num_rows, tl.num_programs(0)):
        row = tl.cast(index, tl.int64)
        total = tl.zeros((BLOCK_D,), dtype=tl.float32)
        for k in tl.static_range(K):
            slot = tl.load(slots_ptr + row * K + k).to(tl.int64)
            y = tl.load(y_ptr + slot * D + columns, mask=(columns < D) & (slot >= 0), other=0.0)
            total += y.to(tl.float32)
        tl.store(out_ptr + row * D + columns, total.to(out_ptr.dtype.element_ty), mask=columns < D)


def slot_sum(y_RD: Tensor, slots_SK: Tensor, count: Tensor | None = None) -> Tensor:
    """[R, D] -> [S, D], summed in fp32; a row without a slot is zero.

    `count`, one int32 on the device, is the number of rows if it is less than S; rows past it are not written.
    """
    num_rows, num_choices = slots_SK.shape
    width = y_RD.shape[1]
    out_SD = y_RD.new_empty(num_rows, width)
    if num_rows:
        block_d, num_columns = _cut(width)
        _slot_sum_kernel[(min(num_rows, MAX_PROGRAMS // num_columns), num_columns)](
            y_RD, slots_SK, out_SD, count, num_rows, width, K=num_choices, BLOCK_D=block_d, num_warps=4
        )
    return out_SD


def _cut(width: int) -> tuple[int, int]:
    """Columns that a thread block computes, and thread blocks for all columns."""
    block_d = min(triton.next_power_of_2(width), 1024)
    return block_d, triton.cdiv(width, block_d)


@triton.jit(do_not_specialize=["num_slots"])
def _slot_rows_kernel(
    x_ptr, rows_ptr, offsets_ptr, out_ptr, base_ptr, num_slots, num_experts, D,
    ROWS: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    if base_ptr is not None:  # a product with the width keeps its alignment
        x_ptr += tl.load(base_ptr) * D
    end = tl.minimum(num_slots, tl.load(offsets_ptr + num_experts - 1))
    columns = (tl.program_id(1) * BLOCK_D + tl.arange(0, BLOCK_D))[None, :]
    for first in range(tl.program_id(0) * ROWS, end, tl.num_programs(0) * ROWS):
        slot = first + tl.arange(0, ROWS)
        row = tl.load(rows_ptr + slot, mask=slot < end, other=0)
        keep = (slot < end)[:, None] & (columns < D)
        x = tl.load(x_ptr + row.to(tl.int64)[:, None] * D + columns, mask=keep, other=0.0)
        tl.store(out_ptr + slot.to(tl.int64)[:, None] * D + columns, x, mask=keep)


def slot_rows(x_SD: Tensor, rows_R: Tensor, offsets_e: Tensor, base: Tensor | None = None) -> Tensor:
    """[S, D] -> [R, D], each slot's row; slots past the last expert are not written.

    With `base`, int64 [2] on the device, x_SD is that of several layers; this layer's begins at row base[0].
    """
    num_slots, width = rows_R.numel(), x_SD.shape[1]
    out_RD = x_SD.new_empty(num_slots, width)
    if num_slots:
        block_d, num_columns = _cut(width)
        grid = (min(triton.cdiv(num_slots, COPIED_ROWS), MAX_PROGRAMS // num_columns), num_columns)
        _slot_rows_kernel[grid](
            x_SD, rows_R, offsets_e, out_RD, base, num_slots, offsets_e.numel(), width,
            ROWS=COPIED_ROWS, BLOCK_D=block_d, num_warps=4,
        )  # fmt: skip
    return out_RD
