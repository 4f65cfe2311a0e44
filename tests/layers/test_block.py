"""A block equals its pieces, and twelve blocks compile to one graph."""

from dataclasses import replace

import pytest
import torch
from torch._dynamo.testing import CompileCounter

from titan_moe.config.kernels import Kernels
from titan_moe.config.model import AttentionConfig, ModelConfig, MoEConfig
from titan_moe.layers.attention import Context
from titan_moe.layers.block import Block
from titan_moe.layers.init import init_weights
from titan_moe.layers.rope import rope_tables
from titan_moe.models.transformer import Transformer

MLA = AttentionConfig(kind="mla", num_heads=2, kv_lora_rank=16, qk_nope_head_dim=8, qk_rope_head_dim=8, v_head_dim=8)
GQA = AttentionConfig(num_heads=2, num_kv_heads=1, head_dim=8, qk_norm=True)
DENSE = MoEConfig(num_experts=0)
SPARSE = MoEConfig(num_experts=4, top_k=2, ffn_hidden_size=16, shared_ffn_hidden_size=8, aux_loss_coef=1e-2)


def built(attention: AttentionConfig, moe: MoEConfig, num_layers: int = 12) -> Transformer:
    config = ModelConfig(
        vocab_size=32,
        num_layers=num_layers,
        hidden_size=16,
        ffn_hidden_size=16,
        residual_multiplier=0.5,
        attention=attention,
        moe=moe,
    )
    model = Transformer(config)
    init_weights(model, seed=0, std=0.2, num_layers=num_layers)
    return model


@pytest.mark.slow
@pytest.mark.parametrize("has_documents", [False, True])
@pytest.mark.parametrize("moe", [DENSE, SPARSE], ids=["dense", "moe"])
@pytest.mark.parametrize("attention", [GQA, MLA], ids=["gqa", "mla"])
def test_blocks_compile_once(attention: AttentionConfig, moe: MoEConfig, has_documents: bool) -> None:
    """A Python number that differs by layer would recompile for each, and fail at the ninth."""
    torch._dynamo.reset()
    plain, compiled, counter = built(attention, moe), built(attention, moe), CompileCounter()
    for block in compiled.layers.values():
        block.forward = torch.compile(block.forward, backend=counter, fullgraph=True)
    tokens, labels = torch.randint(32, (2, 2, 12)).unbind()
    documents = torch.arange(12).div(5, rounding_mode="floor").expand(2, 12) if has_documents else None
    losses = [model(tokens, labels, documents) for model in (plain, compiled)]
    for loss in losses:
        loss.backward()
    assert counter.frame_count == 1
    torch.testing.assert_close(losses[1], losses[0])
    for (name, parameter), other in zip(plain.named_parameters(), compiled.parameters(), strict=True):
        torch.testing.assert_close(
            other.grad, parameter.grad, atol=1e-4, rtol=1e-4, msg=lambda m, name=name: f"{name}: {m}"
        )


@pytest.mark.parametrize(("placement", "is_dense"), [("both", True), ("both", False), ("after_moe", False)])
def test_results_of_branches_are_normed_before_they_are_added(placement: str, is_dense: bool) -> None:
    moe = MoEConfig() if is_dense else SPARSE
    config = ModelConfig(hidden_size=16, ffn_hidden_size=24, num_layers=1, attention=GQA, moe=moe)
    block = Block(
        replace(config, norm_placement=placement, residual_multiplier=0.5),
        is_dense=is_dense,
        kernels=Kernels(experts="reference"),
    ).double()
    for parameter in block.parameters():
        torch.nn.init.normal_(parameter, 0.3)
    x_BND = torch.randn(2, 6, 16, dtype=torch.float64)
    context = Context(*(table.double() for table in rope_tables(GQA, 6, x_BND.device)), None)

    def normed(x: torch.Tensor, norm: torch.nn.Module) -> torch.Tensor:
        return x / (x.square().mean(-1, keepdim=True) + 1e-6).sqrt() * norm.weight

    attended = block.attention(normed(x_BND, block.attention_norm), context)
    if placement == "both":
        attended = normed(attended, block.attention_post_norm)
    h_BND = x_BND + attended / 2
    result = normed(block.feed_forward(normed(h_BND, block.ffn_norm)), block.ffn_post_norm)
    torch.testing.assert_close(block(x_BND, context), h_BND + result / 2)


def test_block_front_ends_before_the_feed_forward() -> None:
    block = built(GQA, SPARSE, num_layers=1).layers["0"]
    x_BND = torch.randn(2, 6, 16)
    context = Context(*rope_tables(GQA, 6, x_BND.device), None)
    h_BND, normed_BND = block.front(x_BND, context)
    torch.testing.assert_close(h_BND, x_BND + block.attention(block.attention_norm(x_BND), context) / 2)
    torch.testing.assert_close(normed_BND, h_BND / (h_BND.square().mean(-1, keepdim=True) + 1e-6).sqrt())
    torch.testing.assert_close(block(x_BND, context), h_BND + block.feed_forward(normed_BND) / 2)
