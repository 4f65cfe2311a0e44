"""A linear layer whose three GEMMs have low-precision formats, on any device.

T tokens · I input width · O output width

Physics: three products in fp32 and a pass of rounding for each operand. This is the definition of a format and what
runs where no hardware has it; it is not fast. The products must not be TF32, which has fewer bits than a rounded
operand (`torch.set_float32_matmul_precision("highest")`, the default).

It is an operation, so that a compiler does not touch its arithmetic: eager and compiled runs give the same bits.
"""

from typing import Any, cast

import torch
from torch import Tensor
from torch.utils.flop_counter import register_flop_formula

from titan_moe.config.formats import Format, GemmFormats
from titan_moe.kernels.formats.operands import Rounding, round_dgrad, round_fprop, round_wgrad
from titan_moe.kernels.registry import Kernel, register


def emulated_linear(
    x: Tensor, weight_OI: Tensor, formats: GemmFormats, power_of_two_scales: bool = False, in_triton: bool = False
) -> Tensor:
    """y = x · Wᵀ, each GEMM with both of its operands rounded to its format, by Triton kernels if asked for.

    Shapes: x [..., I] -> [..., O] in x's dtype; the gradient of the weight is in the weight's.
    """
    names = formats.fprop, formats.dgrad, formats.wgrad
    y_TO = linear(x.flatten(0, -2), weight_OI, *names, power_of_two_scales, in_triton)
    return y_TO.unflatten(0, x.shape[:-1])


def linear_reference(
    x_TI: Tensor,
    weight_OI: Tensor,
    fprop: str,
    dgrad: str,
    wgrad: str,
    power_of_two_scales: bool = False,
    in_triton: bool = False,
) -> Tensor:
    """The product, not rounded."""
    assert fprop == dgrad == wgrad == "compute", "formats are tested in tests/kernels/formats/"
    return x_TI @ weight_OI.T


@torch.library.custom_op("titan_moe::emulated_linear", mutates_args=())
def linear(
    x_TI: Tensor,
    weight_OI: Tensor,
    fprop: str,
    dgrad: str,
    wgrad: str,
    power_of_two_scales: bool = False,
    in_triton: bool = False,
) -> Tensor:
    """`emulated_linear` of a matrix."""
    left_TI, right_OI = round_fprop(x_TI, weight_OI, rounding(fprop, power_of_two_scales, in_triton))
    return (left_TI @ right_OI.T).to(x_TI.dtype)


@linear.register_fake
def _(x_TI: Tensor, weight_OI: Tensor, *_: Any) -> Tensor:
    return x_TI.new_empty(x_TI.shape[0], weight_OI.shape[0])


@torch.library.custom_op("titan_moe::emulated_linear_dx", mutates_args=())
def _linear_dx(grad_TO: Tensor, weight_OI: Tensor, dgrad: str, power_of_two_scales: bool, in_triton: bool) -> Tensor:
    left_TO, right_OI = round_dgrad(grad_TO, weight_OI, rounding(dgrad, power_of_two_scales, in_triton))
    return (left_TO @ right_OI).to(grad_TO.dtype)


@_linear_dx.register_fake
def _(grad_TO: Tensor, weight_OI: Tensor, *_: Any) -> Tensor:
    return grad_TO.new_empty(grad_TO.shape[0], weight_OI.shape[1])


@torch.library.custom_op("titan_moe::emulated_linear_dw", mutates_args=())
def _linear_dw(
    grad_TO: Tensor, x_TI: Tensor, wgrad: str, power_of_two_scales: bool, in_triton: bool, dtype: torch.dtype
) -> Tensor:
    left_TO, right_TI = round_wgrad(grad_TO, x_TI, rounding(wgrad, power_of_two_scales, in_triton))
    return (left_TO.T @ right_TI).to(dtype)


@_linear_dw.register_fake
def _(
    grad_TO: Tensor, x_TI: Tensor, wgrad: str, power_of_two_scales: bool, in_triton: bool, dtype: torch.dtype
) -> Tensor:
    return grad_TO.new_empty(grad_TO.shape[1], x_TI.shape[1], dtype=dtype)


def rounding(format: str, power_of_two_scales: bool, in_triton: bool) -> Rounding:
    """Of the format that an operation was given by name."""
    return Rounding(cast(Format, format), power_of_two_scales, in_triton=in_triton)


def _save(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    x_TI, weight_OI, _, ctx.dgrad, ctx.wgrad, *ctx.options = inputs
    ctx.save_for_backward(x_TI, weight_OI)


def _backward(ctx: Any, grad_TO: Tensor) -> tuple[Tensor | None, ...]:
    x_TI, weight_OI = ctx.saved_tensors
    needs_x, needs_weight = ctx.needs_input_grad[:2]
    dx_TI, dweight = None, None
    if needs_x:
        dx_TI = _linear_dx(grad_TO, weight_OI, ctx.dgrad, *ctx.options)
    if needs_weight:
        dweight = _linear_dw(grad_TO, x_TI, ctx.wgrad, *ctx.options, weight_OI.dtype)
    return dx_TI, dweight, *[None] * 5


linear.register_autograd(_backward, setup_context=_save)


@register_flop_formula(torch.ops.titan_moe.emulated_linear)
def _count(x_shape: tuple[int, int], weight_shape: tuple[int, int], *_: Any, **__: Any) -> int:
    return 2 * x_shape[0] * weight_shape[0] * weight_shape[1]


@register_flop_formula(torch.ops.titan_moe.emulated_linear_dx)
def _count_dx(grad_shape: tuple[int, int], weight_shape: tuple[int, int], *_: Any, **__: Any) -> int:
    return 2 * grad_shape[0] * weight_shape[0] * weight_shape[1]


@register_flop_formula(torch.ops.titan_moe.emulated_linear_dw)
def _count_dw(grad_shape: tuple[int, int], x_shape: tuple[int, int], *_: Any, **__: Any) -> int:
    return 2 * grad_shape[0] * grad_shape[1] * x_shape[1]


register(Kernel("emulated_linear", linear, linear_reference))
