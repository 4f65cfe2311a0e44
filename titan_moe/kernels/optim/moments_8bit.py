"""AdamW's moments in 8 bits: an e4m3 code an element and an fp32 scale for every BLOCK of 256 elements.

N elements · B blocks of 256

torchao's `OptimStateFp8` holds and dequantises them. Scales and rounding are ours, for three reasons:

* A checkpoint has plain fp32 moments, and a resumed run must equal the uninterrupted one. So quantising what was
  dequantised gives the same numbers: the largest magnitude of a block is always the code of 448, and a scale has 13
  significant bits, so its products with codes are exact.
* Rounding is stochastic. Rounding to nearest drops changes below half the distance of two codes, 3 to 6 %; at beta2 =
  0.95, a second moment falls by at most 5 % a step and would stay where it is.
* A second moment above 0 never becomes 0, but at least the smallest number of its block. The update divides by its
  root: with 0 it would be too large by orders of magnitude, with the smallest number it is too small.

Codes are made and read with integer operations: every GPU has them, and Triton's interpreter rounds them right.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

BLOCK = 256
SMALLEST: tl.constexpr = tl.constexpr(2.0**-100)
"""The largest magnitude of a block is taken to be at least this. Products of codes and scales are then normal in
fp32."""
NEAREST = 1 << 15
"""Instead of 16 random bits, rounds to nearest."""


class Moment(NamedTuple):
    """A moment of one shard. N is a multiple of BLOCK."""

    codes: Tensor
    """e4m3 as uint8, of the parameter's shape, contiguous."""
    scales_B: Tensor
    """fp32."""


def dequantize_reference(moment: Moment) -> Tensor:
    """The fp32 numbers, in the parameter's shape."""
    numbers = moment.codes.view(torch.float8_e4m3fn).float()
    return (numbers.view(-1, BLOCK) * moment.scales_B[:, None]).view(moment.codes.shape)


def quantize_reference(x: Tensor, bits: Tensor | int, *, is_signed: bool) -> Moment:
    """Quantise fp32 `x`; `bits` are 16 random ones an element, or NEAREST. A second moment has no sign."""
    blocks = x.reshape(-1, BLOCK)
    bits = bits.view(blocks.shape) if isinstance(bits, Tensor) else torch.full_like(blocks, bits, dtype=torch.int64)
    largest = blocks.abs().amax(dim=1).clamp(min=SMALLEST.value)
    scales_B = (((largest / 448).view(torch.int32) + 0x400) & ~0x7FF).view(torch.float32)
    y = (blocks.abs() / scales_B[:, None]).clamp(max=448)
    y = torch.where(blocks.abs() == largest[:, None], 448.0, y)
    normal = ((y.view(torch.int32) + (bits.int() << 4)) >> 20) - (120 << 3)
    subnormal = torch.floor(y * 512 + bits.float() / 65536).int()
    codes = torch.where(y < 2.0**-6, subnormal, normal)
    if is_signed:
        codes = torch.where(blocks < 0, codes + 128, codes)
    else:
        codes = torch.where(blocks > 0, codes.clamp(min=1), codes)
    return Moment(codes.to(torch.uint8).view(x.shape), scales_B)


@triton.jit
def load_moment(codes_ptr, scales_ptr, index, row, keep, keep_row):
    """`dequantize_reference` on a tile [rows, BLOCK] of elements and [rows, 1] of scales."""
    code = tl.load(codes_ptr + index, mask=keep, other=0).to(tl.int32)
    scale = tl.load(scales_ptr + row, mask=keep_row, other=0.0)
    magnitude = code & 0x7F
    normal = ((magnitude << 20) + (120 << 23)).to(tl.float32, bitcast=True)
    number = tl.where(magnitude < 8, magnitude.to(tl.float32) * 0.001953125, normal)
    return tl.where(code >= 128, -number, number) * scale


@triton.jit
def store_moment(codes_ptr, scales_ptr, x, bits, index, row, keep, keep_row, IS_SIGNED: tl.constexpr):
    """`quantize_reference` of a tile [rows, BLOCK], with 16 random bits an element in uint32."""
    largest = tl.maximum(tl.max(tl.abs(x), axis=1, keep_dims=True), SMALLEST)
    scale = (((largest * (1 / 448)).to(tl.int32, bitcast=True) + 0x400) & -0x800).to(tl.float32, bitcast=True)
    y = tl.where(tl.abs(x) == largest, 448.0, tl.minimum(tl.abs(x) * (1 / scale), 448.0))
    normal = ((y.to(tl.int32, bitcast=True) + (bits << 4).to(tl.int32)) >> 20) - (120 << 3)
    subnormal = (y * 512 + bits.to(tl.float32) * (1 / 65536)).to(tl.int32)
    code = tl.where(y < 0.015625, subnormal, normal)
    if IS_SIGNED:
        code = tl.where(x < 0, code + 128, code)
    else:
        code = tl.where(x > 0, tl.maximum(code, 1), code)
    tl.store(codes_ptr + index, code.to(tl.uint8), mask=keep)
    tl.store(scales_ptr + row, scale, mask=keep_row)
