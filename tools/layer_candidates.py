"""The MoE layers that bench_layer.py compares: ours by preset, the plain composite, torchtitan's.

All are built from the same weights, named as in our layer.
"""

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor, nn

from titan_moe.compile import regional
from titan_moe.config.formats import GemmFormats
from titan_moe.config.kernels import DEFAULT_KERNELS, PRESETS, Kernels
from titan_moe.config.model import ModelConfig, MoEConfig
from titan_moe.config.perf import CompileConfig
from titan_moe.layers.moe import MoE
from titan_moe.precision.experts import convert_experts
from titan_moe.titan import import_torchtitan


class Pair(NamedTuple):
    """A figure of forward, and of forward and backward."""

    forward: float
    total: float

    def __str__(self) -> str:
        return f"{self.forward:.0f}/{self.total:.0f}"


@dataclass(frozen=True)
class LayerShape:
    """The shape of a layer, its target TFLOP/s, and the TFLOP/s of the plain composite before the kernels existed."""

    tokens: int
    width: int
    hidden: int
    experts: int
    choices: int
    target: Pair
    before: Pair
    shared_hidden: int = 0

    @property
    def config(self) -> ModelConfig:
        moe = MoEConfig(
            num_experts=self.experts,
            top_k=self.choices,
            ffn_hidden_size=self.hidden,
            shared_ffn_hidden_size=self.shared_hidden,
        )
        return ModelConfig(hidden_size=self.width, moe=moe)

    @property
    def forward_flops(self) -> float:
        return 6.0 * self.tokens * self.width * (self.choices * self.hidden + self.shared_hidden)

    @property
    def saved_elements(self) -> int:
        """The minimum to save for backward: the input, and gate and up of every slot."""
        return self.tokens * self.width + 2 * self.tokens * self.choices * self.hidden


ROWWISE = GemmFormats("fp8_rowwise", "fp8_rowwise", "fp8_rowwise")


class Candidate(NamedTuple):
    """A layer, and a function that sets the bias of its router."""

    layer: nn.Module
    set_bias: Callable[[Tensor], None]


class FixedRouting(nn.Module):
    """A router that returns fixed expert ids, and differentiable scores."""

    def __init__(self, scores_TK: Tensor, ids_TK: Tensor) -> None:
        super().__init__()
        self.scores_TK = nn.Parameter(scores_TK)
        self.register_buffer("ids_TK", ids_TK)

    def forward(self, x_BND: Tensor) -> tuple[Tensor, Tensor]:
        return self.scores_TK, self.ids_TK


def build_own(
    preset: str,
    weights: dict[str, Tensor],
    shape: LayerShape,
    x_BND: Tensor,
    compiled: str,
    experts: GemmFormats | None = None,
) -> Candidate:
    """Our layer with the kernels of a preset, compiled as in a run; routed experts may have formats."""
    layer = _layer(shape, x_BND, weights, PRESETS[preset])
    if experts is not None:
        convert_experts(layer.experts, experts, "native" if x_BND.is_cuda else "emulated")
    regional.apply(layer, CompileConfig(compiled), x_BND.device)
    return Candidate(layer, layer.router.expert_bias_E.copy_)


def build_fp8(weights: dict[str, Tensor], shape: LayerShape, x_BND: Tensor, compiled: str) -> Candidate:
    """Our layer with routed experts in fp8, whose weights are quantised in every call; emulated on a CPU."""
    preset = "fused" if x_BND.is_cuda else "grouped_mm"
    return build_own(preset, weights, shape, x_BND, compiled, ROWWISE)


def build_composite(weights: dict[str, Tensor], shape: LayerShape, x_BND: Tensor, compiled: str) -> Candidate:
    """Our layer in plain PyTorch as one graph, after the router."""
    layer = _layer(shape, x_BND, weights, DEFAULT_KERNELS)
    router = layer.router
    layer.router = FixedRouting(*_routing(router, x_BND))
    if CompileConfig(compiled).compiles(x_BND.device.type):
        layer.forward = torch.compile(layer.forward, fullgraph=True)

    def set_bias(bias_E: Tensor) -> None:
        router.expert_bias_E.copy_(bias_E)
        scores_TK, ids_TK = _routing(router, x_BND)
        layer.router.scores_TK.data.copy_(scores_TK)
        layer.router.ids_TK.copy_(ids_TK)

    return Candidate(layer, set_bias)


@torch.no_grad()
def _routing(router: nn.Module, x_BND: Tensor) -> tuple[Tensor, Tensor]:
    return router(x_BND)


def build_torchtitan(weights: dict[str, Tensor], shape: LayerShape, x_BND: Tensor, compiled: str) -> Candidate:
    """torchtitan's layer with the settings of its Qwen3 and DeepSeek recipes, compiled by its own function."""
    titan = import_torchtitan("models.moe.moe")
    args = titan.MoEArgs(
        num_experts=shape.experts,
        num_shared_experts=shape.shared_hidden // shape.hidden,
        score_func="softmax",
        route_norm=True,
        score_before_experts=False,
        top_k=shape.choices,
        use_grouped_mm=x_BND.is_cuda,
    )
    with torch.device(x_BND.device):
        layer = titan.MoE(args, shape.width, shape.hidden).to(x_BND.dtype)
    missing, _ = layer.load_state_dict(_torchtitan_state_dict(weights), strict=False)
    assert missing == ["expert_bias"], missing
    layer.expert_bias = torch.zeros(shape.experts, device=x_BND.device)  # .to() has cast both to bf16
    layer.tokens_per_expert = torch.zeros(shape.experts, device=x_BND.device)
    if CompileConfig(compiled).compiles(x_BND.device.type):
        block, model = nn.Module(), nn.Module()
        block.moe, block.moe_enabled = layer, True
        model.layers = nn.ModuleDict({"0": block})
        # torchtitan would wrap the compiled function of the last shape again
        titan._run_experts_grouped_mm = inspect.unwrap(titan._run_experts_grouped_mm)
        titan_compile = import_torchtitan("config.job_config").Compile(enable=True)
        import_torchtitan("models.llama4.infra.parallelize").apply_compile(model, titan_compile, ep_enabled=False)
    return Candidate(layer, layer.expert_bias.copy_)


def _torchtitan_state_dict(weights: dict[str, Tensor]) -> dict[str, Tensor]:
    gate_up, down = weights["experts.gate_up"], weights["experts.down"]
    named = {
        "router.gate.weight": weights["router.weight"],
        "experts.w1": gate_up[:, 0],
        "experts.w2": down,
        "experts.w3": gate_up[:, 1],
    }
    if "shared_experts.gate_up.weight" in weights:
        w1, w3 = weights["shared_experts.gate_up.weight"].chunk(2)
        named |= {"shared_experts.w1.weight": w1, "shared_experts.w3.weight": w3}
        named["shared_experts.w2.weight"] = weights["shared_experts.down.weight"]
    return named


def _layer(shape: LayerShape, x_BND: Tensor, weights: dict[str, Tensor], kernels: Kernels) -> MoE:
    with torch.device("meta"):
        layer = MoE(shape.config, kernels=kernels).to(x_BND.dtype)
    layer.to_empty(device=x_BND.device).load_state_dict(weights, assign=True)
    layer.router.reset_buffers()
    layer.router.balance.reset_buffers()
    return layer


Builder = Callable[[dict[str, Tensor], LayerShape, Tensor, str], Candidate]
CANDIDATES: dict[str, Builder] = {
    "grouped_mm": lambda *parts: build_own("grouped_mm", *parts),
    "fused": lambda *parts: build_own("fused", *parts),
    "fused_fp8": build_fp8,
    "composite": build_composite,
    "torchtitan": build_torchtitan,
}
