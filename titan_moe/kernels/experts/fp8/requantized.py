"""Codes of slots, transposed, with a scale for 128 slots of a column: the factors of gradients of weights with blocks.

R expert slots, sorted by expert · M tiles of 128 slots · S rows · W width · n blocks of 128 columns

Gradients of weights sum over slots, and blocks lie along the sum: so slots that have a scale for 128 of their columns
are rounded again (arXiv:2412.19437, section 3.3.2). Scales of both kinds are powers of two, so the second rounding is
exact but for codes that fall below the smallest one: numbers 2 ** 12 below the largest of a column lose digits. Blocks
are the tiles of an expert's slots, as in kernels/formats/grouped.py: none has slots of two experts.

Physics: memory-bound, reads R·W bytes and writes as many; a thread block holds its 128 x 128 numbers. On GPUs a thread
has 4 slots of 16 columns: it reads 16 bytes of a slot and writes 4 of a column (transposing.py). The other kernel is
the definition, which the interpreter runs.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton import knobs
from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from titan_moe.kernels.experts.fp8.packed import BLOCK, CODES, codes_width
from titan_moe.kernels.experts.fp8.rows import power_of_two, scale_at
from titan_moe.kernels.experts.fp8.transposing import NUM_WARPS, transposing
from titan_moe.kernels.experts.tiles import Tiles


@triton.jit
def _requantized_kernel(
    codes_ptr, scales_ptr, rows_ptr, experts_ptr, begins_ptr, ends_ptr, base_ptr, out_ptr, out_scales_ptr, num_columns,
    W: tl.constexpr, ROW: tl.constexpr, BLOCK_R: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    if base_ptr is not None:  # a product with the width keeps its alignment
        codes_ptr += tl.load(base_ptr) * ROW
    tile, block = tl.program_id(0), tl.program_id(1)
    if tl.load(experts_ptr + tile) < 0:
        return
    slots = tl.load(begins_ptr + tile) + tl.arange(0, BLOCK_R)
    is_slot = slots < tl.load(ends_ptr + tile)
    columns = block * COLUMNS + tl.arange(0, COLUMNS)
    row = slots.to(tl.int64)
    if rows_ptr is not None:
        row = tl.load(rows_ptr + slots, mask=is_slot, other=0).to(tl.int64)
    if scales_ptr is None:
        scale_ptrs = scale_at(codes_ptr + row * ROW, W) + block
    else:
        scale_ptrs = scales_ptr + row * (W // COLUMNS) + block
    scale = tl.load(scale_ptrs, mask=is_slot, other=0.0)
    codes = tl.load(codes_ptr + row[:, None] * ROW + columns[None, :], mask=is_slot[:, None], other=0.0)
    x = codes.to(tl.float32) * scale[:, None]
    new_scale = power_of_two(tl.max(tl.abs(x), axis=0))
    new_codes = (x * (1 / new_scale)[None, :]).to(out_ptr.dtype.element_ty)
    tl.store(out_scales_ptr + tile.to(tl.int64) * W + columns, new_scale)
    place = tile * BLOCK_R + tl.arange(0, BLOCK_R)
    tl.store(out_ptr + columns.to(tl.int64)[:, None] * num_columns + place[None, :], tl.trans(new_codes))


LAYOUTS = transposing(columns=16)
"""32 bytes of a column and 64 of a slot lie side by side."""


@gluon.jit
def _requantized_in_registers_kernel(
    codes_ptr, scales_ptr, rows_ptr, experts_ptr, begins_ptr, ends_ptr, base_ptr, out_ptr, out_scales_ptr, num_columns,
    W: gl.constexpr, ROW: gl.constexpr, BLOCK_R: gl.constexpr, COLUMNS: gl.constexpr, READ: gl.constexpr,
    WRITTEN: gl.constexpr,
):  # fmt: skip
    if base_ptr is not None:  # a product with the width keeps its alignment
        codes_ptr += gl.load(base_ptr) * ROW
    tile, block = gl.program_id(0), gl.program_id(1)
    if gl.load(experts_ptr + tile) < 0:
        return
    slots = gl.load(begins_ptr + tile) + gl.arange(0, BLOCK_R, gl.SliceLayout(1, READ))
    is_slot = slots < gl.load(ends_ptr + tile)
    columns = block * COLUMNS + gl.arange(0, COLUMNS, gl.SliceLayout(0, READ))
    row = slots.to(gl.int64)
    if rows_ptr is not None:
        row = gl.load(rows_ptr + slots, mask=is_slot, other=0).to(gl.int64)
    if scales_ptr is None:
        scale_ptrs = scale_at(codes_ptr + row * ROW, W) + block
    else:
        scale_ptrs = scales_ptr + row * (W // COLUMNS) + block
    scale = gl.load(scale_ptrs, mask=is_slot, other=0.0)
    codes_ptrs = codes_ptr + gl.expand_dims(row * ROW, 1) + gl.expand_dims(columns, 0)
    codes = gl.load(codes_ptrs, mask=gl.expand_dims(is_slot, 1), other=0.0)
    x = codes.to(gl.float32) * gl.expand_dims(scale, 1)
    new_scale = power_of_two(gl.max(gl.abs(x), axis=0))
    new_codes = (x * gl.expand_dims(1 / new_scale, 0)).to(out_ptr.dtype.element_ty)
    gl.store(out_scales_ptr + tile.to(gl.int64) * W + columns, new_scale)
    place = tile * BLOCK_R + gl.arange(0, BLOCK_R, gl.SliceLayout(1, WRITTEN))
    columns = block * COLUMNS + gl.arange(0, COLUMNS, gl.SliceLayout(0, WRITTEN))
    out_ptrs = out_ptr + gl.expand_dims(columns.to(gl.int64) * num_columns, 0) + gl.expand_dims(place, 1)
    gl.store(out_ptrs, gl.convert_layout(new_codes, WRITTEN))


def requantized_rows(packed: Tensor, rows_R: Tensor, tiles: Tiles, base: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Packed rows -> codes [W, 128·M] and scales [M, W]: column 128·m + i is the row of the i-th slot of tile m.

    Codes are zero past a tile's last slot. Nothing is written for tiles past the last. With `base`, rows are those of
    several layers.
    """
    return _requantize(packed, codes_width(packed.shape[1], BLOCK), tiles, rows_R=rows_R, base=base)


def requantized_slots(codes_RW: Tensor, scales_Rn: Tensor, tiles: Tiles) -> tuple[Tensor, Tensor]:
    """Codes and scales of slots -> codes [W, 128·M] and scales [M, W], as in `requantized_rows`."""
    return _requantize(codes_RW, codes_RW.shape[1], tiles, scales_Rn=scales_Rn)


def _requantize(
    codes: Tensor,
    width: int,
    tiles: Tiles,
    *,
    scales_Rn: Tensor | None = None,
    rows_R: Tensor | None = None,
    base: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    num_tiles = tiles.experts_M.numel()
    out = codes.new_empty(width, tiles.rows * num_tiles, dtype=CODES)
    out_scales_MW = codes.new_empty(num_tiles, width, dtype=torch.float32)
    kernel, layouts = _requantized_in_registers_kernel, LAYOUTS._asdict()
    if knobs.runtime.interpret:
        kernel, layouts = _requantized_kernel, {}
    kernel[(num_tiles, width // BLOCK)](
        codes, scales_Rn, rows_R, *tiles[:3], base, out, out_scales_MW, out.shape[1],
        W=width, ROW=codes.shape[1], BLOCK_R=tiles.rows, COLUMNS=BLOCK, num_warps=NUM_WARPS, **layouts,
    )  # fmt: skip
    return out, out_scales_MW
