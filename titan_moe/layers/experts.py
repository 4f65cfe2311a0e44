"""The routed experts of this rank.

S rows · R expert slots · e experts on this rank · L width of a row · F hidden width of an expert
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from titan_moe.dispatch.base import Exchange, Routed
from titan_moe.kernels.choose import choose_expert_mlp
from titan_moe.kernels.experts.composite_mlp import ExpertMLP
from titan_moe.parameters import ParameterKind


class GroupedExperts(nn.Module):
    """SwiGLU experts that read rows by index, weigh them by their routing score and sum a row's slots.

    Gate and up are stored together as `[e, 2, F, L]`, down as `[e, L, F]`: one GEMM reads gate and up at once, and
    dimension 2 of both is the hidden width. `local` turns a stored weight into the plain tensor of this rank's
    experts, in compute's dtype; it is identity unless the experts are spread over ranks. `gather_weights` gives the
    weights that an exchange wants served: this rank's own, and what its dispatcher may have planned behind them. The
    rows pass through it, so that its messages come after theirs. `delay` makes weights ready before the rows are
    there, where that hides something (kernels/delayed_weight_grads.py).
    """

    parameter_kinds = {"gate_up": ParameterKind.EXPERT_MATRIX, "down": ParameterKind.EXPERT_MATRIX}
    residual_ends = ("down",)

    def __init__(self, num_experts: int, width: int, ffn_hidden_size: int, mlp: ExpertMLP | None = None) -> None:
        super().__init__()
        self.gate_up = nn.Parameter(torch.empty(num_experts, 2, ffn_hidden_size, width))
        self.down = nn.Parameter(torch.empty(num_experts, width, ffn_hidden_size))
        self.mlp = mlp or choose_expert_mlp("grouped_mm", score_on="activation")
        self.local: Callable[[Tensor], Tensor] = _identity
        self.delay: Callable[[], Any] = _when_used
        self.gather_weights: Callable[..., tuple[Tensor, ...]] = _own

    def delayed_weights(self) -> Any:
        """What serves the rows that are to come, if it should be made before they are there; else None."""
        return self.delay()

    def forward(self, routed: Routed, ready: Any = None) -> Any:
        """Serve the rows, with weights that `delayed_weights` has made ready, or has not: -> [S, L], zero for a row that no
        expert here wants; or what else the dispatcher sends back."""
        if ready is not None:
            return ready.serve(*routed[:5])
        return self.serve(routed, self.local(self.gate_up), self.local(self.down))

    def serve(self, routed: Routed, gate_up: Tensor, down: Tensor) -> Any:
        """The same, with weights that are ready: what is compiled where blocks run in pieces."""
        rows, *weights = self.gather_weights(routed[0], gate_up, down, routed.exchange)
        return routed.run_mlp(self.mlp, rows, weights)


def _when_used() -> None:
    """Weights are made ready by whoever uses them."""


def _identity(weight: Tensor) -> Tensor:
    return weight


def _own(x_SL: Tensor, gate_up: Tensor, down: Tensor, exchange: Exchange) -> tuple[Tensor, ...]:
    return x_SL, gate_up, down
