"""Weights of experts in fp8, as stored and transposed.

e experts · O output width · I input width

The matrix units read fp8 along the summed dimension alone. Forward sums over the input width, the gradient of rows over
the output width: so each weight exists twice, once transposed, with scales along the dimension that stays. Together
they have the bytes of one weight in bf16. They are made once an optimizer step where weights are kept that long.

Physics: memory-bound; two passes read 2·(2 or 4)·e·O·I bytes and write 2·e·O·I.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from titan_moe.kernels.experts.fp8.rows import CODES, power_of_two
from titan_moe.kernels.formats.casts import quantize


class QuantizedWeight(NamedTuple):
    """A weight of all experts: code · scale is the number."""

    codes_eOI: Tensor
    scales_eO: Tensor
    transposed_eIO: Tensor
    transposed_scales_eI: Tensor


def quantize_weight_reference(weight_eOI: Tensor, dtype: torch.dtype) -> QuantizedWeight:
    """The definition."""
    both = (weight_eOI.to(dtype), weight_eOI.to(dtype).mT.contiguous())
    ways = [quantize(weight, "fp8_rowwise", "weight", dim=2, power_of_two_scales=True) for weight in both]
    return QuantizedWeight(*(tensor for codes, scales, _ in ways for tensor in (codes, scales[..., 0])))


@triton.jit
def _load(pointers, keep, IS_ROUNDED: tl.constexpr):
    weight = tl.load(pointers, mask=keep, other=0.0)
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
    row = tl.load(row_ptr + expert * O + outputs, mask=is_output, other=1.0)
    column = power_of_two(
        tl.load(column_ptr + expert * I + inputs, mask=is_input, other=0).to(tl.float32, bitcast=True)
    )
    element: tl.constexpr = codes_ptr.dtype.element_ty
    tl.store(codes_ptr + place, (weight * (1 / row)[:, None]).to(element), mask=keep)
    transposed = tl.trans((weight * (1 / column)[None, :]).to(element))
    transposed_place = (expert * I + inputs)[:, None] * O + outputs[None, :]
    tl.store(transposed_ptr + transposed_place, transposed, mask=is_input[:, None] & is_output[None, :])
    tl.store(column_scales_ptr + expert * I + inputs, column, mask=is_input & (tl.program_id(0) < across))


def quantize_weight(weight_eOI: Tensor, dtype: torch.dtype) -> QuantizedWeight:
    """Weights of compute's dtype, or of a wider one, which are rounded to `dtype` first: -> codes in e4m3 and powers of
    two, along both dimensions."""
    is_rounded = dtype == torch.bfloat16 and weight_eOI.dtype != dtype
    weight_eOI = weight_eOI.contiguous()
    num_experts, outputs, inputs = weight_eOI.shape
    codes, transposed = (
        weight_eOI.new_empty(shape, dtype=CODES) for shape in (weight_eOI.shape, (num_experts, inputs, outputs))
    )
    rows, columns = (weight_eOI.new_empty(num_experts, width, dtype=torch.float32) for width in (outputs, inputs))
    amax_eI = weight_eOI.new_zeros(num_experts, inputs, dtype=torch.int32)
    block_o, block_i, block = 64, 128, 64
    _amax_kernel[(triton.cdiv(outputs, block_o), num_experts)](
        weight_eOI,
        rows,
        amax_eI,
        O=outputs,
        I=inputs,
        BLOCK_O=block_o,
        BLOCK_I=block_i,
        IS_ROUNDED=is_rounded,
        num_warps=4,
    )
    _cast_kernel[(triton.cdiv(outputs, block) * triton.cdiv(inputs, block), num_experts)](
        weight_eOI,
        rows,
        amax_eI,
        codes,
        transposed,
        columns,
        O=outputs,
        I=inputs,
        BLOCK=block,
        IS_ROUNDED=is_rounded,
        num_warps=4,
    )
    return QuantizedWeight(codes, rows, transposed, columns)
