"""Sum each row's slots, or copy each slot's row, from memory to memory.

S rows · R expert slots · K choices a row · D width

Physics: memory-bound, reads at most S·K·D elements and writes S·D; a choice without a slot reads nothing.
"""

import triton
import triton.language as tl
from torch import Tensor


@triton.jit
def _slot_sum_kernel(y_ptr, slots_ptr, out_ptr, D, K: tl.constexpr, BLOCK_D: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK_D + tl.arange(0, BLOCK_D)
    total = tl.zeros((BLOCK_D,), dtype=tl.float32)
    for k in tl.static_range(K):
        slot = tl.load(slots_ptr + row * K + k).to(tl.int64)
        total += tl.load(y_ptr + slot * D + columns, mask=(columns < D) & (slot >= 0), other=0.0).to(tl.float32)
    tl.store(out_ptr + row * D + columns, total.to(out_ptr.dtype.element_ty), mask=columns < D)


def slot_sum(y_RD: Tensor, slots_SK: Tensor) -> Tensor:
    """[R, D] -> [S, D], summed in fp32; a row without a slot is zero."""
    num_rows, num_choices = slots_SK.shape
    width = y_RD.shape[1]
    out_SD = y_RD.new_empty(num_rows, width)
    block_d = min(triton.next_power_of_2(width), 1024)
    if num_rows:
        _slot_sum_kernel[(num_rows, triton.cdiv(width, block_d))](
            y_RD, slots_SK, out_SD, width, K=num_choices, BLOCK_D=block_d, num_warps=4
        )
    return out_SD


@triton.jit
def _slot_rows_kernel(x_ptr, rows_ptr, offsets_ptr, out_ptr, base_ptr, num_experts, D, BLOCK_D: tl.constexpr):
    if base_ptr is not None:  # a product with the width keeps its alignment
        x_ptr += tl.load(base_ptr) * D
    slot = tl.program_id(0).to(tl.int64)
    if slot >= tl.load(offsets_ptr + num_experts - 1):
        return
    columns = tl.program_id(1) * BLOCK_D + tl.arange(0, BLOCK_D)
    row = tl.load(rows_ptr + slot).to(tl.int64)
    x = tl.load(x_ptr + row * D + columns, mask=columns < D, other=0.0)
    tl.store(out_ptr + slot * D + columns, x, mask=columns < D)


def slot_rows(x_SD: Tensor, rows_R: Tensor, offsets_e: Tensor, base: Tensor | None = None) -> Tensor:
    """[S, D] -> [R, D], each slot's row; slots past the last expert are not written.

    With `base`, int64 [2] on the device, x_SD is that of several layers; this layer's begins at row base[0].
    """
    num_slots, width = rows_R.numel(), x_SD.shape[1]
    out_RD = x_SD.new_empty(num_slots, width)
    block_d = min(triton.next_power_of_2(width), 1024)
    if num_slots:
        _slot_rows_kernel[(num_slots, triton.cdiv(width, block_d))](
            x_SD, rows_R, offsets_e, out_RD, base, offsets_e.numel(), width, BLOCK_D=block_d, num_warps=4
        )
    return out_RD
