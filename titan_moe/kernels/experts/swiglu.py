"""SwiGLU (arXiv:2002.05202) of the gate and up halves, times the slot's routing score.

R slots · F hidden width

Physics: memory-bound, reads 2·R·F and writes R·F. Multiplying by the score here, before the down projection, is exact
(the projection is linear) and means that the expert's output need not be kept for the score's gradient. Plain PyTorch:
inside a compiled region it is one fused kernel.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from titan_moe.kernels.registry import Kernel, register


def weighted_swiglu(gate_up_R2F: Tensor, scores_R: Tensor) -> Tensor:
    """silu(gate) · up · score, in at least fp32 inside, returned in the input's dtype: [R, 2F], [R] -> [R, F]."""
    gate_RF, up_RF = gate_up_R2F.to(torch.promote_types(gate_up_R2F.dtype, torch.float32)).chunk(2, dim=-1)
    return (F.silu(gate_RF) * up_RF * scores_R[:, None]).to(gate_up_R2F.dtype)


def swiglu(gate_up_2F: Tensor) -> Tensor:
    """silu(gate) · up over the last dimension: [..., 2F] -> [..., F]."""
    gate, up = gate_up_2F.chunk(2, dim=-1)
    return F.silu(gate) * up


def _reference(gate_up_R2F: Tensor, scores_R: Tensor) -> Tensor:
    half = gate_up_R2F.shape[1] // 2
    gate, up = gate_up_R2F[:, :half].double(), gate_up_R2F[:, half:].double()
    return (gate / (1 + torch.exp(-gate)) * up * scores_R.double()[:, None]).to(gate_up_R2F.dtype)


register(Kernel("weighted_swiglu", weighted_swiglu, _reference))
