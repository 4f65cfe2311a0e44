"""The routed experts of this rank.

S rows · R expert slots · e experts on this rank · L width of a row · F hidden width of an expert
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from titan_moe.dispatch.base import Exchange, ExpertInputs
from titan_moe.kernels.choose import choose_expert_mlp
from titan_moe.kernels.experts.composite_mlp import ExpertMLP
from titan_moe.kernels.experts.delayed_weight_grads import DelayedWeights, delay_weight_grads
from titan_moe.kernels.experts.weights import ExpertWeights
from titan_moe.parameters import ParameterKind, kind_of

GatherWeights = Callable[[Tensor, ExpertWeights, Exchange], tuple[Tensor, ExpertWeights]]
"""Rows, own weights and exchange -> the rows, and the weights that the exchange needs: own ones, and clones."""


class GroupedExperts(nn.Module):
    """SwiGLU experts that read rows by index, weigh them by their routing score and sum a row's slots.

    Gate and up are stored together, so that one GEMM reads both. `local` turns a parameter into the plain tensor of
    this rank's experts, in compute's dtype; it is identity unless the experts are spread over ranks. `gather_weights`
    adds clones that a dispatcher has planned; rows pass through it, so that its messages come after theirs.
    `delays_weight_grads` says whether `delayed_weights` has any (kernels/experts/delayed_weight_grads.py).
    """

    parameter_dims = {"gate_up": "e2FL", "down": "eLF", "gate_up_bias": "e2F", "down_bias": "eL"}
    """What each dimension of a parameter is."""
    parameter_kinds = {
        name: ParameterKind.EXPERT_MATRIX if {"F", "L"} <= set(dims) else ParameterKind.BIAS
        for name, dims in parameter_dims.items()
    }
    residual_ends = ("down",)

    def __init__(
        self,
        num_experts: int,
        width: int,
        ffn_hidden_size: int,
        mlp: ExpertMLP | None = None,
        *,
        has_bias: bool = False,
    ) -> None:
        super().__init__()
        sizes = {"e": num_experts, "2": 2, "F": ffn_hidden_size, "L": width}
        for name, dims in GroupedExperts.parameter_dims.items():
            is_there = has_bias or kind_of(self, name) is not ParameterKind.BIAS
            parameter = nn.Parameter(torch.empty([sizes[dim] for dim in dims])) if is_there else None
            self.register_parameter(name, parameter)
        self.mlp = mlp or choose_expert_mlp("grouped_mm", score_on="activation")
        self.local: Callable[[Tensor], Tensor] = _identity
        self.gather_weights: GatherWeights = _own
        self.delays_weight_grads = False

    def weights(self) -> ExpertWeights:
        """The parameters of this rank's experts, ready for compute."""
        names = [name for name in GroupedExperts.parameter_dims if getattr(self, name) is not None]
        return ExpertWeights.of([self.local(getattr(self, name)) for name in names], tuple(names))

    def delayed_weights(self) -> DelayedWeights | None:
        """Weights for rows that have not arrived, if their gradients are to be computed late."""
        return delay_weight_grads(self.weights()) if self.delays_weight_grads and torch.is_grad_enabled() else None

    def forward(self, inputs: ExpertInputs, delayed: DelayedWeights | None = None) -> Any:
        """The partial result of each row, [S, L], zero for a row without a slot; or what else the dispatcher sends."""
        if delayed is not None:  # past what is compiled, whose backward is one piece
            return inputs.run_mlp(delayed.mlp, inputs.rows, delayed.weights)
        return self.compute(inputs, self.weights())

    def compute(self, inputs: ExpertInputs, weights: ExpertWeights) -> Any:
        """The same with weights that are ready: what is compiled where blocks run in pieces."""
        rows, weights = self.gather_weights(inputs.rows, weights, inputs.exchange)
        return inputs.run_mlp(self.mlp, rows, weights)


def _identity(weight: Tensor) -> Tensor:
    return weight


def _own(x_SL: Tensor, weights: ExpertWeights, exchange: Exchange) -> tuple[Tensor, ExpertWeights]:
    return x_SL, weights
