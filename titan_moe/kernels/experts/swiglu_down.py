"""SwiGLU and the projection behind it, for what is not routed: dense layers and shared experts.

T tokens · F hidden width · D model width

Physics: 2·T·F·D FLOPs forward and twice that backward; memory-bound around it, 3·T·F elements forward, 6·T·F backward.
Only the pre-activation is kept for backward: the pass that computes its gradient also computes the activation again,
from the same inputs. The GEMMs are cuBLAS's, the pass is Triton's.
"""

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from titan_moe.kernels.delayed_weight_grads import Delay, WeightGradQueue
from titan_moe.kernels.device import refuse_cpu
from titan_moe.kernels.experts.swiglu import swiglu
from titan_moe.kernels.experts.swiglu_backward import swiglu_backward
from titan_moe.kernels.linear.delayed import queued_linear
from titan_moe.kernels.registry import Kernel, register

SwiGLUDown = Callable[[Tensor, Tensor], Tensor]
"""Pre-activations [..., 2F] and weight [D, F] -> [..., D]."""


def swiglu_down_reference(hidden_T2F: Tensor, weight_DF: Tensor) -> Tensor:
    """The definition, in plain PyTorch: [..., 2F], [D, F] -> [..., D]."""
    return F.linear(swiglu(hidden_T2F), weight_DF)


@torch.library.custom_op("titan_moe::unrouted_swiglu_backward", mutates_args=())
def _backward(dactive_RF: Tensor, hidden_R2F: Tensor) -> tuple[Tensor, Tensor]:
    refuse_cpu(hidden_R2F, "experts", "fused", "grouped_mm")
    return swiglu_backward(dactive_RF, hidden_R2F)[:2]


_backward.register_fake(lambda dactive_RF, hidden_R2F: (torch.empty_like(hidden_R2F), torch.empty_like(dactive_RF)))


class _SwiGLUDown(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, hidden_T2F: Tensor, weight_DF: Tensor, delay: Delay | None) -> Tensor:
        ctx.save_for_backward(hidden_T2F, weight_DF)
        ctx.delay = delay
        return swiglu_down_reference(hidden_T2F, weight_DF)

    @staticmethod
    def backward(ctx: Any, dy_TD: Tensor) -> tuple[Tensor | None, ...]:
        hidden_T2F, weight_DF = ctx.saved_tensors
        dhidden_T2F, active_TF = _backward(dy_TD @ weight_DF, hidden_T2F.contiguous())
        dweight_DF = None
        if ctx.needs_input_grad[1] and ctx.delay is None:
            dweight_DF = dy_TD.T @ active_TF
        elif ctx.needs_input_grad[1]:
            ctx.delay(lambda: [dy_TD.T @ active_TF])
        return dhidden_T2F, dweight_DF, None


def fused_swiglu_down(hidden_2F: Tensor, weight_DF: Tensor, delay: Delay | None = None) -> Tensor:
    """Times silu(gate) · up the weight, on a GPU (fp32 in the interpreter): [..., 2F], [D, F] -> [..., D].

    `delay`, if given, takes over the computation of the weight gradient in backward.
    """
    y_TD = _SwiGLUDown.apply(hidden_2F.flatten(0, -2), weight_DF, delay)
    return y_TD.unflatten(0, hidden_2F.shape[:-1])


def queued_swiglu_down(queue: WeightGradQueue) -> SwiGLUDown:
    """`fused_swiglu_down` whose weight gradient is delayed while the queue records."""

    def swiglu_down(hidden_2F: Tensor, weight_DF: Tensor) -> Tensor:
        if queue.pending is None:
            return fused_swiglu_down(hidden_2F, weight_DF)
        (stand_in_DF,), delay = queue.pending.delay(weight_DF)
        return fused_swiglu_down(hidden_2F, stand_in_DF, delay)

    return swiglu_down


def queued_swiglu_down_reference(queue: WeightGradQueue) -> SwiGLUDown:
    """`swiglu_down_reference` whose weight gradient is delayed while the queue records."""
    return lambda hidden_2F, weight_DF: queued_linear(swiglu(hidden_2F), weight_DF, None, queue)


register(Kernel("swiglu_down", fused_swiglu_down, swiglu_down_reference, needs_triton=True))
