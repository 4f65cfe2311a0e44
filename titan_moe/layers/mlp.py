"""The dense feed-forward layer, also used as shared experts.

D model width · F hidden width
"""

from collections.abc import Callable

import torch
from torch import Tensor, nn

from titan_moe.config.kernels import DEFAULT_KERNELS, Kernels
from titan_moe.kernels.experts.swiglu import swiglu


class MLP(nn.Module):
    """SwiGLU feed-forward (arXiv:2002.05202) with gate and up in one GEMM.

    Where experts are fused, it keeps for backward what they keep: its input and the pre-activation.
    """

    def __init__(self, hidden_size: int, ffn_hidden_size: int, kernels: Kernels = DEFAULT_KERNELS) -> None:
        super().__init__()
        self.swiglu_down = _fused() if kernels.experts == "fused" else _plain
        self.gate_up = nn.Linear(hidden_size, 2 * ffn_hidden_size, bias=False)
        self.down = nn.Linear(ffn_hidden_size, hidden_size, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """[..., D] -> [..., D]."""
        return self.swiglu_down(self.gate_up(x), self.down)


class GatedMLP(nn.Module):
    """Shared experts behind a learned sigmoid gate a token (Qwen2-MoE)."""

    def __init__(self, hidden_size: int, ffn_hidden_size: int, kernels: Kernels = DEFAULT_KERNELS) -> None:
        super().__init__()
        self.mlp = MLP(hidden_size, ffn_hidden_size, kernels)
        self.gate = nn.Linear(hidden_size, 1, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """[..., D] -> [..., D]."""
        return torch.sigmoid(self.gate(x)) * self.mlp(x)


class NoMLP(nn.Module):
    """No shared experts: there is nothing to add."""

    def forward(self, x: Tensor) -> None:
        return None


def add_shared(y_TD: Tensor, shared_TD: Tensor | None) -> Tensor:
    """Add the result of the shared experts to the routed experts'; None (`NoMLP`) costs no pass over memory."""
    return y_TD if shared_TD is None else y_TD + shared_TD


def _plain(hidden: Tensor, down: nn.Linear) -> Tensor:
    return down(swiglu(hidden))


def _fused() -> Callable[[Tensor, nn.Linear], Tensor]:
    from titan_moe.kernels.experts.swiglu_down import fused_swiglu_down

    return lambda hidden, down: fused_swiglu_down(hidden, down.weight)
