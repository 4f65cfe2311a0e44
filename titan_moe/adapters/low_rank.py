"""Low-rank adapters beside frozen linear layers and routed experts (LoRA, arXiv:2106.09685).

I inputs · O outputs · r rank · M matrices of a fused weight · e experts · F hidden width · L width of a row

A frozen weight keeps its name, so a checkpoint of the base loads. A linear layer has a child, `adapter`. A layer that
is one product in compute's dtype gets another class, which adds it in its GEMM (kernels/linear/adapted.py). Another
one, with a format or an activation, adds it in a forward hook: before other hooks, which exchange tokens. Routed
experts have their factors as parameters of their own, which are sharded like the weights, and which a transform adds to
these.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from titan_moe.adapters.stored import StoredLinear
from titan_moe.config.adapter import AdapterConfig, kind_of_linear
from titan_moe.kernels.experts.adapted_mlp import adapted_mlp
from titan_moe.kernels.experts.swiglu import swiglu
from titan_moe.kernels.experts.weights import ExpertUse, ExpertWeights
from titan_moe.kernels.linear.adapted import adapted_linear
from titan_moe.layers.experts import GroupedExperts
from titan_moe.layers.mlp import MLP
from titan_moe.parameters import SCALES, Factors, ParameterKind


class LowRank(nn.Module):
    """scale · B A of each of several matrices, one below the other, from the same input."""

    parameter_kinds = {"A": ParameterKind.FACTOR_IN, "B": ParameterKind.FACTOR_OUT}

    def __init__(
        self, in_features: int, rows: tuple[int, ...], rank: int, scale: float, *, activates: bool, like: Tensor
    ) -> None:
        """`rows` are the outputs of each matrix. With `activates` the input is a pre-activation of gate and up. The
        parameters are of the dtype and on the device of `like`."""
        super().__init__()
        options: Any = {"dtype": like.dtype, "device": like.device}
        self.A = nn.Parameter(torch.empty(len(rows) * rank, in_features, **options))
        self.B = nn.Parameter(torch.empty(sum(rows), rank, **options))
        self.rows, self.scale, self.activates = rows, scale, activates
        self.fused_rows = {"B": rows} if len(rows) > 1 else {}

    def forward(self, x: Tensor) -> Tensor:
        """[..., I] -> [..., O]."""
        low = F.linear(swiglu(x) if self.activates else x, self.A) * self.scale
        if len(self.rows) == 1:
            return F.linear(low, self.B)
        parts = zip(low.chunk(len(self.rows), -1), self.B.split(self.own_rows()), strict=True)
        return torch.cat([F.linear(low_of_one, b) for low_of_one, b in parts], dim=-1)

    def own_rows(self) -> list[int]:
        """Those of each matrix that this rank has: ranks of tp have an equal part of each."""
        share = sum(self.rows) // self.B.shape[0]
        return [size // share for size in self.rows]


def add_adapter(linear: Any, inputs: tuple[Any, ...], out: Tensor) -> Tensor:
    """The forward hook of a linear layer with an adapter."""
    low: Tensor = linear.adapter(inputs[0])
    return out + low.to(out.dtype)


def multiply_with_adapter(linear: Any, x: Tensor) -> Tensor:
    """The forward of a linear layer that adds its adapter in its GEMM: [..., I] -> [..., O]."""
    own, scales = linear.adapter, getattr(linear, f"weight{SCALES}", None)
    return adapted_linear(x, linear.weight, scales, linear.bias, own.A, own.B, own.own_rows(), own.scale)


class AdaptedLinear(nn.Linear):
    """A linear layer that adds its adapter in its GEMM."""

    is_one_product = True
    forward = multiply_with_adapter


class AdaptedStoredLinear(StoredLinear):
    """The same of codes."""

    is_one_product = True
    forward = multiply_with_adapter


JOINED: dict[type[nn.Module], type[nn.Module]] = {nn.Linear: AdaptedLinear, StoredLinear: AdaptedStoredLinear}


class AddFactors:
    """The transform of routed experts that adds their factors, ready for compute as their weights are."""

    def __init__(self, experts: GroupedExperts) -> None:
        self.experts = experts

    def __call__(self, use: ExpertUse) -> ExpertUse:
        pairs = [self._ready(f"gate_up_{end}", f"down_{end}") for end in "AB"]
        (a_up, a_down), (b_up, b_down) = pairs
        return use._replace(weights=use.weights._replace(factors=(a_up, b_up, a_down, b_down)))

    def _ready(self, *names: str) -> list[Tensor]:
        parameters = ExpertWeights.of([getattr(self.experts, name) for name in names])
        return self.experts.transformed(ExpertUse(parameters), "local", "autocast").weights.tensors()


def apply(model: nn.Module, config: AdapterConfig) -> None:
    """Give the modules of a built model adapters, in place. The model is whole, and not sharded yet."""
    if not config.is_used:
        return
    for layer in model.get_submodule("layers").children():
        for path, module in list(layer.named_modules()):
            if isinstance(module, GroupedExperts) and config.has("experts"):
                _adapt_experts(module, config.rank_of("experts"), config.scale_of("experts"))
            elif isinstance(module, nn.Linear) and (kind := kind_of_linear(path)) and config.has(kind):
                parent, _, name = path.rpartition(".")
                owner = layer.get_submodule(parent)
                rows = getattr(owner, "fused_rows", {}).get(f"{name}.weight", (module.out_features,))
                activates = isinstance(owner, MLP) and name == "down"  # whatever its class is now
                _adapt_linear(module, rows, config.rank_of(kind), config.scale_of(kind), activates=activates)
                if activates or type(module) not in JOINED:
                    module.register_forward_hook(add_adapter)
                else:
                    module.__class__ = JOINED[type(module)]


def _adapt_linear(linear: nn.Linear, rows: tuple[int, ...], rank: int, scale: float, *, activates: bool) -> None:
    linear.adapter = LowRank(linear.in_features, rows, rank, scale, activates=activates, like=linear.weight)
    linear.low_rank = {"weight": Factors("adapter.A", "adapter.B", rows, scale)}


def _adapt_experts(experts: GroupedExperts, rank: int, scale: float) -> None:
    """Factors of gate and up and of down, and the MLP that applies them."""
    num_experts, width, hidden = experts.down.shape
    sizes = {"e": num_experts, "2": 2, "F": hidden, "L": width, "r": rank}
    for name, dims in GroupedExperts.factor_dims.items():
        shape = [sizes[dim] for dim in dims]
        experts.register_parameter(name, nn.Parameter(experts.down.detach().new_empty(shape)))
    experts.parameter_dims = GroupedExperts.parameter_dims | GroupedExperts.factor_dims
    both = ("gate_up", "down")
    experts.low_rank = {name: Factors(f"{name}_A", f"{name}_B", (), scale) for name in both}
    experts.mlp = adapted_mlp(experts.mlp, scale)
    experts.transforms["adapters"] = AddFactors(experts)
