"""A linear layer with low-rank factors beside its weight (LoRA, arXiv:2106.09685), whose sum is a GEMM's own.

T tokens · I input width · O output width of all matrices · M matrices, one below the other · r rank · X all ranks, M·r

Physics: 2·T·r·(M·I + O) FLOPs beside 2·T·I·O. What factors make is written first, 2·T·O bytes, and the GEMM of the
weight adds its products to it, for which it reads 2·T·O bytes while it multiplies. Results apart would be joined,
written and added in passes of 6·T·O to 10·T·O bytes. The gradient of x is such a sum, too. Kept for backward are x and
the low products. A weight of codes becomes numbers for one GEMM (kernels/formats/stored.py); another one, and a bias,
may train. GEMMs are PyTorch's, on any device.
"""

from collections.abc import Iterator, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.flop_counter import register_flop_formula

from titan_moe.kernels.autocast import as_operand
from titan_moe.kernels.formats.stored import numbers_of


def adapted_linear_reference(
    x: Tensor, weight_OI: Tensor, bias_O: Tensor | None, a_XI: Tensor, b_Or: Tensor, rows: Sequence[int], scale: float
) -> Tensor:
    """The definition, differentiable: x times W + scale · B A of each matrix, which have so many rows."""
    pairs = zip(a_XI.split(b_Or.shape[1]), b_Or.split(list(rows)), strict=True)
    return F.linear(x, weight_OI + scale * torch.cat([b @ a for a, b in pairs]), bias_O)


def _numbers(weight_OI: Tensor, scales: Tensor | None, dtype: torch.dtype) -> Tensor:
    return weight_OI if scales is None else numbers_of(weight_OI, scales, dtype)


def _parts(wide_TO: Tensor, low_TX: Tensor, b_Or: Tensor, rows: Sequence[int]) -> Iterator[tuple[Tensor, ...]]:
    """By matrix: columns of what is wide, columns of low products, and B. All are views."""
    sizes = list(rows)
    yield from zip(wide_TO.split(sizes, dim=1), low_TX.split(b_Or.shape[1], dim=1), b_Or.split(sizes), strict=True)


@torch.library.custom_op("titan_moe::adapted_linear", mutates_args=())
def _forward(
    x_TI: Tensor, weight_OI: Tensor, scales: Tensor | None, bias_O: Tensor | None, a_XI: Tensor, b_Or: Tensor,
    rows: Sequence[int], scale: float,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """y_TO, and the low products times the scale."""
    low_TX = (x_TI @ a_XI.T).mul_(scale)
    y_TO = x_TI.new_empty(len(x_TI), len(b_Or))
    for y_To, low_Tr, b_or in _parts(y_TO, low_TX, b_Or, rows):
        torch.mm(low_Tr, b_or.T, out=y_To)
    y_TO.addmm_(x_TI, _numbers(weight_OI, scales, x_TI.dtype).T)
    return y_TO if bias_O is None else y_TO.add_(bias_O), low_TX


@_forward.register_fake
def _(x_TI: Tensor, weight_OI: Any, scales: Any, bias_O: Any, a_XI: Tensor, b_Or: Tensor, rows: Any, scale: Any) -> Any:
    return x_TI.new_empty(x_TI.shape[0], b_Or.shape[0]), x_TI.new_empty(x_TI.shape[0], a_XI.shape[0])


@torch.library.custom_op("titan_moe::adapted_linear_backward", mutates_args=())
def _backward(
    dy_TO: Tensor, x_TI: Tensor, weight_OI: Tensor, scales: Tensor | None, a_XI: Tensor, b_Or: Tensor, low_TX: Tensor,
    rows: Sequence[int], scale: float, needs_x: bool,
) -> list[Tensor]:  # fmt: skip
    """dx_TI, empty if it is not needed, and the gradients of both factors."""
    dlow_TX, db_Or = torch.empty_like(low_TX), torch.empty_like(b_Or)
    for (dy_To, dlow_Tr, b_or), low_Tr, db_or in zip(
        _parts(dy_TO, dlow_TX, b_Or, rows), low_TX.split(b_Or.shape[1], dim=1), db_Or.split(list(rows)), strict=True
    ):
        torch.mm(dy_To, b_or, out=dlow_Tr)
        torch.mm(dy_To.T, low_Tr, out=db_or)
    dlow_TX.mul_(scale)
    dx_TI = x_TI.new_empty(0)
    if needs_x:
        dx_TI = (dlow_TX @ a_XI).addmm_(dy_TO, _numbers(weight_OI, scales, x_TI.dtype))
    return [dx_TI, dlow_TX.T @ x_TI, db_Or]


@_backward.register_fake
def _(
    dy_TO: Any, x_TI: Tensor, weight_OI: Any, scales: Any, a_XI: Tensor, b_Or: Tensor, low_TX: Any, rows: Any,
    scale: Any, needs_x: bool,
) -> list[Tensor]:  # fmt: skip
    return [x_TI.new_empty(x_TI.shape if needs_x else (0,)), torch.empty_like(a_XI), torch.empty_like(b_Or)]


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    x_TI, weight_OI, scales, _, a_XI, b_Or, ctx.rows, ctx.scale = inputs
    ctx.save_for_backward(x_TI, weight_OI, scales, a_XI, b_Or, output[1])


def _gradients(ctx: Any, dy_TO: Tensor, _: Tensor | None) -> tuple[Tensor | None, ...]:
    needs_x, needs_weight, _, needs_bias = (bool(need) for need in ctx.needs_input_grad[:4])
    dy_TO, (x_TI, *saved) = dy_TO.contiguous(), ctx.saved_tensors  # recomputed ones can be read once
    dx_TI, da_XI, db_Or = _backward(dy_TO, x_TI, *saved, ctx.rows, ctx.scale, needs_x)
    dweight_OI = dy_TO.T @ x_TI if needs_weight else None
    dbias_O = dy_TO.sum(0) if needs_bias else None
    return dx_TI if needs_x else None, dweight_OI, None, dbias_O, da_XI, db_Or, None, None


_forward.register_autograd(_gradients, setup_context=_save)


def adapted_linear(
    x: Tensor, weight_OI: Tensor, scales: Tensor | None, bias_O: Tensor | None, a_XI: Tensor, b_Or: Tensor,
    rows: Sequence[int], scale: float,
) -> Tensor:  # fmt: skip
    """[..., I] -> [..., O]. The weight is in compute's dtype, or frozen codes with `scales`; its matrices have so many
    `rows` each."""
    x_TI, *operands = (as_operand(each) for each in (x.flatten(0, -2), weight_OI, a_XI, b_Or))
    weight_OI, a_XI, b_Or = operands
    bias_O = bias_O if bias_O is None else as_operand(bias_O)
    y_TO, _ = _forward(x_TI, weight_OI, scales, bias_O, a_XI, b_Or, rows, scale)
    return y_TO.unflatten(0, x.shape[:-1])


@register_flop_formula(torch.ops.titan_moe.adapted_linear)
def _count(
    x_shape: Any, weight_shape: Any, scales: Any, bias: Any, a_shape: Any, b_shape: Any, *_: Any, **__: Any
) -> int:
    (tokens, width), (outputs, rank) = x_shape, b_shape
    return 2 * tokens * (width * outputs + a_shape[0] * width + outputs * rank)


@register_flop_formula(torch.ops.titan_moe.adapted_linear_backward)
def _count_backward(
    dy: Any, x_shape: Any, weight: Any, scales: Any, a_shape: Any, b_shape: Any, low: Any, rows: Any, scale: Any,
    needs_x: bool, *_: Any, **__: Any,
) -> int:  # fmt: skip
    (tokens, width), (outputs, rank) = x_shape, b_shape
    of_factors = 2 * outputs * rank + a_shape[0] * width
    of_x = (outputs + a_shape[0]) * width if needs_x else 0
    return 2 * tokens * (of_factors + of_x)
