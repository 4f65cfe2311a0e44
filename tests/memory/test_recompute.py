"""Recompute: the modules of the recipe, in blocks of any class, with equal gradients."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from titan_moe.config.kernels import Kernels
from titan_moe.config.model import AttentionConfig, ModelConfig, MoEConfig
from titan_moe.config.perf import MemoryConfig
from titan_moe.layers.block import Block
from titan_moe.layers.init import init_weights
from titan_moe.layers.moe import MoE
from titan_moe.memory import recompute
from titan_moe.models.transformer import Transformer

CONFIG = ModelConfig(
    vocab_size=16,
    num_layers=3,
    hidden_size=16,
    attention=AttentionConfig(num_heads=2, num_kv_heads=1, head_dim=8),
    moe=MoEConfig(num_experts=4, top_k=2, ffn_hidden_size=16, aux_loss_coef=1e-2),
)


class OwnBlock(nn.Module):
    """A user's block, not derived from Block."""

    def __init__(self, config: ModelConfig, *, is_dense: bool, kernels: Kernels) -> None:
        super().__init__()
        self.norm = nn.RMSNorm(config.hidden_size)
        self.moe = MoE(config, kernels)

    def forward(self, x_BND: Tensor, context: Any) -> Tensor:
        return x_BND + self.moe(self.norm(x_BND))


def build(block_class: type[nn.Module], recomputed: str) -> Transformer:
    model = type("Model", (Transformer,), {"block_class": block_class})(CONFIG)
    recompute.apply(model, MemoryConfig(recomputed))
    init_weights(model, seed=0, std=0.2, num_layers=CONFIG.num_layers)
    return model


@pytest.mark.parametrize("block_class", [Block, OwnBlock])
@pytest.mark.parametrize(("recomputed", "passes"), [("none", 1), ("experts", 1), ("block", 2)])
def test_recompute_runs_blocks_as_often_as_the_recipe_says(
    block_class: type[nn.Module], recomputed: str, passes: int
) -> None:
    torch.manual_seed(0)
    tokens, labels = torch.randint(16, (2, 2, 8)).unbind()
    plain, model = build(block_class, "none"), build(block_class, recomputed)
    calls = []
    for block in model.layers.values():
        norm = block.norm if block_class is OwnBlock else block.ffn_norm
        norm.register_forward_hook(lambda *_: calls.append(1))
    for each in (plain, model):
        each(tokens, labels).backward()
    assert len(calls) == passes * CONFIG.num_layers
    for parameter, expected in zip(model.parameters(), plain.parameters(), strict=True):
        assert torch.equal(parameter.grad, expected.grad)


def test_recompute_repeats_dropout_in_a_users_block() -> None:
    class Dropping(OwnBlock):
        def forward(self, x_BND: Tensor, context: Any) -> Tensor:
            return nn.functional.dropout(super().forward(x_BND, context), 0.5)

    tokens, labels = torch.randint(16, (2, 2, 8)).unbind()
    grads = []
    for recomputed in ("none", "block"):
        model = build(Dropping, recomputed)
        torch.manual_seed(0)
        model(tokens, labels).backward()
        grads.append(torch.cat([parameter.grad.flatten() for parameter in model.parameters()]))
    assert torch.equal(*grads)


def test_recompute_experts_repeats_only_experts() -> None:
    model = build(Block, "experts")
    reads = []
    for block in model.layers.values():
        block.feed_forward.experts.local = lambda weight: reads.append(1) or weight
    tokens, labels = torch.randint(16, (2, 2, 8)).unbind()
    model(tokens, labels).backward()
    assert len(reads) == 2 * 2 * CONFIG.num_layers, "two weights, in forward and in backward"


def test_recompute_block_of_a_dense_model() -> None:
    dense = replace(CONFIG, ffn_hidden_size=16, moe=MoEConfig())
    model = Transformer(dense)
    recompute.apply(model, MemoryConfig("block"))
    init_weights(model, seed=0, std=0.2, num_layers=dense.num_layers)
    calls = []
    model.layers["0"].ffn_norm.register_forward_hook(lambda *_: calls.append(1))
    model(*torch.randint(16, (2, 2, 8)).unbind()).backward()
    assert len(calls) == 2
