"""SwiGLU and the projection behind it, for what is not routed: dense layers and shared experts.

T tokens · F hidden width · D model width

Physics: 2·T·F·D FLOPs forward and twice that backward; memory-bound around it, 3·T·F elements forward, 6·T·F backward.
Kept for backward is the pre-activation alone: the activation is made anew in the pass that makes its gradient, which
reads all it needs anyway. The GEMMs are cuBLAS's, the pass is Triton's.
"""

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from titan_moe.kernels.experts.swiglu import swiglu
from titan_moe.kernels.experts.swiglu_backward import swiglu_backward
from titan_moe.kernels.registry import Kernel, register

SwiGLUDown = Callable[[Tensor, Tensor], Tensor]
"""Pre-activations [..., 2F] and weight [D, F] -> [..., D]."""


def swiglu_down_reference(hidden_T2F: Tensor, weight_DF: Tensor) -> Tensor:
    """The definition, in plain PyTorch: [..., 2F], [D, F] -> [..., D]."""
    return F.linear(swiglu(hidden_T2F), weight_DF)


@torch.library.custom_op("titan_moe::unrouted_swiglu_backward", mutates_args=())
def _backward(dactive_RF: Tensor, hidden_R2F: Tensor) -> tuple[Tensor, Tensor]:
    return swiglu_backward(dactive_RF, hidden_R2F)[:2]


_backward.register_fake(lambda dactive_RF, hidden_R2F: (torch.empty_like(hidden_R2F), torch.empty_like(dactive_RF)))


class _SwiGLUDown(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, hidden_T2F: Tensor, weight_DF: Tensor) -> Tensor:
        ctx.save_for_backward(hidden_T2F, weight_DF)
        return swiglu_down_reference(hidden_T2F, weight_DF)

    @staticmethod
    def backward(ctx: Any, dy_TD: Tensor) -> tuple[Tensor, Tensor | None]:
        hidden_T2F, weight_DF = ctx.saved_tensors
        dhidden_T2F, active_TF = _backward(dy_TD @ weight_DF, hidden_T2F.contiguous())
        return dhidden_T2F, dy_TD.T @ active_TF if ctx.needs_input_grad[1] else None


def fused_swiglu_down(hidden_2F: Tensor, weight_DF: Tensor) -> Tensor:
    """Times silu(gate) · up the weight, on a GPU (fp32 in the interpreter): [..., 2F], [D, F] -> [..., D]."""
    y_TD = _SwiGLUDown.apply(hidden_2F.flatten(0, -2), weight_DF)
    return y_TD.unflatten(0, hidden_2F.shape[:-1])


register(Kernel("swiglu_down", fused_swiglu_down, swiglu_down_reference, needs_triton=True))
