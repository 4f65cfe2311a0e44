"""Weights of experts in fp8, as stored and transposed.

e experts · O output width · I input width · o, i blocks of 128 along each

The matrix units read fp8 along the summed dimension alone. Forward sums over the input width and reads weights as
stored; the gradient of rows sums over the output width and reads them transposed, with scales along the dimension that
stays. Where they are kept both are made at once, with the bytes of one weight in bf16. Elsewhere each is made for its
use.

A block of 128 x 128 has one scale both ways, so transposed codes are the same codes: they are quantised once.

Physics: memory-bound. Codes of blocks, or with scales of rows as stored, read 2·e·O·I bytes (4 of masters) and write
e·O·I; transposed with scales of rows, they are read twice. Both ways read no more and write twice. On GPUs a thread has
8 outputs of 8 inputs of a tile (transposing.py): it reads 16 bytes of an output in bf16 and writes 8 of an input. The
other kernels are the definition, which the interpreter runs, and serve widths that are no multiples of 128.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton import knobs
from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from titan_moe.config.formats import Format
from titan_moe.kernels.experts.fp8.packed import BLOCK, CODES, WHOLE_ROW, num_scales
from titan_moe.kernels.experts.fp8.rows import power_of_two, quantize_apart
from titan_moe.kernels.experts.fp8.transposing import NUM_WARPS, transposing
from titan_moe.kernels.formats.casts import quantize

LAYOUTS = transposing(columns=8)


class WeightCodes(NamedTuple):
    """A weight of all experts as a GEMM reads it: code · scale is the number."""

    codes: Tensor
    """[e, O, I], transposed [e, I, O]."""
    scales: Tensor
    """[e, O] or [e, I], with blocks [e, o, i] or [e, i, o]."""

    @property
    def columns(self) -> int:
        """Those of a block that has a scale; 0 for one scale a row of codes."""
        return BLOCK if self.scales.ndim == 3 else WHOLE_ROW


def quantize_weight_reference(weight_eOI: Tensor, dtype: torch.dtype, columns: int = WHOLE_ROW) -> list[WeightCodes]:
    """The definition: as stored, and transposed."""
    format: Format = "fp8_blockwise" if columns else "fp8_rowwise"
    both = (weight_eOI.to(dtype), weight_eOI.to(dtype).mT.contiguous())
    ways = [quantize(weight, format, "weight", dim=2, power_of_two_scales=True) for weight in both]
    return [WeightCodes(codes, scales if columns else scales[..., 0]) for codes, scales, _ in ways]


@triton.jit
def _load(pointers, keep, IS_ROUNDED: tl.constexpr):
    weight = tl.load(pointers) if keep is None else tl.load(pointers, mask=keep, other=0.0)
    if IS_ROUNDED:
        weight = weight.to(tl.bfloat16)
    return weight.to(tl.float32)


@triton.jit
def _amax_kernel(
    weight_ptr, row_ptr, column_ptr, O: tl.constexpr, I: tl.constexpr, BLOCK_O: tl.constexpr, BLOCK_I: tl.constexpr,
    IS_ROUNDED: tl.constexpr,
):  # fmt: skip
    expert = tl.program_id(1).to(tl.int64)
    outputs = tl.program_id(0) * BLOCK_O + tl.arange(0, BLOCK_O)
    row = tl.zeros((BLOCK_O,), tl.float32)
    for first in range(0, I, BLOCK_I):
        inputs = first + tl.arange(0, BLOCK_I)
        keep = (outputs < O)[:, None] & (inputs < I)[None, :]
        pointers = weight_ptr + (expert * O + outputs)[:, None] * I + inputs[None, :]
        size = tl.abs(_load(pointers, keep, IS_ROUNDED))
        row = tl.maximum(row, tl.max(size, axis=1))
        # sizes are positive, and sort as their bits do
        column = tl.max(size, axis=0).to(tl.int32, bitcast=True)
        tl.atomic_max(column_ptr + expert * I + inputs, column, mask=inputs < I, sem="relaxed")
    tl.store(row_ptr + expert * O + outputs, power_of_two(row), mask=outputs < O)


@triton.jit
def _column_amax_kernel(weight_ptr, column_ptr, O: tl.constexpr, I: tl.constexpr, BLOCK: tl.constexpr):
    """For one way, perhaps of a single layer: a thread block for each tile."""
    expert = tl.program_id(2).to(tl.int64)
    outputs = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inputs = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    keep = (outputs < O)[:, None] & (inputs < I)[None, :]
    size = tl.abs(_load(weight_ptr + (expert * O + outputs)[:, None] * I + inputs[None, :], keep, False))
    column = tl.max(size, axis=0).to(tl.int32, bitcast=True)
    tl.atomic_max(column_ptr + expert * I + inputs, column, mask=inputs < I, sem="relaxed")


@triton.jit
def _cast_kernel(
    weight_ptr, row_ptr, column_ptr, codes_ptr, transposed_ptr, column_scales_ptr,
    O: tl.constexpr, I: tl.constexpr, BLOCK: tl.constexpr, IS_ROUNDED: tl.constexpr,
):  # fmt: skip
    expert = tl.program_id(1).to(tl.int64)
    across: tl.constexpr = (I + BLOCK - 1) // BLOCK
    outputs = tl.program_id(0) // across * BLOCK + tl.arange(0, BLOCK)
    inputs = tl.program_id(0) % across * BLOCK + tl.arange(0, BLOCK)
    is_output, is_input = outputs < O, inputs < I
    keep = is_output[:, None] & is_input[None, :]
    place = (expert * O + outputs)[:, None] * I + inputs[None, :]
    weight = _load(weight_ptr + place, keep, IS_ROUNDED)
    if codes_ptr is not None:
        row = tl.load(row_ptr + expert * O + outputs, mask=is_output, other=1.0)
        tl.store(codes_ptr + place, (weight * (1 / row)[:, None]).to(tl.float8e4nv), mask=keep)
    column = power_of_two(
        tl.load(column_ptr + expert * I + inputs, mask=is_input, other=0).to(tl.float32, bitcast=True)
    )
    transposed = tl.trans((weight * (1 / column)[None, :]).to(tl.float8e4nv))
    transposed_place = (expert * I + inputs)[:, None] * O + outputs[None, :]
    tl.store(transposed_ptr + transposed_place, transposed, mask=is_input[:, None] & is_output[None, :])
    tl.store(column_scales_ptr + expert * I + inputs, column, mask=is_input & (tl.program_id(0) < across))


@triton.jit
def _quantize_blocks_kernel(
    weight_ptr, codes_ptr, scales_ptr, transposed_ptr, transposed_scales_ptr,
    O: tl.constexpr, I: tl.constexpr, BLOCK: tl.constexpr, IS_ROUNDED: tl.constexpr,
):  # fmt: skip
    expert = tl.program_id(1).to(tl.int64)
    down: tl.constexpr = O // BLOCK
    across: tl.constexpr = I // BLOCK
    row, column = tl.program_id(0) // across, tl.program_id(0) % across
    outputs, inputs = row * BLOCK + tl.arange(0, BLOCK), column * BLOCK + tl.arange(0, BLOCK)
    place = (expert * O + outputs)[:, None] * I + inputs[None, :]
    weight = _load(weight_ptr + place, None, IS_ROUNDED)
    scale = power_of_two(tl.max(tl.max(tl.abs(weight), axis=1), axis=0))
    codes = (weight * (1 / scale)).to(tl.float8e4nv)
    if codes_ptr is not None:
        tl.store(codes_ptr + place, codes)
        tl.store(scales_ptr + (expert * down + row) * across + column, scale)
    if transposed_ptr is not None:
        tl.store(transposed_ptr + (expert * I + inputs)[:, None] * O + outputs[None, :], tl.trans(codes))
        tl.store(transposed_scales_ptr + (expert * across + column) * down + row, scale)


@gluon.jit
def _load_as(weight_ptr, place, IS_ROUNDED: gl.constexpr):
    weight = gl.load(weight_ptr + place)
    if IS_ROUNDED:
        weight = weight.to(gl.bfloat16)
    return weight.to(gl.float32)


@gluon.jit
def _store_transposed(
    transposed_ptr, weight, per_scale, expert, row, column, O: gl.constexpr, I: gl.constexpr, WRITTEN: gl.constexpr
):  # fmt: skip
    """Quantise a tile whose first output and input are these. `per_scale` is one number, or one an input."""
    outputs = row + gl.arange(0, weight.shape[0], gl.SliceLayout(1, WRITTEN))
    inputs = column + gl.arange(0, weight.shape[1], gl.SliceLayout(0, WRITTEN))
    place = gl.expand_dims((expert * I + inputs) * O, 0) + gl.expand_dims(outputs, 1)
    # numbers change places before they are codes: two that are packed together lie side by side in memory
    codes = (gl.convert_layout(weight, WRITTEN) * per_scale).to(gl.float8e4nv)
    gl.store(transposed_ptr + place, codes)


@gluon.jit
def _cast_in_registers_kernel(
    weight_ptr, row_ptr, column_ptr, codes_ptr, transposed_ptr, column_scales_ptr,
    O: gl.constexpr, I: gl.constexpr, BLOCK: gl.constexpr, IS_ROUNDED: gl.constexpr, READ: gl.constexpr,
    WRITTEN: gl.constexpr,
):  # fmt: skip
    expert = gl.program_id(1).to(gl.int64)
    across: gl.constexpr = I // BLOCK
    row, column = gl.program_id(0) // across * BLOCK, gl.program_id(0) % across * BLOCK
    outputs = row + gl.arange(0, BLOCK, gl.SliceLayout(1, READ))
    inputs = column + gl.arange(0, BLOCK, gl.SliceLayout(0, READ))
    place = gl.expand_dims((expert * O + outputs) * I, 1) + gl.expand_dims(inputs, 0)
    weight = _load_as(weight_ptr, place, IS_ROUNDED)
    if codes_ptr is not None:
        of_outputs = gl.load(row_ptr + expert * O + outputs)
        gl.store(codes_ptr + place, (weight * gl.expand_dims(1 / of_outputs, 1)).to(gl.float8e4nv))
    inputs = column + gl.arange(0, BLOCK, gl.SliceLayout(0, WRITTEN))
    of_inputs = power_of_two(gl.load(column_ptr + expert * I + inputs).to(gl.float32, bitcast=True))
    _store_transposed(transposed_ptr, weight, gl.expand_dims(1 / of_inputs, 0), expert, row, column, O, I, WRITTEN)
    if row == 0:
        gl.store(column_scales_ptr + expert * I + inputs, of_inputs)


@gluon.jit
def _quantize_blocks_in_registers_kernel(
    weight_ptr, codes_ptr, scales_ptr, transposed_ptr, transposed_scales_ptr,
    O: gl.constexpr, I: gl.constexpr, BLOCK: gl.constexpr, IS_ROUNDED: gl.constexpr, READ: gl.constexpr,
    WRITTEN: gl.constexpr,
):  # fmt: skip
    expert = gl.program_id(1).to(gl.int64)
    down: gl.constexpr = O // BLOCK
    across: gl.constexpr = I // BLOCK
    row, column = gl.program_id(0) // across, gl.program_id(0) % across
    outputs = row * BLOCK + gl.arange(0, BLOCK, gl.SliceLayout(1, READ))
    inputs = column * BLOCK + gl.arange(0, BLOCK, gl.SliceLayout(0, READ))
    place = gl.expand_dims((expert * O + outputs) * I, 1) + gl.expand_dims(inputs, 0)
    weight = _load_as(weight_ptr, place, IS_ROUNDED)
    scale = power_of_two(gl.max(gl.max(gl.abs(weight), axis=1), axis=0))
    if codes_ptr is not None:
        gl.store(codes_ptr + place, (weight * (1 / scale)).to(gl.float8e4nv))
        gl.store(scales_ptr + (expert * down + row) * across + column, scale)
    if transposed_ptr is not None:
        _store_transposed(transposed_ptr, weight, 1 / scale, expert, row * BLOCK, column * BLOCK, O, I, WRITTEN)
        gl.store(transposed_scales_ptr + (expert * across + column) * down + row, scale)


def new_codes(weight_eOI: Tensor, columns: int, *, transposed: bool) -> WeightCodes:
    """Memory for the codes and scales of a weight, one way."""
    num_experts, rows, width = weight_eOI.mT.shape if transposed else weight_eOI.shape
    blocks = (rows // columns, num_scales(width, columns)) if columns else (rows,)
    scales = weight_eOI.new_empty(num_experts, *blocks, dtype=torch.float32)
    return WeightCodes(weight_eOI.new_empty(num_experts, rows, width, dtype=CODES), scales)


def quantize_weight(weight_eOI: Tensor, dtype: torch.dtype, columns: int = WHOLE_ROW) -> list[WeightCodes]:
    """Weights of compute's dtype, or of a wider one, which are rounded to `dtype` first: -> codes in e4m3 and powers of
    two, as stored and transposed. With `columns`, blocks of so many outputs and inputs have a scale."""
    is_rounded = dtype == torch.bfloat16 and weight_eOI.dtype != dtype
    stored, transposed = (new_codes(weight_eOI, columns, transposed=way) for way in (False, True))
    quantize = _quantize_blocks if columns else _quantize_columns
    quantize(weight_eOI.contiguous(), stored, transposed, is_rounded)
    return [stored, transposed]


def quantize_one_way(weight_eOI: Tensor, columns: int = WHOLE_ROW, *, transposed: bool) -> WeightCodes:
    """One of those of `quantize_weight`, for a weight of compute's dtype. A row of zeros as stored has the smallest
    scale, as in `quantize_apart`."""
    weight_eOI = weight_eOI.contiguous()
    if not columns and not transposed:
        codes, scales = quantize_apart(weight_eOI.flatten(0, 1))
        return WeightCodes(codes.view(weight_eOI.shape), scales.view(weight_eOI.shape[:2]))
    made = new_codes(weight_eOI, columns, transposed=transposed)
    if columns:
        _quantize_blocks(weight_eOI, None if transposed else made, made if transposed else None, is_rounded=False)
    else:
        _quantize_columns(weight_eOI, None, made, is_rounded=False)
    return made


def _quantize_blocks(
    weight_eOI: Tensor, stored: WeightCodes | None, transposed: WeightCodes | None, is_rounded: bool
) -> None:
    num_experts, outputs, inputs = weight_eOI.shape
    kernel, layouts = _quantize_blocks_in_registers_kernel, LAYOUTS._asdict()
    if knobs.runtime.interpret:
        kernel, layouts = _quantize_blocks_kernel, {}
    kernel[(outputs // BLOCK * (inputs // BLOCK), num_experts)](
        weight_eOI, *(stored or (None, None)), *(transposed or (None, None)),
        O=outputs, I=inputs, BLOCK=BLOCK, IS_ROUNDED=is_rounded, num_warps=NUM_WARPS, **layouts,
    )  # fmt: skip


def _quantize_columns(
    weight_eOI: Tensor, stored: WeightCodes | None, transposed: WeightCodes, is_rounded: bool
) -> None:
    """Transposed with scales of columns, which are rows of the codes, and perhaps as stored."""
    num_experts, outputs, inputs = weight_eOI.shape
    codes, of_outputs = stored or (None, None)
    amax_eI, sizes = weight_eOI.new_zeros(num_experts, inputs, dtype=torch.int32), {"O": outputs, "I": inputs}
    if stored is None:
        tile = 64
        tiles = triton.cdiv(outputs, tile), triton.cdiv(inputs, tile), num_experts
        _column_amax_kernel[tiles](weight_eOI, amax_eI, **sizes, BLOCK=tile, num_warps=4)
    else:
        _amax_kernel[(triton.cdiv(outputs, BLOCK), num_experts)](
            weight_eOI, of_outputs, amax_eI, **sizes, BLOCK_O=BLOCK, BLOCK_I=BLOCK, IS_ROUNDED=is_rounded, num_warps=4
        )
    kernel, cut = _cast_in_registers_kernel, {"BLOCK": BLOCK, "num_warps": NUM_WARPS, **LAYOUTS._asdict()}
    if knobs.runtime.interpret or outputs % BLOCK or inputs % BLOCK:
        kernel, cut = _cast_kernel, {"BLOCK": 64, "num_warps": 4}
    grid = triton.cdiv(outputs, cut["BLOCK"]) * triton.cdiv(inputs, cut["BLOCK"]), num_experts
    kernel[grid](weight_eOI, of_outputs, amax_eI, codes, *transposed, **sizes, IS_ROUNDED=is_rounded, **cut)
