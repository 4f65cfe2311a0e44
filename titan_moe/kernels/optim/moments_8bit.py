"""AdamW's moments in 8 bits: a code an element and an fp32 scale for every BLOCK of 256 elements.

N elements · B blocks of 256

The codes are torchao's, so its classes `OptimState8bit` and `OptimStateFp8` hold and dequantise them:

* int8 (arXiv:2110.02861): an index into a map of 256 numbers in [-1, 1], or [0, 1] for the second moment. The map has
  seven decades; each decade has twice the numbers of the one below it.
* fp8: e4m3.

Scales and rounding are ours, for three reasons:

* A checkpoint has plain fp32 moments, and a resumed run must equal the uninterrupted one. So quantising what was
  dequantised gives the same numbers. In int8 the scale is the element of largest magnitude, with its sign: that element
  is exactly 1.0, which the signed map has and -1.0 it has not. In fp8 the largest magnitude is always the code of 448,
  and a scale has 13 significant bits, so its products with codes are exact.
* Rounding is stochastic. Rounding to nearest drops changes below half the distance of two codes, 3 to 6 % in fp8; at
  beta2 = 0.95, a second moment falls by at most 5 % a step and would stay where it is.
* A second moment above 0 never becomes 0, but at least the smallest number of its block. The update divides by its
  root: with 0 it would be too large by orders of magnitude, with the smallest number it is too small.

fp8 codes are made and read with integer operations: every GPU has them, and Triton's interpreter rounds them right.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

BLOCK = 256
ZERO_SIGNED: tl.constexpr = tl.constexpr(127)
"""Code of 0 in the signed map of int8. Code c above it has the number of code 254 - c below it, negated."""
SMALLEST: tl.constexpr = tl.constexpr(2.0**-100)
"""Blocks whose largest magnitude is smaller are 0 in int8. Products of codes and scales are then normal in fp32."""
LOG2_OF_10: tl.constexpr = tl.constexpr(3.321928094887362)
NEAREST = 1 << 15
"""Instead of 16 random bits, rounds to nearest."""


class Moment(NamedTuple):
    """A moment of one shard. N is a multiple of BLOCK."""

    codes: Tensor
    """uint8, of the parameter's shape, contiguous; for fp8 a view of the e4m3 codes."""
    scales_B: Tensor
    """fp32."""
    map: Tensor | None
    """int8: the fp32 number of each code. fp8: None."""
    is_signed: bool


def dequantize_reference(moment: Moment) -> Tensor:
    """The fp32 numbers, in the parameter's shape."""
    if moment.map is None:
        numbers = moment.codes.view(torch.float8_e4m3fn).float()
    else:
        numbers = moment.map[moment.codes.int()]
    return (numbers.view(-1, BLOCK) * moment.scales_B[:, None]).view(moment.codes.shape)


def quantize_reference(x: Tensor, map_: Tensor | None, is_signed: bool, bits: Tensor | int) -> tuple[Tensor, Tensor]:
    """Codes in the shape of fp32 `x`, and scales; `bits` are 16 random ones an element, or NEAREST."""
    blocks = x.reshape(-1, BLOCK)
    bits = bits.view(blocks.shape) if isinstance(bits, Tensor) else torch.full_like(blocks, bits, dtype=torch.int64)
    encode = _encode_fp8 if map_ is None else _encode_int8
    magnitudes, scales_B = encode(blocks, map_, is_signed, bits)
    if not is_signed:
        magnitudes = torch.where((blocks > 0) & (scales_B[:, None] > 0), magnitudes.clamp(min=1), magnitudes)
    return magnitudes.to(torch.uint8).view(x.shape), scales_B


def _encode_fp8(blocks: Tensor, _: Tensor | None, is_signed: bool, bits: Tensor) -> tuple[Tensor, Tensor]:
    largest = blocks.abs().amax(dim=1).clamp(min=SMALLEST.value)
    scales_B = (((largest / 448).view(torch.int32) + 0x400) & ~0x7FF).view(torch.float32)
    y = (blocks.abs() / scales_B[:, None]).clamp(max=448)
    y = torch.where(blocks.abs() == largest[:, None], 448.0, y)
    normal = ((y.view(torch.int32) + (bits.int() << 4)) >> 20) - (120 << 3)
    subnormal = torch.floor(y * 512 + bits.float() / 65536).int()
    codes = torch.where(y < 2.0**-6, subnormal, normal)
    return torch.where(blocks < 0, codes + 128, codes) if is_signed else codes, scales_B


def _encode_int8(blocks: Tensor, map_: Tensor | None, is_signed: bool, bits: Tensor) -> tuple[Tensor, Tensor]:
    assert map_ is not None
    largest = blocks.abs().amax(dim=1)
    scales_B = torch.where(blocks.amax(dim=1) >= largest, largest, -largest)
    scales_B = torch.where(largest < SMALLEST.value, 0.0, scales_B)
    y = torch.where(scales_B[:, None] == 0, 0.0, blocks / scales_B[:, None])
    below = (torch.searchsorted(map_, y.abs(), right=True) - 1).clamp(ZERO_SIGNED.value if is_signed else 0, 254)
    fraction = (y.abs() - map_[below]) / (map_[below + 1] - map_[below])
    codes = below + (bits.float() / 65536 < fraction).int()
    return torch.where(y < 0, 254 - codes.clamp(max=254), codes) if is_signed else codes, scales_B


@triton.jit
def load_moment(codes_ptr, scales_ptr, index, row, keep, keep_row, IS_FP8: tl.constexpr, IS_SIGNED: tl.constexpr):
    """`dequantize_reference` on a tile [rows, BLOCK] of elements and [rows, 1] of scales."""
    code = tl.load(codes_ptr + index, mask=keep, other=0).to(tl.int32)
    scale = tl.load(scales_ptr + row, mask=keep_row, other=0.0)
    if IS_FP8:
        magnitude = code & 0x7F
        normal = ((magnitude << 20) + (120 << 23)).to(tl.float32, bitcast=True)
        number = tl.where(magnitude < 8, magnitude.to(tl.float32) * 0.001953125, normal)
        number = tl.where(code >= 128, -number, number)
    else:
        number = _decode_int8(code, IS_SIGNED)
    return number * scale


@triton.jit
def store_moment(
    codes_ptr, scales_ptr, x, bits, index, row, keep, keep_row, IS_FP8: tl.constexpr, IS_SIGNED: tl.constexpr
):
    """`quantize_reference` of a tile [rows, BLOCK], with 16 random bits an element in uint32."""
    largest = tl.max(tl.abs(x), axis=1, keep_dims=True)
    if IS_FP8:
        largest = tl.maximum(largest, SMALLEST)
        scale = (((largest * (1 / 448)).to(tl.int32, bitcast=True) + 0x400) & -0x800).to(tl.float32, bitcast=True)
        y = tl.where(tl.abs(x) == largest, 448.0, tl.minimum(tl.abs(x) * (1 / scale), 448.0))
        normal = ((y.to(tl.int32, bitcast=True) + (bits << 4).to(tl.int32)) >> 20) - (120 << 3)
        subnormal = (y * 512 + bits.to(tl.float32) * (1 / 65536)).to(tl.int32)
        code = tl.where(y < 0.015625, subnormal, normal)
        if IS_SIGNED:
            code = tl.where(x < 0, code + 128, code)
    else:
        scale = largest
        if IS_SIGNED:
            scale = tl.where(tl.max(x, axis=1, keep_dims=True) >= largest, largest, -largest)
        is_zero = largest < SMALLEST
        scale = tl.where(is_zero, 0.0, scale)
        y = x * tl.where(is_zero, 0.0, 1 / tl.where(is_zero, 1.0, scale))
        # division is approximate here, and the largest must be exactly 1
        size = tl.where(x == scale, 1.0, tl.minimum(tl.abs(y), 1.0))
        size = tl.where(is_zero, 0.0, size)
        code = _encode_int8_magnitude(size, bits.to(tl.float32) * (1 / 65536), IS_SIGNED)
        if IS_SIGNED:
            code = tl.where(y < 0, 254 - tl.minimum(code, 254), code)
    if not IS_SIGNED:
        code = tl.where((x > 0) & (scale > 0), tl.maximum(code, 1), code)
    tl.store(codes_ptr + index, code.to(tl.uint8), mask=keep)
    tl.store(scales_ptr + row, scale, mask=keep_row)


@triton.jit
def _decode_int8(code, IS_SIGNED: tl.constexpr):
    """The map's number of a code, to a few ulp. Decade d has `count` numbers, the middles of equal intervals of
    [0.1, 1] · 10^(d - 6); count is 2^d with a sign and 2^(d + 1) without. So the exponent of k, the number of the code
    from the smallest one, is the decade, and its mantissa the place in it."""
    if IS_SIGNED:
        k = tl.where(code >= 127, code - 127, 127 - code)
    else:
        k = code + 1
    k_bits = k.to(tl.float32).to(tl.int32, bitcast=True)
    exponent = (k_bits >> 23) - 127
    place = ((k_bits & 0x7FFFFF) | 0x3F800000).to(tl.float32, bitcast=True) - 1
    half_interval = ((126 - exponent) << 23).to(tl.float32, bitcast=True)
    LAST: tl.constexpr = 6 if IS_SIGNED else 7
    power = tl.exp2((exponent - LAST).to(tl.float32) * LOG2_OF_10)
    number = power * (0.1 + 0.9 * (place + half_interval))
    number = tl.where(code == 255, 1.0, number)
    if IS_SIGNED:
        return tl.where(code == 127, 0.0, tl.where(code < 127, -number, number))
    else:
        return tl.where(code == 0, 0.0, number)


@triton.jit
def _encode_int8_magnitude(size, threshold, IS_SIGNED: tl.constexpr):
    """The code of the map's number below `size` in [0, 1], or of the one above if `size` lies farther between them than
    `threshold`. Intervals between two decades, and those to 0 and to 1, have widths of their own. An error of an ulp in
    the decade or the place is harmless: the two formulas agree where decades meet."""
    decade = tl.minimum(tl.maximum(tl.floor(tl.log2(size) * (1 / LOG2_OF_10) + 7), 0.0), 6.0)
    in_decade = size * tl.exp2((6 - decade) * LOG2_OF_10)
    count = tl.exp2(decade) if IS_SIGNED else 2 * tl.exp2(decade)
    place = (in_decade - 0.1) * (1 / 0.9) * count - 0.5
    number = tl.minimum(tl.maximum(tl.floor(place), -1.0), count - 1)
    fraction = place - number
    FIRST: tl.constexpr = 0.55 if IS_SIGNED else 0.325
    before = tl.where(decade == 0, in_decade * (1 / FIRST), 1 + place * (1 / 0.6))
    fraction = tl.where(number < 0, before, fraction)
    after = tl.where(decade == 6, fraction * 2, fraction * (1 / 3))
    fraction = tl.where(number == count - 1, after, fraction)
    ZERO: tl.constexpr = 127 if IS_SIGNED else -1
    code = (count + number).to(tl.int32) + ZERO + (threshold < fraction).to(tl.int32)
    return tl.where(size >= 1.0, 255, code)
