"""Frozen weights that are stored as codes in e4m3 with scales, and their numbers again for a product.

O output width · I input width · o, i blocks of 128 along each

Scales are powers of two, so the numbers of codes are exact in bf16, and rounding them again gives the same codes. Each
matrix has a scale for each output, [..., O], or one for each block, [..., o, i]; an incomplete block at an end counts
as if zeros followed.

Physics: memory-bound. Codes of a weight for a product read O·I bytes and write 2·O·I, which is freed after it; the
product reads it once. On a GPU one kernel does it, whose thread blocks have 8,192 numbers of some rows.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton import knobs

from titan_moe.config.adapter import BaseFormat
from titan_moe.kernels.formats.blocks import spread
from titan_moe.kernels.formats.casts import quantize

CODES = torch.float8_e4m3fn
BLOCK = 128
"""Rows and columns of a block."""
TILE_COLUMNS, TILE_NUMBERS = 256, 8192


def scales_shape(shape: tuple[int, ...], base: BaseFormat) -> tuple[int, ...]:
    """The shape of the scales of weights, [..., O, I].

    Raises: ValueError for `compute`, which has no codes.
    """
    match base:
        case "fp8_rowwise":
            return tuple(shape[:-1])
        case "fp8_blockwise":
            return (*shape[:-2], -(-shape[-2] // BLOCK), -(-shape[-1] // BLOCK))
    raise ValueError(f"{base!r} has no codes")


@torch.no_grad()
def store(weight: Tensor, codes: Tensor, scales: Tensor) -> None:
    """Round weights, [..., O, I], into their codes and scales, matrix by matrix."""
    if weight.ndim > 2:
        for own, own_codes, own_scales in zip(weight, codes, scales, strict=True):
            store(own, own_codes, own_scales)
        return
    is_blockwise = scales.ndim == codes.ndim
    rounded = quantize(
        weight, "fp8_blockwise" if is_blockwise else "fp8_rowwise", "weight", dim=-1, power_of_two_scales=True
    )
    codes.copy_(rounded.codes)
    scales.copy_(rounded.scales if is_blockwise else rounded.scales[..., 0])


def numbers_reference(codes: Tensor, scales: Tensor, dtype: torch.dtype) -> Tensor:
    """The definition: code times scale, [..., O, I]."""
    of_each = spread(scales, codes, (BLOCK, BLOCK)) if scales.ndim == codes.ndim else scales[..., None]
    return (codes.float() * of_each).to(dtype)


@triton.jit
def _numbers_kernel(
    codes_ptr, scales_ptr, out_ptr, num_rows, O: tl.constexpr, I: tl.constexpr, BLOCK: tl.constexpr,
    BLOCK_R: tl.constexpr, BLOCK_I: tl.constexpr,
):  # fmt: skip
    rows = tl.program_id(0).to(tl.int64) * BLOCK_R + tl.arange(0, BLOCK_R)
    columns = tl.program_id(1) * BLOCK_I + tl.arange(0, BLOCK_I)
    is_row = rows < num_rows
    keep = is_row[:, None] & (columns < I)[None, :]
    place = rows[:, None] * I + columns[None, :]
    numbers = tl.load(codes_ptr + place, mask=keep, other=0.0).to(tl.float32)
    if BLOCK:
        down: tl.constexpr = (O + BLOCK - 1) // BLOCK
        across: tl.constexpr = (I + BLOCK - 1) // BLOCK
        of_row = (rows // O * down + rows % O // BLOCK) * across
        scale = tl.load(scales_ptr + of_row[:, None] + (columns // BLOCK)[None, :], mask=keep, other=0.0)
        numbers = numbers * scale
    else:
        numbers = numbers * tl.load(scales_ptr + rows, mask=is_row, other=0.0)[:, None]
    tl.store(out_ptr + place, numbers.to(out_ptr.dtype.element_ty), mask=keep)


def numbers_of(codes: Tensor, scales: Tensor, dtype: torch.dtype) -> Tensor:
    """The same; on a GPU by one kernel."""
    if codes.device.type != "cuda":
        return numbers_reference(codes, scales, dtype)
    return numbers_in_triton(codes, scales, dtype)


def numbers_in_triton(codes: Tensor, scales: Tensor, dtype: torch.dtype) -> Tensor:
    """The same by the kernel, also in the interpreter."""
    out = torch.empty(codes.shape, dtype=dtype, device=codes.device)
    outputs, inputs = codes.shape[-2:]
    num_rows = codes.numel() // max(inputs, 1)
    if not codes.numel():
        return out
    block_i = min(triton.next_power_of_2(inputs), TILE_COLUMNS)
    block_r = TILE_NUMBERS // block_i if not knobs.runtime.interpret else 64
    _numbers_kernel[(triton.cdiv(num_rows, block_r), triton.cdiv(inputs, block_i))](
        codes.contiguous(), scales.contiguous(), out, num_rows, O=outputs, I=inputs,
        BLOCK=BLOCK if scales.ndim == codes.ndim else 0, BLOCK_R=block_r, BLOCK_I=block_i, num_warps=8,
    )  # fmt: skip
    return out
