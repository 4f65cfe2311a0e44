"""Weights of experts in fp8, as stored and transposed.

e experts · O output width · I input width · o, i blocks of 128 along each

The matrix units read fp8 along the summed dimension alone. Forward sums over the input width, the gradient of rows over
the output width: so each weight exists twice, once transposed, with scales along the dimension that stays. Together
they have the bytes of one weight in bf16. They are made once an optimizer step where weights are kept that long.

A block of 128 x 128 has one scale both ways, so transposed codes are the same codes: they are quantised once, and
written twice.

Physics: memory-bound; two passes read 2·(2 or 4)·e·O·I bytes and write 2·e·O·I. Blocks need one.
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from titan_moe.kernels.experts.fp8.packed import BLOCK, CODES, WHOLE_ROW, num_scales
from titan_moe.kernels.experts.fp8.rows import power_of_two
from titan_moe.kernels.formats.casts import quantize


class QuantizedWeight(NamedTuple):
    """A weight of all experts: code · scale is the number."""

    codes_eOI: Tensor
    scales: Tensor
    """[e, O], with blocks [e, o, i]."""
    transposed_eIO: Tensor
    transposed_scales: Tensor
    """[e, I], with blocks [e, i, o]."""

    @property
    def columns(self) -> int:
        """Those of a block that has a scale; 0 for one scale an output."""
        return BLOCK if self.scales.ndim == 3 else WHOLE_ROW


def quantize_weight_reference(weight_eOI: Tensor, dtype: torch.dtype, columns: int = WHOLE_ROW) -> QuantizedWeight:
    """The definition."""
    both = (weight_eOI.to(dtype), weight_eOI.to(dtype).mT.contiguous())
    if columns:
        ways = [quantize(weight, "fp8_blockwise", "weight", dim=2, power_of_two_scales=True) for weight in both]
        return QuantizedWeight(*(tensor for codes, scales, _ in ways for tensor in (codes, scales)))
    ways = [quantize(weight, "fp8_rowwise", "weight", dim=2, power_of_two_scales=True) for weight in both]
    return QuantizedWeight(*(tensor for codes, scales, _ in ways for tensor in (codes, scales[..., 0])))


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


def new_quantized_weight(weight_eOI: Tensor, columns: int) -> QuantizedWeight:
    """Memory for the codes and scales of a weight."""
    _, outputs, inputs = weight_eOI.shape
    return QuantizedWeight(*_new(weight_eOI, outputs, inputs, columns), *_new(weight_eOI, inputs, outputs, columns))


def _new(weight_eOI: Tensor, rows: int, width: int, columns: int) -> tuple[Tensor, Tensor]:
    num_experts = len(weight_eOI)
    blocks = (rows // columns, num_scales(width, columns)) if columns else (rows,)
    scales = weight_eOI.new_empty(num_experts, *blocks, dtype=torch.float32)
    return weight_eOI.new_empty(num_experts, rows, width, dtype=CODES), scales


def quantize_weight(weight_eOI: Tensor, dtype: torch.dtype, columns: int = WHOLE_ROW) -> QuantizedWeight:
    """Weights of compute's dtype, or of a wider one, which are rounded to `dtype` first: -> codes in e4m3 and powers of
    two, along both dimensions. With `columns`, blocks of so many outputs and inputs have a scale."""
    is_rounded = dtype == torch.bfloat16 and weight_eOI.dtype != dtype
    weight_eOI = weight_eOI.contiguous()
    num_experts, outputs, inputs = weight_eOI.shape
    quantized = new_quantized_weight(weight_eOI, columns)
    if columns:
        _quantize_blocks(weight_eOI, quantized, columns, is_rounded)
        return quantized
    codes, of_outputs, transposed, of_inputs = quantized
    amax_eI = weight_eOI.new_zeros(num_experts, inputs, dtype=torch.int32)
    block_o, block_i, block = 64, 128, 64
    _amax_kernel[(triton.cdiv(outputs, block_o), num_experts)](
        weight_eOI,
        of_outputs,
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
        of_outputs,
        amax_eI,
        codes,
        transposed,
        of_inputs,
        O=outputs,
        I=inputs,
        BLOCK=block,
        IS_ROUNDED=is_rounded,
        num_warps=4,
    )
    return quantized


def quantize_in_blocks(weight_eOI: Tensor, *, is_transposed: bool) -> tuple[Tensor, Tensor]:
    """Codes and scales of `quantize_weight` with blocks of 128, as stored or transposed: where the other GEMM quantises
    the weight again, because neither is kept."""
    weight_eOI = weight_eOI.contiguous()
    _, outputs, inputs = weight_eOI.shape
    rows, width = (inputs, outputs) if is_transposed else (outputs, inputs)
    made = _new(weight_eOI, rows, width, BLOCK)
    both = (None, None, *made) if is_transposed else (*made, None, None)
    _quantize_blocks(weight_eOI, both, BLOCK, is_rounded=False)
    return made


def _quantize_blocks(weight_eOI: Tensor, out: Sequence[Tensor | None], columns: int, is_rounded: bool) -> None:
    """`out` is in the order of `QuantizedWeight`; what is None is not written."""
    num_experts, outputs, inputs = weight_eOI.shape
    _quantize_blocks_kernel[(outputs // columns * (inputs // columns), num_experts)](
        weight_eOI, *out, O=outputs, I=inputs, BLOCK=columns, IS_ROUNDED=is_rounded, num_warps=8
    )
