"""A linear layer that keeps its input as codes with scales: what is the same for every way to scale.

T tokens · I input width · O output width

It is an operation each way. Backward gets the weight itself: no codes of it are kept while FSDP has freed it.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils.flop_counter import register_flop_formula

from titan_moe.kernels.experts.fp8.packed import CODES, num_scales

Forward = Callable[[Tensor, Tensor], tuple[Tensor, Tensor, Tensor]]
"""x_TI, weight_OI -> y_TO, and codes and scales of x."""
Backward = Callable[[Tensor, Tensor, Tensor, Tensor, list[bool]], tuple[Tensor, Tensor]]
"""dy_TO, codes and scales of x, weight_OI, whether dx and dW are needed -> both, empty where they are not."""


def linear_reference(x: Tensor, weight_OI: Tensor) -> Tensor:
    """The product, not rounded."""
    return x @ weight_OI.T


def linear_op(name: str, forward: Forward, backward: Backward, columns: int) -> Forward:
    """Register both as `titan_moe::<name>` and `titan_moe::<name>_backward`, and return the differentiable one.

    `columns` are those of x that share a scale, as in kernels/experts/fp8/packed.py: scales are [T], or [T, I /
    columns].
    """
    op = torch.library.custom_op(f"titan_moe::{name}", forward, mutates_args=())
    backward_op = torch.library.custom_op(f"titan_moe::{name}_backward", backward, mutates_args=())

    def empty_forward(x_TI: Tensor, weight_OI: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        num_tokens, width = x_TI.shape
        scales = (num_tokens, num_scales(width, columns)) if columns else (num_tokens,)
        codes_TI = torch.empty_like(x_TI, dtype=CODES)
        return x_TI.new_empty(num_tokens, weight_OI.shape[0]), codes_TI, x_TI.new_empty(scales, dtype=torch.float32)

    def gradients(ctx: Any, dy_TO: Tensor, *_: None) -> tuple[Tensor | None, ...]:
        needs = [bool(need) for need in ctx.needs_input_grad[:2]]
        grads = backward_op(dy_TO.contiguous(), *ctx.saved_tensors, needs)
        return tuple(grad if need else None for grad, need in zip(grads, needs, strict=True))

    op.register_fake(empty_forward)
    backward_op.register_fake(_empty_backward)
    op.register_autograd(gradients, setup_context=_save)
    register_flop_formula(getattr(torch.ops.titan_moe, name))(_count)
    register_flop_formula(getattr(torch.ops.titan_moe, f"{name}_backward"))(_count_backward)
    return op


def _empty_backward(
    dy_TO: Tensor, codes_TI: Tensor, scales: Tensor, weight_OI: Tensor, needs: list[bool]
) -> tuple[Tensor, Tensor]:
    dx_shape, dweight_shape = codes_TI.shape if needs[0] else (0,), weight_OI.shape if needs[1] else (0,)
    return dy_TO.new_empty(dx_shape), weight_OI.new_empty(dweight_shape)


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    _, codes_TI, scales = output
    ctx.mark_non_differentiable(codes_TI, scales)
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(codes_TI, scales, inputs[1])


def _count(x: Any, weight: Any, **_: Any) -> int:
    return 2 * x[0] * x[1] * weight[0]


def _count_backward(dy: Any, codes: Any, scales: Any, weight: Any, needs: Any, **_: Any) -> int:
    return 2 * dy[0] * weight[0] * weight[1] * sum(needs)
