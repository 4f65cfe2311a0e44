"""The routed experts of this rank.

S rows · R expert slots · e experts on this rank · L width of a row · F hidden width of an expert
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from titan_moe.dispatch.base import Exchange, ExpertInputs
from titan_moe.kernels.autocast import as_operand
from titan_moe.kernels.choose import choose_expert_mlp
from titan_moe.kernels.experts.composite_mlp import ExpertMLP
from titan_moe.kernels.experts.delayed_weight_grads import DelayedWeights, delay_weight_grads
from titan_moe.kernels.experts.weights import ExpertWeights
from titan_moe.parameters import ParameterKind, kind_of

GatherWeights = Callable[[Tensor, ExpertWeights, Exchange], tuple[Tensor, ExpertWeights]]
"""Rows, own weights, exchange -> rows, and own weights with clones."""


class GroupedExperts(nn.Module):
    """SwiGLU experts that read rows by index, weigh them by their routing score and sum a row's slots.

    Gate and up are one parameter, so that one GEMM reads both. `local` maps a parameter to the plain tensor of this
    rank's experts in compute's dtype; it is identity unless experts are sharded. `gather_weights` adds planned clones;
    rows pass through it, so that it communicates after them. `delays_weight_grads` enables `delayed_weights`
    (kernels/experts/delayed_weight_grads.py). `codes` returns what the MLP's format has made of weights for several
    uses, if anything. `num_width_parts` ranks have parts of F, and their results are added up, so each adds that part
    of the down bias.
    """

    parameter_dims = {"gate_up": "e2FL", "down": "eLF", "gate_up_bias": "e2F", "down_bias": "eL"}
    """The dimensions of each parameter."""
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
        self.codes: Callable[[], tuple[Tensor, ...]] = tuple
        self.delays_weight_grads = False
        self.num_width_parts = 1

    def extra_repr(self) -> str:
        num_experts, width, ffn_hidden_size = self.down.shape
        return f"{num_experts} experts, {width} -> {ffn_hidden_size} -> {width}, bias={self.down_bias is not None}"

    def weights(self) -> ExpertWeights:
        """The parameters of this rank's experts, ready for compute."""
        names = [name for name in GroupedExperts.parameter_dims if getattr(self, name) is not None]
        tensors = {name: as_operand(self.local(getattr(self, name))) for name in names}
        if self.num_width_parts > 1 and "down_bias" in tensors:
            tensors["down_bias"] = _ShareOfSum.apply(tensors["down_bias"], self.num_width_parts)
        weights = ExpertWeights.of(list(tensors.values()), tuple(names))
        return weights._replace(codes=self.codes())

    def delayed_weights(self) -> DelayedWeights | None:
        """Weights whose gradients are delayed, for rows that are still pending; None if they are not delayed."""
        return delay_weight_grads(self.weights()) if self.delays_weight_grads and torch.is_grad_enabled() else None

    def forward(self, inputs: ExpertInputs, delayed: DelayedWeights | None = None) -> Any:
        """The partial result of each row, [S, L], zero without a slot; or what else the dispatcher combines."""
        if delayed is not None:  # not compiled: a compiled backward is one piece
            return inputs.run_mlp(delayed.mlp, inputs.rows, delayed.weights)
        rows, weights = self.gather_weights(inputs.rows, self.weights(), inputs.exchange)
        return self.compute(inputs, rows, weights)

    def compute(self, inputs: ExpertInputs, rows: Tensor, weights: ExpertWeights) -> Any:
        """The same with given rows and weights; compiled by itself."""
        return inputs.run_mlp(self.mlp, rows, weights)


class _ShareOfSum(torch.autograd.Function):
    """A summand, for as many ranks to add up to the whole. Every rank has the gradient of the sum, and so that of the
    whole: it is not divided, and not reduced over ranks."""

    @staticmethod
    def forward(ctx: Any, whole: Tensor, num_ranks: int) -> Tensor:
        return whole / num_ranks

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return grad, None


def _identity(weight: Tensor) -> Tensor:
    return weight


def _own(x_SL: Tensor, weights: ExpertWeights, exchange: Exchange) -> tuple[Tensor, ExpertWeights]:
    return x_SL, weights
