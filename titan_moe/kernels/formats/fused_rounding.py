"""Quantise and dequantise in one pass: numbers in, rounded numbers out, with the bits of `casts.round_to`.

M rows · N columns · a line: the elements of a matrix along the summed dimension, a row or a column

Physics: memory-bound, reads 2·M·N bytes (bf16) and writes 4·M·N (fp32). The reference makes dozens of such passes.
Scales of whole lines or tensors take one more pass that reads: their largest magnitude is known only at its end, and of
a tensor in parts it is merged before the second pass. That pass transforms its numbers anew instead of reading
transformed ones.

The bits are those of IEEE 754 in fp32, on any GPU, and in Triton's interpreter:

* No multiplication is contracted with an addition (`enable_fp_fusion`), and divisions round to nearest (`tl.div_rn`).
* Codes are made from the exponents of numbers, not by casts to fp8, which some GPUs do not have.
* Largest magnitudes are those of bits, which order positive numbers; NaN is above all.
* A number is clamped by a comparison, which keeps NaN.
"""

from math import prod
from typing import cast

import torch
import triton
import triton.language as tl
from torch import Tensor

from titan_moe.config.formats import Format
from titan_moe.kernels.formats import nvfp4
from titan_moe.kernels.formats.blocks import is_rows, pad_to_multiple
from titan_moe.kernels.formats.casts import Role, block_of, dtype_of, round_to
from titan_moe.kernels.optim.stochastic_rounding import NUM_ROUNDS
from titan_moe.kernels.registry import Kernel, register

BLOCK = tl.constexpr(nvfp4.BLOCK)
NEGATIVE_SIGNS = tl.constexpr(nvfp4.NEGATIVE_SIGNS)
LANE_FACTOR = tl.constexpr(nvfp4.LANE_FACTOR)
MIN_TENSOR_SCALE = tl.constexpr(nvfp4.MIN_TENSOR_SCALE)
MIN_SCALE = tl.constexpr(torch.finfo(torch.float32).tiny)
PHILOX_ROUNDS = tl.constexpr(NUM_ROUNDS)


def round_reference(
    x_MN: Tensor,
    format: str,
    role: str,
    dim: int,
    amax: Tensor | None = None,
    power_of_two_scales: bool = False,
    is_transformed: bool = False,
) -> Tensor:
    """The definition of `round_to_format`."""
    if is_transformed:
        x_MN = nvfp4.random_hadamard(pad_to_multiple(x_MN, nvfp4.BLOCK, dim), dim)
    merge = None if amax is None else lambda _: amax
    return round_to(
        x_MN.float(),
        cast(Format, format),
        cast(Role, role),
        dim,
        merge=merge,
        power_of_two_scales=power_of_two_scales,
    )


@triton.jit
def _sums_and_differences(x, HALF: tl.constexpr, LINES: tl.constexpr, LENGTH: tl.constexpr):
    """Of elements that lie HALF apart, in blocks of 2·HALF."""
    pairs = tl.reshape(x, (LINES, LENGTH // (2 * HALF), 2, HALF))
    left, right = tl.split(tl.permute(pairs, (0, 1, 3, 2)))
    return tl.reshape(tl.permute(tl.join(left + right, left - right), (0, 1, 3, 2)), (LINES, LENGTH))


@triton.jit
def _random_hadamard(x, LINES: tl.constexpr, LENGTH: tl.constexpr):
    """`nvfp4.random_hadamard` along the last dimension, in fp32."""
    lane = tl.arange(0, LENGTH) % BLOCK
    mixed = x * (1 - 2 * (((tl.zeros_like(lane) + NEGATIVE_SIGNS) >> lane) & 1)).to(tl.float32)[None, :]
    for half in tl.static_range(4):
        mixed = _sums_and_differences(mixed, 1 << half, LINES, LENGTH)
    return mixed * 0.25


@triton.jit
def _load_tile(
    x_ptr, line, place, num_lines, length, stride_line, stride_place,
    IS_TRANSFORMED: tl.constexpr, LINES: tl.constexpr, LENGTH: tl.constexpr,
):  # fmt: skip
    """[LINES, LENGTH] in fp32, zeros past the ends."""
    ptrs = x_ptr + line.to(tl.int64)[:, None] * stride_line + place.to(tl.int64)[None, :] * stride_place
    x = tl.load(ptrs, mask=(line < num_lines)[:, None] & (place < length)[None, :], other=0.0)
    if IS_TRANSFORMED:
        return _random_hadamard(x.to(tl.float32), LINES, LENGTH).to(x.dtype).to(tl.float32)
    else:
        return x.to(tl.float32)


@triton.jit
def _sizes(rows, columns, ROWS_ARE_PLACES: tl.constexpr, IS_TRANSFORMED: tl.constexpr):
    """Lines, places on a line, and places on a rounded line."""
    num_lines, length = (columns, rows) if ROWS_ARE_PLACES else (rows, columns)
    return num_lines, length, tl.cdiv(length, BLOCK) * BLOCK if IS_TRANSFORMED else length


@triton.jit
def _tile_of(program, num_lines, length, LINES: tl.constexpr, LENGTH: tl.constexpr):
    """The matrix of a program, and its lines and places on them."""
    num_tiles_along, num_tiles_across = tl.cdiv(length, LENGTH), tl.cdiv(num_lines, LINES)
    along, across = program % num_tiles_along, program // num_tiles_along % num_tiles_across
    matrix = (program // num_tiles_along // num_tiles_across).to(tl.int64)
    return matrix, across * LINES + tl.arange(0, LINES), along * LENGTH + tl.arange(0, LENGTH)


@triton.jit(do_not_specialize=["rows"])
def _largest_kernel(
    x_ptr, amax_ptr, rows, columns, stride_matrix, stride_line, stride_place,
    ROWS_ARE_PLACES: tl.constexpr, IS_OF_LINES: tl.constexpr, IS_TRANSFORMED: tl.constexpr,
    LINES: tl.constexpr, LENGTH: tl.constexpr,
):  # fmt: skip
    num_lines, length, out_length = _sizes(rows, columns, ROWS_ARE_PLACES, IS_TRANSFORMED)
    matrix, line, place = _tile_of(tl.program_id(0), num_lines, out_length, LINES, LENGTH)
    x_ptr += matrix * stride_matrix
    x = _load_tile(x_ptr, line, place, num_lines, length, stride_line, stride_place, IS_TRANSFORMED, LINES, LENGTH)
    largest = tl.max(_magnitude_bits(x), axis=1)
    if IS_OF_LINES:
        tl.atomic_max(amax_ptr + matrix * num_lines + line, largest, mask=line < num_lines, sem="relaxed")
    else:
        tl.atomic_max(amax_ptr + matrix, tl.max(largest, axis=0), sem="relaxed")


@triton.jit
def _magnitude_bits(x):
    return x.to(tl.int32, bitcast=True) & 0x7FFFFFFF


@triton.jit
def _steps(magnitude, MANTISSA_BITS: tl.constexpr, MIN_EXPONENT: tl.constexpr):
    """The distance of codes where a number lies, a power of two, and the number in such steps; exact."""
    exponent = tl.maximum(magnitude.to(tl.int32, bitcast=True) & 0x7F800000, (MIN_EXPONENT + 127) << 23)
    step = exponent - (MANTISSA_BITS << 23)
    per_step = (254 << 23) - step
    return step.to(tl.float32, bitcast=True), magnitude * per_step.to(tl.float32, bitcast=True)


@triton.jit
def _to_nearest(magnitude, MANTISSA_BITS: tl.constexpr, MIN_EXPONENT: tl.constexpr):
    """Round a number that is not negative to the nearest code, ties to even."""
    step, steps = _steps(magnitude, MANTISSA_BITS, MIN_EXPONENT)
    return ((steps + 8388608.0) - 8388608.0) * step  # 2^23: its successor is 1 more


@triton.jit
def _at_random(magnitude, random, MANTISSA_BITS: tl.constexpr, MIN_EXPONENT: tl.constexpr):
    """Round up where the dropped fraction exceeds `random`."""
    step, steps = _steps(magnitude, MANTISSA_BITS, MIN_EXPONENT)
    below = tl.floor(steps)
    return (below + (random < steps - below).to(tl.float32)) * step


@triton.jit
def _draw(x, LINES: tl.constexpr, LENGTH: tl.constexpr):
    """`nvfp4.draw` along the last dimension."""
    NUM_BLOCKS: tl.constexpr = LINES * LENGTH // BLOCK
    content = tl.reshape(x.to(tl.int32, bitcast=True), (NUM_BLOCKS, BLOCK)).to(tl.int64)
    odd = 2 * tl.arange(0, BLOCK) + 1
    key = tl.sum(content * (odd.to(tl.int64) * LANE_FACTOR)[None, :], axis=1)[:, None]
    zeros = tl.zeros((NUM_BLOCKS, BLOCK // 4), dtype=tl.uint32)
    low = (key & 0xFFFFFFFF).to(tl.uint32) + zeros
    high = ((key >> 32) & 0xFFFFFFFF).to(tl.uint32) + zeros
    quarter = tl.arange(0, BLOCK // 4).to(tl.uint32)[None, :] + zeros
    w0, w1, w2, w3 = tl.philox(0, low, high, quarter, zeros, PHILOX_ROUNDS)
    # [blocks, quarter, low bit of the word's number, its high bit]; an element takes word lane / 4 of call lane % 4
    words = tl.permute(tl.join(tl.join(w0, w1), tl.join(w2, w3)), (0, 3, 2, 1))
    return tl.reshape((words >> 8).to(tl.float32) * (2.0**-24), (LINES, LENGTH))


@triton.jit
def _fp8_scale(amax, LARGEST: tl.constexpr, POWER_OF_TWO: tl.constexpr):
    """`fp8.scales_of`."""
    scale = tl.div_rn(amax, LARGEST)
    scale = tl.where(scale < MIN_SCALE, MIN_SCALE, scale)
    scale = tl.where(amax == 0, 1.0, scale)
    if POWER_OF_TWO:
        above = ((scale.to(tl.int32, bitcast=True) + 0x7FFFFF) & -0x800000).to(tl.float32, bitcast=True)
        scale = tl.where(scale < float("inf"), above, scale)
    return scale


@triton.jit
def _mxfp8_scale(amax):
    """`mxfp8.scales_of` in fp32, and the factors of `mxfp8.codes_of`."""
    quotient = tl.div_rn(amax, 448.0)
    bits = quotient.to(tl.int32, bitcast=True)
    exponent = tl.where(bits <= 0x400000, 0, (bits + 0x7FFFFF) >> 23)
    exponent = tl.where(quotient == float("inf"), 254, exponent)
    scale = tl.where(exponent == 0, 0x400000, exponent << 23).to(tl.float32, bitcast=True)  # 2^-127 is subnormal
    factor = tl.where(exponent == 254, 0x400000, (254 - exponent) << 23).to(tl.float32, bitcast=True)
    factor = tl.where(exponent == 0, 1.0, factor)
    return tl.where(quotient == quotient, scale, quotient), tl.where(quotient == quotient, factor, quotient)


@triton.jit
def _nvfp4_scale(amax, tensor_scale):
    """`nvfp4.block_scales_of`."""
    scale = tl.div_rn(tl.div_rn(amax, 6.0), tensor_scale)
    scale = tl.where(scale < 0.015625, 0.015625, scale)
    return _to_nearest(tl.where(scale > 448.0, 448.0, scale), 3, -6)


@triton.jit(do_not_specialize=["rows"])
def _round_kernel(
    x_ptr, out_ptr, amax_ptr, rows, columns,
    stride_matrix, stride_line, stride_place, stride_out_matrix, stride_out_line, stride_out_place,
    stride_amax_matrix, stride_amax_line,
    CODES: tl.constexpr, POWER_OF_TWO: tl.constexpr, IS_RANDOM: tl.constexpr, IS_TRANSFORMED: tl.constexpr,
    ROWS_ARE_PLACES: tl.constexpr, BLOCK_LINES: tl.constexpr, BLOCK_LENGTH: tl.constexpr,
    LINES: tl.constexpr, LENGTH: tl.constexpr,
):  # fmt: skip
    num_lines, length, out_length = _sizes(rows, columns, ROWS_ARE_PLACES, IS_TRANSFORMED)
    matrix, line, place = _tile_of(tl.program_id(0), num_lines, out_length, LINES, LENGTH)
    x_ptr += matrix * stride_matrix
    x = _load_tile(x_ptr, line, place, num_lines, length, stride_line, stride_place, IS_TRANSFORMED, LINES, LENGTH)
    magnitude_bits = _magnitude_bits(x)
    if amax_ptr is not None:
        amax_ptr += matrix * stride_amax_matrix
    if amax_ptr is None or CODES == "nvfp4":
        blocks = tl.reshape(magnitude_bits, (LINES // BLOCK_LINES, BLOCK_LINES, LENGTH // BLOCK_LENGTH, BLOCK_LENGTH))
        amax = tl.max(tl.max(blocks, axis=3, keep_dims=True), axis=1, keep_dims=True).to(tl.float32, bitcast=True)
    else:
        lines = tl.load(amax_ptr + line * stride_amax_line, mask=line < num_lines, other=0.0)
        amax = tl.reshape(lines, (LINES, 1, 1, 1))
    magnitude = tl.reshape(
        magnitude_bits.to(tl.float32, bitcast=True),
        (LINES // BLOCK_LINES, BLOCK_LINES, LENGTH // BLOCK_LENGTH, BLOCK_LENGTH),
    )
    if CODES == "nvfp4":
        tensor_scale = tl.div_rn(tl.load(amax_ptr), 2688.0)
        tensor_scale = tl.where(tensor_scale < MIN_TENSOR_SCALE, MIN_TENSOR_SCALE, tensor_scale)
        scale = _nvfp4_scale(amax, tensor_scale)
        scaled = magnitude * tl.div_rn(tl.div_rn(1.0, tensor_scale), scale)
        scaled = tl.where(scaled > 6.0, 6.0, scaled)
        if IS_RANDOM:
            random = tl.reshape(_draw(x, LINES, LENGTH), scaled.shape)
            rounded = _at_random(scaled, random, 1, 0) * (scale * tensor_scale)
        else:
            rounded = _to_nearest(scaled, 1, 0) * (scale * tensor_scale)
    else:
        LARGEST: tl.constexpr = 57344.0 if CODES == "e5m2" else 448.0
        if CODES == "mxfp8":
            scale, factor = _mxfp8_scale(amax)
        else:
            scale = _fp8_scale(amax, LARGEST, POWER_OF_TWO)
            factor = tl.div_rn(1.0, scale)
        scaled = magnitude * factor
        scaled = tl.where(scaled > LARGEST, LARGEST, scaled)
        rounded = (_to_nearest(scaled, 2, -14) if CODES == "e5m2" else _to_nearest(scaled, 3, -6)) * scale
    sign = x.to(tl.int32, bitcast=True) & -0x80000000
    rounded = (tl.reshape(rounded, (LINES, LENGTH)).to(tl.int32, bitcast=True) | sign).to(tl.float32, bitcast=True)
    out_ptr += matrix * stride_out_matrix
    ptrs = out_ptr + line.to(tl.int64)[:, None] * stride_out_line + place.to(tl.int64)[None, :] * stride_out_place
    tl.store(ptrs, rounded, mask=(line < num_lines)[:, None] & (place < out_length)[None, :])


class _Tiles:
    """The tiles of matrices, in lines along `dim`."""

    def __init__(self, x_MN: Tensor, dim: int, is_transformed: bool, lines: int = 64, length: int = 64) -> None:
        self.rows_are_places = is_rows(dim, x_MN.ndim)
        *self.matrices, self.rows, self.columns = x_MN.shape
        line_length, self.num_lines = x_MN.shape[-2:] if self.rows_are_places else x_MN.shape[:-3:-1]
        self.out_length = -(-line_length // nvfp4.BLOCK) * nvfp4.BLOCK if is_transformed else line_length
        self.grid = (prod(self.matrices) * -(-self.num_lines // lines) * -(-self.out_length // length),)

    def shape(self, length: int) -> list[int]:
        """Of matrices with lines of another length."""
        return [*self.matrices, *([length, self.num_lines] if self.rows_are_places else [self.num_lines, length])]

    def strides(self, x_MN: Tensor) -> tuple[int, int, int]:
        """From matrix to matrix, line to line, place to place."""
        rows, columns = x_MN.stride()[-2:]
        lines, places = (columns, rows) if self.rows_are_places else (rows, columns)
        return x_MN.stride(0) if self.matrices else 0, lines, places


def amax_to_merge(x_MN: Tensor, format: Format, role: Role, dim: int, *, is_transformed: bool = False) -> Tensor | None:
    """The largest magnitudes that `casts.quantize` merges, of a tensor in parts along its rows; None if it merges none.

    Shapes: fp32 [..., 1, 1], or [..., 1, N].
    """
    if format == "nvfp4" or block_of(format, role, dim, x_MN.ndim)[0] is None:
        return _amax(x_MN, format, dim, is_transformed)
    return None


def _amax(x_MN: Tensor, format: Format, dim: int, is_transformed: bool) -> Tensor:
    """The largest magnitude of each line in fp8_rowwise, else of each matrix."""
    tiles, is_of_lines = _Tiles(x_MN, dim, is_transformed), format == "fp8_rowwise"
    shape = tiles.shape(1) if is_of_lines else [*tiles.matrices, 1, 1]
    amax = torch.zeros(shape, dtype=torch.int32, device=x_MN.device)
    if x_MN.numel():
        _largest_kernel[tiles.grid](
            x_MN, amax, tiles.rows, tiles.columns, *tiles.strides(x_MN),
            ROWS_ARE_PLACES=tiles.rows_are_places, IS_OF_LINES=is_of_lines, IS_TRANSFORMED=is_transformed,
            LINES=64, LENGTH=64, num_warps=4, enable_fp_fusion=False,
        )  # fmt: skip
    return amax.view(torch.float32)


def launch_rounding(
    x_MN: Tensor,
    format: Format,
    role: Role,
    dim: int,
    amax: Tensor | None = None,
    power_of_two_scales: bool = False,
    is_transformed: bool = False,
) -> Tensor:
    """`round_to_format`."""
    block = block_of(format, role, dim, x_MN.ndim)
    block_length, block_lines = block if is_rows(dim, x_MN.ndim) else block[::-1]
    lines, length, num_warps = 64, 64, 4
    if block_length is None:  # the first pass has found the largest
        block_lines, block_length = 1, length
    elif block_length == 128:
        lines, length, num_warps = (32, 128, 4) if block_lines == 1 else (128, 128, 8)
    tiles = _Tiles(x_MN, dim, is_transformed, lines, length)
    amax_strides = 0, 0
    if format == "nvfp4" or None in block:
        if amax is None or (format != "nvfp4" and block[0] is not None):
            amax = _amax(x_MN, format, dim, is_transformed)
        matrix_stride, line_stride, _ = tiles.strides(amax)
        amax_strides = matrix_stride, line_stride if format == "fp8_rowwise" else 0
    else:
        amax = None
    codes = "e5m2" if dtype_of(format, role) == torch.float8_e5m2 else "e4m3"
    out_MN = torch.empty(tiles.shape(tiles.out_length), dtype=torch.float32, device=x_MN.device)
    if x_MN.numel():
        _round_kernel[tiles.grid](
            x_MN, out_MN, amax, tiles.rows, tiles.columns,
            *tiles.strides(x_MN), *tiles.strides(out_MN), *amax_strides,
            CODES=format if format in ("mxfp8", "nvfp4") else codes, POWER_OF_TWO=power_of_two_scales,
            IS_RANDOM=format == "nvfp4" and role == "gradient", IS_TRANSFORMED=is_transformed,
            ROWS_ARE_PLACES=tiles.rows_are_places, BLOCK_LINES=block_lines, BLOCK_LENGTH=block_length,
            LINES=lines, LENGTH=length, num_warps=num_warps, enable_fp_fusion=False,
        )  # fmt: skip
    return out_MN


@torch.library.custom_op("titan_moe::round_to_format", mutates_args=())
def round_to_format(
    x_MN: Tensor,
    format: str,
    role: str,
    dim: int,
    amax: Tensor | None = None,
    power_of_two_scales: bool = False,
    is_transformed: bool = False,
) -> Tensor:
    """The nearest representable numbers in fp32; without gradients.

    Args:
        x_MN: a matrix, or [n, M, N].
        amax: that of `amax_to_merge`, merged; by default not merged.
        is_transformed: rounds `nvfp4.random_hadamard` of x with zeros behind it up to a multiple of 16 along `dim`.
    """
    names = cast(Format, format), cast(Role, role)
    return launch_rounding(x_MN, *names, dim, amax, power_of_two_scales, is_transformed)


@round_to_format.register_fake
def _(
    x_MN: Tensor,
    format: str,
    role: str,
    dim: int,
    amax: Tensor | None = None,
    power_of_two_scales: bool = False,
    is_transformed: bool = False,
) -> Tensor:
    tiles = _Tiles(x_MN, dim, is_transformed)
    return x_MN.new_empty(tiles.shape(tiles.out_length), dtype=torch.float32)


register(Kernel("round_to_format", round_to_format, round_reference, needs_triton=True))
