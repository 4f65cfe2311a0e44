"""Store frozen weights as codes in e4m3 with scales: linear layers of blocks, and routed experts.

A weight keeps its name and shape, and its scales have the same name with `_scales` behind it. `frozen.freeze` gives
the weight the dtype of codes; initialisation and loading round one weight after the other into both. Numbers in
compute's dtype are made for each product and freed after it (kernels/formats/stored.py).
"""

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from titan_moe.config.adapter import AdapterConfig, kind_of_linear
from titan_moe.config.trainable import NOTHING, Patterns, trains
from titan_moe.kernels.experts.adapted_mlp import adapted_mlp
from titan_moe.kernels.experts.swiglu import swiglu
from titan_moe.kernels.experts.weights import MATRICES, ExpertUse
from titan_moe.kernels.formats.stored import scales_shape
from titan_moe.kernels.linear.stored import stored_linear
from titan_moe.layers.experts import GroupedExperts
from titan_moe.layers.mlp import SwiGLUDown
from titan_moe.parameters import SCALES, ParameterKind, local


class StoredLinear(nn.Linear):
    """A linear layer whose weight is codes; with `activates` it reads pre-activations of gate and up."""

    parameter_kinds = {f"weight{SCALES}": ParameterKind.SCALES_OF_CODES}
    has_codes = ("weight",)

    def __init__(self, linear: nn.Linear, scales: Tensor, *, activates: bool) -> None:
        super().__init__(linear.in_features, linear.out_features, bias=False, device="meta")
        self.weight, self.bias = linear.weight, linear.bias
        self.weight_scales = nn.Parameter(scales)
        self.activates = activates

    def forward(self, x: Tensor) -> Tensor:
        """[..., I], or with `activates` pre-activations of gate and up [..., 2I] -> [..., O]."""
        y = stored_linear(swiglu(x) if self.activates else x, self.weight, self.weight_scales)
        return y if self.bias is None else y + self.bias


@dataclass(frozen=True)
class AddScales:
    """The transform of routed experts that adds the scales of their codes."""

    experts: GroupedExperts

    def __call__(self, use: ExpertUse) -> ExpertUse:
        scales = tuple(local(getattr(self.experts, f"{name}{SCALES}")) for name in MATRICES)
        return use._replace(weights=use.weights._replace(scales=scales))


def apply(model: nn.Module, config: AdapterConfig, patterns: Patterns) -> None:
    """Give frozen weights of a built model scales, in place, and modules that read codes. The model is whole, on the
    meta device, and has no adapters yet; `patterns` name what trains."""
    if not config.has_codes:
        return
    for number, layer in model.get_submodule("layers").named_children():
        for path, module in list(layer.named_modules()):
            names = MATRICES if isinstance(module, GroupedExperts) else ("weight",)
            if any(trains(f"layers.{number}.{path}.{name}", patterns or NOTHING) for name in names):
                continue
            if isinstance(module, GroupedExperts):
                _store_experts(module, config)
            elif type(module) in (nn.Linear, SwiGLUDown) and kind_of_linear(path):
                scales = _new_scales(module.weight, config)
                layer.set_submodule(path, StoredLinear(module, scales, activates=isinstance(module, SwiGLUDown)))


def _new_scales(weight: Tensor, config: AdapterConfig) -> Tensor:
    return weight.detach().new_empty(scales_shape(tuple(weight.shape), config.base), dtype=torch.float32)


def _store_experts(experts: GroupedExperts, config: AdapterConfig) -> None:
    for name in MATRICES:
        scales = _new_scales(experts.get_parameter(name), config)
        experts.register_parameter(f"{name}{SCALES}", nn.Parameter(scales))
    experts.has_codes = MATRICES
    experts.mlp = adapted_mlp(experts.mlp)
    experts.transforms["scales"] = AddScales(experts)
