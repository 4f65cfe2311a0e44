"""The routed experts of this rank.

S rows · R expert slots · e experts on this rank · L width of a row · F hidden width of an expert
"""

from typing import Any

import torch
from torch import Tensor, nn

from titan_moe.dispatch.base import ExpertInputs
from titan_moe.kernels.autocast import as_operand
from titan_moe.kernels.choose import choose_expert_mlp
from titan_moe.kernels.experts.composite_mlp import ExpertMLP
from titan_moe.kernels.experts.delayed_weight_grads import DelayedWeights, delay_weight_grads
from titan_moe.kernels.experts.weights import MATRICES, EachWeight, ExpertUse, ExpertWeights, WeightTransform
from titan_moe.parameters import SCALES, ParameterKind, kind_of

TRANSFORMS = {
    "local": "Parameters -> this rank's plain tensors in compute's dtype, or with codes in the MLP's format.",
    "autocast": "The dtype of `torch.autocast`.",
    "share": "The part of a bias that this rank adds, where ranks have parts of F.",
    "adapters": "Low-rank factors beside the matrices.",
    "scales": "Those of matrices that are frozen and stored as codes.",
    "clones": "Weights of other ranks' experts behind own ones.",
}
"""What may stand between the parameters and the MLP, in order."""


class GroupedExperts(nn.Module):
    """SwiGLU experts that read rows by index, weigh them by their routing score and sum a row's slots.

    Gate and up are one parameter, so that one GEMM reads both. `transforms`, by the names of `TRANSFORMS`, are applied
    to the parameters before each use. `delays_weight_grads` enables `delayed_weights`
    (kernels/experts/delayed_weight_grads.py).
    """

    parameter_dims = {"gate_up": "e2FL", "down": "eLF", "gate_up_bias": "e2F", "down_bias": "eL"}
    """The dimensions of each parameter."""
    factor_dims = {"gate_up_A": "e2rL", "gate_up_B": "e2Fr", "down_A": "erF", "down_B": "eLr"}
    """Those of low-rank factors, where there are adapters."""
    parameter_kinds = {
        name: ParameterKind.EXPERT_MATRIX if {"F", "L"} <= set(dims) else ParameterKind.BIAS
        for name, dims in parameter_dims.items()
    } | {
        name: ParameterKind.EXPERT_FACTOR_IN if name.endswith("A") else ParameterKind.FACTOR_OUT for name in factor_dims
    }
    parameter_kinds |= {f"{name}{SCALES}": ParameterKind.SCALES_OF_CODES for name in MATRICES}
    has_codes: tuple[str, ...] = ()
    """The matrices that are stored as codes."""
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
        self.transforms: dict[str, WeightTransform] = {"autocast": EachWeight(as_operand)}
        self.delays_weight_grads = False

    def extra_repr(self) -> str:
        num_experts, width, ffn_hidden_size = self.down.shape
        return f"{num_experts} experts, {width} -> {ffn_hidden_size} -> {width}, bias={self.down_bias is not None}"

    def use(self, rows: Tensor | None = None, exchange: Any = None) -> ExpertUse:
        """The parameters of this rank's experts, ready for compute; for given rows with clones."""
        return self.transformed(ExpertUse(self.casts(), rows, exchange), *list(TRANSFORMS)[1:])

    def casts(self) -> ExpertWeights:
        """The parameters as the transform "local" makes them."""
        names = tuple(name for name in GroupedExperts.parameter_dims if getattr(self, name) is not None)
        weights = ExpertWeights.of([getattr(self, name) for name in names], names)
        return self.transformed(ExpertUse(weights), "local").weights

    def transformed(self, use: ExpertUse, *names: str) -> ExpertUse:
        """Apply the transforms of these names that there are."""
        for name in names:
            if name in self.transforms:
                use = self.transforms[name](use)
        return use

    def delayed_weights(self) -> DelayedWeights | None:
        """Weights whose gradients are delayed, for rows that are still pending; None if they are not delayed."""
        is_delayed = self.delays_weight_grads and torch.is_grad_enabled()
        return delay_weight_grads(self.use().weights, self.mlp) if is_delayed else None

    def forward(self, inputs: ExpertInputs, delayed: DelayedWeights | None = None) -> Any:
        """The partial result of each row, [S, L], zero without a slot; or what else the dispatcher combines."""
        if delayed is not None:  # not compiled: a compiled backward is one piece
            return inputs.run_mlp(delayed.mlp, inputs.rows, delayed.weights)
        weights, rows, _ = self.use(inputs.rows, inputs.exchange)
        return self.compute(inputs, rows, weights)

    def compute(self, inputs: ExpertInputs, rows: Tensor, weights: ExpertWeights) -> Any:
        """The same with given rows and weights; compiled by itself."""
        return inputs.run_mlp(self.mlp, rows, weights)
