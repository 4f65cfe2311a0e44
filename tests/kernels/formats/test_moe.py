"""Formats in whole layers and models: routing after a rounded layer, and short training."""

from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn

from titan_moe.config.formats import Format, GemmFormats
from titan_moe.config.model import AttentionConfig, ModelConfig, MoEConfig
from titan_moe.kernels.experts.composite_mlp import CompositeMLP
from titan_moe.kernels.formats.grouped import emulated_grouped_mm
from titan_moe.layers.experts import GroupedExperts
from titan_moe.layers.moe import MoE
from titan_moe.models.transformer import Transformer

MOE = MoEConfig(num_experts=16, top_k=4, ffn_hidden_size=32)
CONFIG = ModelConfig(
    vocab_size=64,
    num_layers=2,
    hidden_size=64,
    attention=AttentionConfig(num_heads=4, num_kv_heads=4, head_dim=16),
    moe=MOE,
)
FLIPS: dict[Format, float] = {
    "fp8_tensorwise": 0.02,
    "fp8_rowwise": 0.02,
    "fp8_blockwise": 0.02,
    "mxfp8": 0.02,
    "nvfp4": 0.06,
}
"""Largest share of top-k choices that differ."""


def set_formats(model: nn.Module, format: Format) -> None:
    """Compute all experts in a format; `compute` is the package's own grouped GEMM."""
    if format == "compute":
        return
    for module in model.modules():
        if isinstance(module, GroupedExperts):
            module.mlp = CompositeMLP(emulated_grouped_mm(GemmFormats(format, format, format)))


@pytest.mark.parametrize("format", FLIPS)
def test_few_choices_of_the_next_router_flip(format: Format) -> None:
    torch.manual_seed(0)
    layer, following = MoE(CONFIG), MoE(CONFIG)
    x_BND = torch.randn(4, 256, 64)
    for module in (layer, following):
        for parameter in module.parameters():
            nn.init.normal_(parameter, std=parameter.shape[-1] ** -0.5)

    def choices() -> Tensor:
        with torch.no_grad():
            hidden_BND = x_BND + layer(x_BND)
            _, ids_TK = following.router(nn.functional.rms_norm(hidden_BND, (64,)))
        return torch.zeros(len(ids_TK), 16, dtype=torch.bool).scatter(1, ids_TK.long(), True)

    exact = choices()
    set_formats(layer, format)
    flips = float((exact & ~choices()).sum() / (1024 * 4))
    print(f"{format}: {flips:.2%} of choices flip")
    assert 0 < flips < FLIPS[format]


def train(format: Format, num_steps: int = 45) -> float:
    """Mean loss of the last 10 steps on sequences that a random table continues."""
    torch.manual_seed(0)
    model = Transformer(replace(CONFIG, moe=replace(MOE, num_experts=4, top_k=2)))
    for name, parameter in model.named_parameters():
        if parameter.ndim > 1:
            nn.init.normal_(parameter, std=1.0 if "embed" in name else 0.05)
        else:
            nn.init.ones_(parameter)
    set_formats(model, format)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    table_VK = torch.randint(64, (64, 3))
    losses = []
    for _ in range(num_steps):
        tokens_BN = torch.randint(64, (4, 65))
        for i in range(1, 65):
            tokens_BN[:, i] = table_VK[tokens_BN[:, i - 1], torch.randint(3, (4,))]
        loss = model(tokens_BN[:, :-1], tokens_BN[:, 1:].contiguous()) / (4 * 64)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return sum(losses[-10:]) / 10


@pytest.mark.few()
@pytest.mark.slow
def test_short_training_in_emulated_formats() -> None:
    losses = {format: train(format) for format in ("compute", "nvfp4")}
    print({format: round(loss, 4) for format, loss in losses.items()})
    assert losses["compute"] < 2
    assert abs(losses["nvfp4"] / losses["compute"] - 1) < 0.02
