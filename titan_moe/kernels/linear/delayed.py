"""A linear layer whose weight gradient is delayed inside `WeightGradQueue.delaying`.

T tokens · I input width · O output width

The GEMMs are those of `torch.nn.functional.linear` and its backward, with the same bits. The gradient of the bias, a
sum over tokens, is not delayed.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from titan_moe.kernels.delayed_weight_grads import Delay, WeightGradQueue


class _Delayed(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, delay: Delay, x_TI: Tensor, weight_OI: Tensor, bias_O: Tensor | None) -> Tensor:
        ctx.delay = delay
        ctx.save_for_backward(x_TI, weight_OI)
        return F.linear(x_TI, weight_OI, bias_O)

    @staticmethod
    def backward(ctx: Any, dy_TO: Tensor) -> tuple[Tensor | None, ...]:
        x_TI, weight_OI = ctx.saved_tensors
        x_TI = x_TI.detach()  # without its graph
        ctx.delay(lambda: [dy_TO.T @ x_TI])
        dx_TI = dy_TO @ weight_OI if ctx.needs_input_grad[1] else None
        dbias_O = dy_TO.sum(0) if ctx.needs_input_grad[3] else None
        return None, dx_TI, None, dbias_O


def queued_linear(x: Tensor, weight_OI: Tensor, bias_O: Tensor | None, queue: WeightGradQueue) -> Tensor:
    """`torch.nn.functional.linear`: [..., I] -> [..., O]."""
    if queue.pending is None:
        return F.linear(x, weight_OI, bias_O)
    (weight_OI,), delay = queue.pending.delay(weight_OI)
    if delay is None:
        return F.linear(x, weight_OI, bias_O)
    return _Delayed.apply(delay, x.flatten(0, -2), weight_OI, bias_O).unflatten(0, x.shape[:-1])
