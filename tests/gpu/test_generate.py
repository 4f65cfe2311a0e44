"""Texts go on with kept keys and values as with whole forwards, in compiled models too."""

from dataclasses import replace

import pytest
import torch

from titan_moe.config.kernels import Kernels
from titan_moe.config.model import AttentionConfig, ModelConfig, MoEConfig
from titan_moe.layers.init import init_weights
from titan_moe.models.transformer import Transformer

pytestmark = pytest.mark.gpu

CONFIG = ModelConfig(
    vocab_size=256,
    num_layers=12,
    hidden_size=128,
    attention=AttentionConfig(num_heads=4, num_kv_heads=2, head_dim=32, sliding_window=9, full_attention_every=2),
    moe=MoEConfig(num_experts=8, top_k=2, ffn_hidden_size=64),
)
MLA = AttentionConfig(kind="mla", num_heads=4, kv_lora_rank=32, qk_nope_head_dim=32, qk_rope_head_dim=16, v_head_dim=32)


@pytest.mark.parametrize("attention", [CONFIG.attention, MLA], ids=["gqa", "mla"])
def test_generate_with_and_without_a_cache(attention: AttentionConfig) -> None:
    with torch.device("cuda"):
        model = Transformer(replace(CONFIG, attention=attention), kernels=Kernels(experts="reference"))
    init_weights(model, seed=0, std=0.2, num_layers=12)
    for block in model.layers.values():
        block.attention.forward = torch.compile(block.attention.forward, fullgraph=True)
    prompts_BN = torch.randint(256, (3, 20), device="cuda", generator=torch.Generator("cuda").manual_seed(0))
    options = {"lengths_B": torch.tensor([20, 7, 13], device="cuda")}
    expected_BN = model.generate(prompts_BN, 12, use_cache=False, **options)
    assert len(expected_BN[0, 20:].unique()) > 3
    assert torch.equal(model.generate(prompts_BN, 12, **options), expected_BN)
