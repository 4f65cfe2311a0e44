"""Modules with GEMMs, named without a model; tests/precision/test_policy.py compares them with built ones."""

from titan_moe.config.gemms import gemm_modules, matches
from titan_moe.config.model import AttentionConfig, ModelConfig, MoEConfig


def test_gemm_modules_of_a_dense_and_a_mixture_layer() -> None:
    moe = MoEConfig(num_experts=8, ffn_hidden_size=48, shared_ffn_hidden_size=32, latent_size=16)
    model = ModelConfig(num_layers=2, num_dense_layers=1, hidden_size=64, ffn_hidden_size=96, moe=moe)
    widths = {module.name: module.widths for module in gemm_modules(model)}
    assert widths == {
        "layers.0.attention.qkv": (64, 1536),
        "layers.0.attention.out": (512, 64),
        "layers.0.feed_forward.gate_up": (64, 192),
        "layers.0.feed_forward.down": (96, 64),
        "layers.1.attention.qkv": (64, 1536),
        "layers.1.attention.out": (512, 64),
        "layers.1.feed_forward.latent_down": (64, 16),
        "layers.1.feed_forward.experts": (16, 48),
        "layers.1.feed_forward.latent_up": (16, 64),
        "layers.1.feed_forward.shared_experts.gate_up": (64, 64),
        "layers.1.feed_forward.shared_experts.down": (32, 64),
    }


def test_gemm_modules_of_latent_attention() -> None:
    attention = AttentionConfig(kind="mla", num_heads=2, q_lora_rank=32, kv_lora_rank=16)
    paths = [module.path for module in gemm_modules(ModelConfig(num_layers=1, attention=attention))]
    assert paths[:5] == [f"attention.{name}" for name in ("q_down", "q_up", "kv_down", "kv_up", "out")]


def test_patterns_fit_whole_names() -> None:
    assert matches(("*.out", "layers.0.*"), "layers.0.attention.qkv") == "layers.0.*"
    assert matches(("layers.1.*",), "layers.10.attention.qkv") == ""
    assert matches(("layers.[01].*",), "layers.1.attention.qkv")
