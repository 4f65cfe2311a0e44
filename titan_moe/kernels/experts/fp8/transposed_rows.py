"""Codes of each slot's row, transposed, as the gradients of weights sum over slots.

M tiles of 128 slots · D width of a row

Physics: memory-bound, reads R·D bytes and writes as many; the codes are copied as they are.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from titan_moe.kernels.experts.fp8.rows import TAIL_BYTES
from titan_moe.kernels.experts.tiles import Tiles


@triton.jit
def _transposed_rows_kernel(
    x_ptr, rows_ptr, experts_ptr, begins_ptr, ends_ptr, base_ptr, out_ptr, num_columns,
    D: tl.constexpr, ROW: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    if base_ptr is not None:  # a product with the width keeps its alignment
        x_ptr += tl.load(base_ptr) * ROW
    tile = tl.program_id(0)
    if tl.load(experts_ptr + tile) < 0:
        return
    slots = tl.load(begins_ptr + tile) + tl.arange(0, BLOCK_R)
    is_slot = slots < tl.load(ends_ptr + tile)
    row = tl.load(rows_ptr + slots, mask=is_slot, other=0).to(tl.int64)
    place = tile * BLOCK_R + tl.arange(0, BLOCK_R)
    columns = tl.program_id(1) * BLOCK_D + tl.arange(0, BLOCK_D)
    is_column = columns < D
    x = tl.load(x_ptr + row[:, None] * ROW + columns[None, :], mask=is_slot[:, None] & is_column[None, :], other=0)
    out_ptrs = out_ptr + columns.to(tl.int64)[:, None] * num_columns + place[None, :]
    tl.store(out_ptrs, tl.trans(x), mask=is_column[:, None])


def transposed_rows(packed: Tensor, rows_R: Tensor, tiles: Tiles, base: Tensor | None = None) -> Tensor:
    """Packed rows -> codes [D, 128·M]: column 128·m + i is the row of the i-th slot of tile m.

    It is zero past the tile's last slot, and is not written in tiles past the last. With `base`, rows are those of
    several layers.
    """
    width, num_columns = packed.shape[1] - TAIL_BYTES, tiles.rows * tiles.experts_M.numel()
    out = packed.new_empty(width, num_columns)
    block_d = 128
    _transposed_rows_kernel[(tiles.experts_M.numel(), triton.cdiv(width, block_d))](
        packed.view(torch.uint8), rows_R, *tiles[:3], base, out.view(torch.uint8), num_columns,
        D=width, ROW=packed.shape[1], BLOCK_R=tiles.rows, BLOCK_D=block_d, num_warps=4,
    )  # fmt: skip
    return out
