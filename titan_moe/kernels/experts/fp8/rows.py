"""Rows in fp8, packed with their scales (packed.py): code · scale is the number.

S rows · D width of a row · W bytes of a packed row · n scales of a row

Scales are powers of two: the quotient is exact, so that only the code is rounded, and a scale may move to another
factor of a product without a second rounding. There it must not outweigh those of other rows, so a row of zeros has the
smallest scale; a block of zeros has 1, because blocks are rounded again instead (requantized.py). A row that is not
finite stays so: an infinity, which would saturate, makes its row or block NaN.

Physics: memory-bound, reads 2·S·D bytes and writes S·D.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton import knobs

from titan_moe.config.formats import Format
from titan_moe.kernels.experts.fp8.packed import CODES, WHOLE_ROW, codes_width, num_scales, packed_width
from titan_moe.kernels.experts.tiles import MAX_PROGRAMS
from titan_moe.kernels.formats.casts import quantize

RESULTS = torch.float32 if knobs.runtime.interpret else torch.bfloat16
"""The dtype of results of GEMMs."""
SMALLEST_SCALE = torch.finfo(torch.float32).tiny
"""Of a row of zeros."""
SMALLEST = tl.constexpr(SMALLEST_SCALE)


def quantize_rows_reference(x_SD: Tensor, columns: int = WHOLE_ROW) -> Tensor:
    """The definition: [S, D] -> [S, W]."""
    format: Format = "fp8_blockwise" if columns else "fp8_rowwise"
    codes_SD, scales_Sn, _ = quantize(x_SD, format, "activation", dim=1, power_of_two_scales=True)
    if not columns:
        scales_Sn = scales_Sn.masked_fill(~x_SD.bool().any(dim=1, keepdim=True), SMALLEST_SCALE)
    num_rows, width = x_SD.shape
    tail = torch.zeros(num_rows, (packed_width(width, columns) - width) // 4, dtype=torch.float32, device=x_SD.device)
    tail[:, : scales_Sn.shape[1]] = scales_Sn
    return torch.cat([codes_SD.view(torch.uint8), tail.view(torch.uint8)], dim=1).view(CODES)


def unpack(packed: Tensor, columns: int = WHOLE_ROW) -> tuple[Tensor, Tensor]:
    """Codes [S, D] and scales of packed rows, [S, n] with blocks, else [S]."""
    width = codes_width(packed.shape[1], columns)
    codes, tail = packed[:, :width], packed[:, width:].view(torch.uint8).contiguous().view(torch.float32)
    return codes, tail[:, : num_scales(width, columns)] if columns else tail[:, 0]


def dequantize_rows(packed: Tensor, columns: int = WHOLE_ROW) -> Tensor:
    """Packed rows -> [S, D] in fp32."""
    codes_SD, scales = unpack(packed, columns)
    spread = scales.repeat_interleave(columns, dim=1) if columns else scales[:, None]
    return codes_SD.float() * spread


@triton.jit(do_not_specialize=["num_rows", "num_packed"])
def _unpack_rows_kernel(
    packed_ptr, out_ptr, count_ptr, base_ptr, num_rows, num_packed,
    D: tl.constexpr, ROW: tl.constexpr, BLOCK_D: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    if base_ptr is not None:
        base = tl.load(base_ptr)
        packed_ptr += base * ROW
        num_rows = tl.minimum(num_rows, (num_packed - base).to(tl.int32))
    if count_ptr is not None:
        num_rows = tl.minimum(num_rows, tl.load(count_ptr))
    columns = tl.arange(0, BLOCK_D)
    for index in range(tl.program_id(0), num_rows, tl.num_programs(0)):
        row = tl.cast(index, tl.int64)
        codes = tl.load(packed_ptr + row * ROW + columns, mask=columns < D, other=0.0).to(tl.float32)
        scale_ptr = scale_at(packed_ptr + row * ROW, D)
        if COLUMNS:
            x = codes * tl.load(scale_ptr + columns // COLUMNS, mask=columns < D, other=0.0)
        else:
            x = codes * tl.load(scale_ptr)
        tl.store(out_ptr + row * D + columns, x.to(out_ptr.dtype.element_ty), mask=columns < D)


def unpack_rows(
    packed: Tensor,
    dtype: torch.dtype,
    count: Tensor | None = None,
    *,
    columns: int = WHOLE_ROW,
    base: Tensor | None = None,
    num_rows: int | None = None,
) -> Tensor:
    """Packed rows -> [S, D] in `dtype`, exact in bf16.

    Args:
        count: one int32 on the device, the number of rows if it is less than S; rows past it are not written.
        base: one int64 on the device. `packed` is that of several layers; this layer's begins at this row, and has
            `num_rows`, or as many as are left.
    """
    num_rows = len(packed) if num_rows is None else num_rows
    width = codes_width(packed.shape[1], columns)
    out_SD = torch.empty(num_rows, width, dtype=dtype, device=packed.device)
    if num_rows:
        _unpack_rows_kernel[(min(num_rows, MAX_PROGRAMS),)](
            packed, out_SD, count, base, num_rows, len(packed),
            D=width, ROW=packed.shape[1], BLOCK_D=triton.next_power_of_2(width), COLUMNS=columns,
            num_warps=8 if width > 2048 else 4,
        )  # fmt: skip
    return out_SD


@triton.jit
def power_of_two(amax):
    """The smallest power of two that brings `amax`, fp32, to at most 448; 1 for 0, NaN for an infinity."""
    # amax / 448 rounded up to a power of two, by its bits: 448 = 1.75 * 2 ** 8
    bits = amax.to(tl.int32, bitcast=True)
    exponent = (bits >> 23) - 127 - 8 + ((bits & 0x7FFFFF) > 0x600000).to(tl.int32)
    scale = ((tl.maximum(exponent, -126) + 127) << 23).to(tl.float32, bitcast=True)
    scale = tl.where(amax == float("inf"), float("nan"), scale)
    return tl.where(amax > 0, scale, 1.0)


@triton.jit
def scale_at(row_ptr, D: tl.constexpr):
    """The address of a packed row's first scale."""
    return (row_ptr + D).to(tl.pointer_type(tl.float32), bitcast=True)


@triton.jit
def store_blocks(x, codes_ptr, scales_ptr, first, WIDTH: tl.constexpr, SIZE: tl.constexpr, COLUMNS: tl.constexpr):
    """Quantise, by blocks, the piece of a row that begins at column `first`: fp32 [SIZE], zeros past the row's WIDTH
    columns. The pointers are those of the row's first code and of its first scale."""
    blocks = tl.reshape(x, (SIZE // COLUMNS, COLUMNS))
    scales = power_of_two(tl.max(tl.abs(blocks), axis=1))
    codes = tl.reshape(blocks * (1 / scales)[:, None], (SIZE,))  # quotients are exact
    columns, block = first + tl.arange(0, SIZE), first // COLUMNS + tl.arange(0, SIZE // COLUMNS)
    tl.store(codes_ptr + columns, codes.to(codes_ptr.dtype.element_ty), mask=columns < WIDTH)
    tl.store(scales_ptr + block, scales, mask=block < WIDTH // COLUMNS)


@triton.jit(do_not_specialize=["num_rows"])
def _quantize_rows_kernel(
    x_ptr, out_ptr, scales_ptr, num_rows,
    D: tl.constexpr, ROW: tl.constexpr, BLOCK_D: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    columns = tl.arange(0, BLOCK_D)
    keep = columns < D
    for index in range(tl.program_id(0), num_rows, tl.num_programs(0)):
        row = tl.cast(index, tl.int64)
        x = tl.load(x_ptr + row * D + columns, mask=keep, other=0.0).to(tl.float32)
        out_row_ptr = out_ptr + row * ROW
        if COLUMNS:
            blocks_ptr = scale_at(out_row_ptr, D) if scales_ptr is None else scales_ptr + row * (D // COLUMNS)
            store_blocks(x, out_row_ptr, blocks_ptr, 0, D, BLOCK_D, COLUMNS)
        else:
            amax = tl.max(tl.abs(x), axis=0)
            scale = tl.where(amax == 0, SMALLEST, power_of_two(amax))
            per_scale = 1 / scale  # exact
            tl.store(out_row_ptr + columns, (x * per_scale).to(out_ptr.dtype.element_ty), mask=keep)
            tl.store(scale_at(out_row_ptr, D) if scales_ptr is None else scales_ptr + row, scale)


def quantize_rows(x_SD: Tensor, columns: int = WHOLE_ROW) -> Tensor:
    """[S, D] -> packed rows [S, W]. D is a multiple of 16, and of `columns`, those of a scale."""
    packed = torch.empty(len(x_SD), packed_width(x_SD.shape[1], columns), dtype=CODES, device=x_SD.device)
    _launch(x_SD, packed, None, columns)
    return packed


def quantize_apart(x_SD: Tensor, columns: int = WHOLE_ROW) -> tuple[Tensor, Tensor]:
    """[S, D] -> codes [S, D] and scales, not packed: [S], with blocks [S, n]. D is as in `quantize_rows`."""
    codes_SD = torch.empty(x_SD.shape, dtype=CODES, device=x_SD.device)
    num_rows, width = x_SD.shape
    shape = (num_rows, num_scales(width, columns)) if columns else (num_rows,)
    scales = torch.empty(shape, dtype=torch.float32, device=x_SD.device)
    _launch(x_SD, codes_SD, scales, columns)
    return codes_SD, scales


def _launch(x_SD: Tensor, out: Tensor, scales: Tensor | None, columns: int) -> None:
    num_rows, width = x_SD.shape
    if num_rows:
        _quantize_rows_kernel[(min(num_rows, MAX_PROGRAMS),)](
            x_SD, out, scales, num_rows, D=width, ROW=out.shape[1], BLOCK_D=triton.next_power_of_2(width),
            COLUMNS=columns, num_warps=8 if width > 2048 else 4,
        )  # fmt: skip
