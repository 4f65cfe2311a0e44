"""The dense feed-forward layer, also used as shared experts.

D model width · F hidden width
"""

import torch
from torch import Tensor, nn

from titan_moe.kernels.swiglu import swiglu


class MLP(nn.Module):
    """SwiGLU feed-forward (arXiv:2002.05202) with gate and up in one GEMM."""

    def __init__(self, hidden_size: int, ffn_hidden_size: int) -> None:
        super().__init__()
        self.gate_up = nn.Linear(hidden_size, 2 * ffn_hidden_size, bias=False)
        self.down = nn.Linear(ffn_hidden_size, hidden_size, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """[..., D] -> [..., D]."""
        return self.down(swiglu(self.gate_up(x)))


class GatedMLP(nn.Module):
    """Shared experts behind a learned sigmoid gate a token (Qwen2-MoE)."""

    def __init__(self, hidden_size: int, ffn_hidden_size: int) -> None:
        super().__init__()
        self.mlp = MLP(hidden_size, ffn_hidden_size)
        self.gate = nn.Linear(hidden_size, 1, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """[..., D] -> [..., D]."""
        return torch.sigmoid(self.gate(x)) * self.mlp(x)


class NoMLP(nn.Module):
    """No shared experts: there is nothing to add."""

    def forward(self, x: Tensor) -> None:
        return None
