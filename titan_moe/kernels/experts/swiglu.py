"""SwiGLU (arXiv:2002.05202), also clamped (gpt-oss), of the gate and up halves, times the slot's routing score.

R slots · F hidden width

Physics: memory-bound, reads 2·R·F and writes R·F. Multiplying by the score here, before the down projection, is exact
(the projection is linear) and means that the expert's output need not be kept for the score's gradient. Plain PyTorch:
inside a compiled region it is one fused kernel.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from titan_moe.config.swiglu import PLAIN_SWIGLU, SwiGLU
from titan_moe.kernels.registry import Kernel, register


def weighted_swiglu(gate_up_R2F: Tensor, scores_R: Tensor, activation: SwiGLU = PLAIN_SWIGLU) -> Tensor:
    """silu(gate) · up · score, in at least fp32 inside, returned in the input's dtype: [R, 2F], [R] -> [R, F]."""
    gate_RF, up_RF = gate_up_R2F.to(torch.promote_types(gate_up_R2F.dtype, torch.float32)).chunk(2, dim=-1)
    if activation.limit:
        gate_RF, up_RF = gate_RF.clamp(max=activation.limit), up_RF.clamp(-activation.limit, activation.limit)
    if activation.up_offset:
        up_RF = up_RF + activation.up_offset
    silu_RF = F.silu(gate_RF) if activation.alpha == 1 else gate_RF * torch.sigmoid(activation.alpha * gate_RF)
    return (silu_RF * up_RF * scores_R[:, None]).to(gate_up_R2F.dtype)


def swiglu(gate_up_2F: Tensor) -> Tensor:
    """silu(gate) · up over the last dimension: [..., 2F] -> [..., F]."""
    gate, up = gate_up_2F.chunk(2, dim=-1)
    return F.silu(gate) * up


def _reference(gate_up_R2F: Tensor, scores_R: Tensor, activation: SwiGLU = PLAIN_SWIGLU) -> Tensor:
    half, limit = gate_up_R2F.shape[1] // 2, activation.limit or torch.inf
    gate, up = gate_up_R2F[:, :half].double(), gate_up_R2F[:, half:].double()
    gate, up = torch.where(gate > limit, limit, gate), torch.where(up.abs() > limit, limit * up.sign(), up)
    active = gate / (1 + torch.exp(-activation.alpha * gate)) * (up + activation.up_offset)
    return (active * scores_R.double()[:, None]).to(gate_up_R2F.dtype)


register(Kernel("weighted_swiglu", weighted_swiglu, _reference))
