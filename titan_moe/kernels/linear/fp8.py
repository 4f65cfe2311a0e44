"""A linear layer with its three GEMMs in fp8, on GPUs with matrix units for it.

T tokens · I input width · O output width

    y  = x · Wᵀ    sums over I; a scale for each row of x and of W
    dx = dy · W    sums over O; a scale for each row of dy and each column of W
    dW = dyᵀ · x   sums over T, where scales of rows cannot leave the sum

For dW the scales of both rows of a token move to the codes of dy, and one scale remains, the largest product of a
token. All are powers of two: only codes that fall below the smallest one are rounded again, as with experts
(kernels/experts/fp8/transposed.py). So x and dy are quantised once, by rows, and their codes transposed. Sums of the
matrix units have about 14 bits (kernels/experts/fp8/passes.py).

Physics: the GEMMs have twice the rate of bf16; passes read and write (3 + 2)·T·(I + O) bytes. Kept for backward are
codes and scales of x, half of bf16's bytes. References of the casts are in transposed.py here, and in rows.py and
weights.py of experts. kernels/formats/linear.py, the definition of "fp8_rowwise", has a scale for each column of both
operands of dW.
"""

import torch
from torch import Tensor

from titan_moe.kernels.experts.fp8.packed import WHOLE_ROW
from titan_moe.kernels.experts.fp8.rows import SMALLEST_SCALE, quantize_apart
from titan_moe.kernels.experts.fp8.weights import quantize_one_way
from titan_moe.kernels.linear.quantized import linear_op, linear_reference
from titan_moe.kernels.linear.transposed import transpose
from titan_moe.kernels.registry import Kernel, register


def fp8_linear(x: Tensor, weight_OI: Tensor) -> Tensor:
    """y = x · Wᵀ: [..., I] -> [..., O] in x's dtype; the gradient of the weight is in the weight's.

    I, O and the number of tokens are multiples of 16.
    """
    y_TO, *_ = _linear(x.flatten(0, -2).contiguous(), weight_OI)
    return y_TO.unflatten(0, x.shape[:-1])


def _forward(x_TI: Tensor, weight_OI: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """y, and codes and scales of x."""
    (codes_TI, scales_T), (codes_OI, scales_O) = quantize_apart(x_TI), quantize_apart(weight_OI.contiguous())
    return _product(codes_TI, codes_OI, scales_T, scales_O, x_TI.dtype), codes_TI, scales_T


def _backward(
    dy_TO: Tensor, codes_TI: Tensor, scales_T: Tensor, weight_OI: Tensor, needs: list[bool]
) -> tuple[Tensor, Tensor]:
    """Gradients of x and of the weight; empty ones where they are not needed."""
    (codes_TO, dy_scales_T), (num_outputs, num_inputs) = quantize_apart(dy_TO), weight_OI.shape
    dx_TI, dweight_OI = dy_TO.new_empty(0), weight_OI.new_empty(0)
    if needs[0]:
        weight = quantize_one_way(weight_OI[None], transposed=True)
        dx_TI = _product(codes_TO, weight.codes[0], dy_scales_T, weight.scales[0], dy_TO.dtype)
    if needs[1] and not len(dy_TO):
        dweight_OI = torch.zeros_like(weight_OI)
    elif needs[1]:
        products_T = dy_scales_T * scales_T
        most = products_T.amax().clamp(min=SMALLEST_SCALE)  # products may underflow to zero
        columns_OT, columns_IT = transpose(codes_TO, products_T / most), transpose(codes_TI)
        scales_O, ones_I = most.expand(num_outputs), torch.ones_like(most).expand(num_inputs)
        dweight_OI = _product(columns_OT, columns_IT, scales_O, ones_I, weight_OI.dtype)
    return dx_TI, dweight_OI


def _product(left_MK: Tensor, right_NK: Tensor, scales_M: Tensor, scales_N: Tensor, dtype: torch.dtype) -> Tensor:
    """Codes times codes, summed over K, times the scales of both: [M, N]."""
    if not left_MK.is_cuda:  # in Triton's interpreter
        return ((left_MK.float() @ right_NK.float().T) * scales_M[:, None] * scales_N).to(dtype)
    scales = scales_M[:, None].contiguous(), scales_N[None].contiguous()
    product_MN = torch._scaled_mm(left_MK, right_NK.T, *scales, out_dtype=torch.bfloat16, use_fast_accum=True)
    return product_MN.to(dtype)


_linear = linear_op("fp8_linear", _forward, _backward, WHOLE_ROW)
register(Kernel("fp8_linear", fp8_linear, linear_reference, needs_triton=True))
