"""A linear layer whose frozen weight is stored as codes.

T tokens · O output width · I input width

Physics: 2·T·O·I FLOPs in compute's dtype, and 3·O·I bytes for the weight's numbers, which are made for the product and
freed after it, in forward and again in backward. Kept for backward are the codes, which are there anyway: no input, for
the weight has no gradient. The reference is PyTorch's product with `numbers_reference`.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.flop_counter import register_flop_formula

from titan_moe.kernels.autocast import as_operand
from titan_moe.kernels.formats.stored import numbers_of


@torch.library.custom_op("titan_moe::stored_linear", mutates_args=())
def _forward(x_TI: Tensor, codes_OI: Tensor, scales: Tensor) -> Tensor:
    return F.linear(x_TI, numbers_of(codes_OI, scales, x_TI.dtype))


_forward.register_fake(lambda x_TI, codes_OI, scales: x_TI.new_empty(x_TI.shape[0], codes_OI.shape[0]))


@torch.library.custom_op("titan_moe::stored_linear_dx", mutates_args=())
def _backward(dy_TO: Tensor, codes_OI: Tensor, scales: Tensor) -> Tensor:
    return dy_TO @ numbers_of(codes_OI, scales, dy_TO.dtype)


_backward.register_fake(lambda dy_TO, codes_OI, scales: dy_TO.new_empty(dy_TO.shape[0], codes_OI.shape[1]))


def _save(ctx: Any, inputs: tuple[Tensor, ...], output: Tensor) -> None:
    ctx.save_for_backward(*inputs[1:])


_forward.register_autograd(
    lambda ctx, dy_TO: (_backward(dy_TO.contiguous(), *ctx.saved_tensors), None, None), setup_context=_save
)


def stored_linear(x: Tensor, codes_OI: Tensor, scales: Tensor) -> Tensor:
    """[..., I] -> [..., O]."""
    return _forward(as_operand(x).flatten(0, -2), codes_OI, scales).unflatten(0, x.shape[:-1])


@register_flop_formula(torch.ops.titan_moe.stored_linear)
def _count(x_shape: tuple[int, int], codes_shape: tuple[int, int], *_: Any, **__: Any) -> int:
    return 2 * x_shape[0] * codes_shape[0] * codes_shape[1]


@register_flop_formula(torch.ops.titan_moe.stored_linear_dx)
def _count_dx(dy_shape: tuple[int, int], codes_shape: tuple[int, int], *_: Any, **__: Any) -> int:
    return 2 * dy_shape[0] * codes_shape[0] * codes_shape[1]
