"""The dense feed-forward layer, also used as shared experts.

D model width · F hidden width
"""

import torch
from torch import Tensor, nn

from titan_moe.config.kernels import DEFAULT_KERNELS, Kernels
from titan_moe.kernels.autocast import as_operand
from titan_moe.kernels.choose import SWIGLU_DOWN


class MLP(nn.Module):
    """SwiGLU feed-forward (arXiv:2002.05202) with gate and up in one GEMM.

    With fused experts it saves for backward what they save: input and pre-activation.
    """

    residual_ends = ("down.weight",)
    parts = {"forward": ("gate_up", "down")}

    def __init__(self, hidden_size: int, ffn_hidden_size: int, kernels: Kernels = DEFAULT_KERNELS) -> None:
        super().__init__()
        self.gate_up = nn.Linear(hidden_size, 2 * ffn_hidden_size, bias=False)
        self.down = SwiGLUDown(ffn_hidden_size, hidden_size, kernels)
        self.fused_rows = {"gate_up.weight": (ffn_hidden_size, ffn_hidden_size)}

    def forward(self, x: Tensor) -> Tensor:
        """[..., D] -> [..., D]."""
        return self.down(self.gate_up(x))


class SwiGLUDown(nn.Linear):
    """Activation and down projection as one operation."""

    def __init__(self, ffn_hidden_size: int, hidden_size: int, kernels: Kernels = DEFAULT_KERNELS) -> None:
        super().__init__(ffn_hidden_size, hidden_size, bias=False)
        self.swiglu_down = SWIGLU_DOWN[kernels.experts]

    def forward(self, hidden: Tensor) -> Tensor:
        """Pre-activations of gate and up [..., 2F] -> [..., D]."""
        return self.swiglu_down(hidden, as_operand(self.weight))


class GatedMLP(nn.Module):
    """Shared experts with a sigmoid gate a token (Qwen2-MoE)."""

    parts = {"forward": ("gate", "mlp")}

    def __init__(self, hidden_size: int, ffn_hidden_size: int, kernels: Kernels = DEFAULT_KERNELS) -> None:
        super().__init__()
        self.mlp = MLP(hidden_size, ffn_hidden_size, kernels)
        self.gate = nn.Linear(hidden_size, 1, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """[..., D] -> [..., D]."""
        return torch.sigmoid(self.gate(x)) * self.mlp(x)


class NoMLP(nn.Module):
    """No shared experts."""

    def forward(self, x: Tensor) -> None:
        return None


def add_shared(y_TD: Tensor, shared_TD: Tensor | None) -> Tensor:
    """Add the results of shared experts to those of routed ones; None (`NoMLP`) costs no pass over memory."""
    return y_TD if shared_TD is None else y_TD + shared_TD
