"""Counted parameters and FLOPs are those of the published models."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from titan_moe.config import load_recipe
from titan_moe.config.model import AttentionConfig, ModelConfig, MoEConfig
from titan_moe.config.mtp import MTPConfig
from titan_moe.plan.check_report import describe
from titan_moe.plan.cost.count import attention_core_flops_per_token, count_parameters, training_flops_per_token

RECIPES = Path(__file__).parents[3] / "recipes"
TINY = Path(__file__).parents[2] / "training" / "tiny.toml"


@pytest.mark.parametrize(
    ("name", "total", "active", "gflop"),
    [  # parameters in billions, GFLOP a token at 4,096 tokens: each to the last digit that is published
        ("qwen3_30b_a3b", 30.53, 3.35, 23.01),
        ("deepseek_v2_lite", 15.71, 2.66, 16.4),
        ("mixtral_8x7b", 46.70, 12.88, 79.7),
    ],
)
def test_count_of_published_models(name: str, total: float, active: float, gflop: float) -> None:
    model = load_recipe(RECIPES / "models" / f"{name}.toml").model
    parameters = count_parameters(model)
    assert parameters.total / 1e9 == pytest.approx(total, abs=0.005)
    assert parameters.active / 1e9 == pytest.approx(active, abs=0.005)
    assert training_flops_per_token(model, 4096) / 1e9 == pytest.approx(gflop, abs=0.05)


def test_count_of_multi_token_prediction() -> None:
    """DeepSeek-V3 with its depth: published FLOPs, and parameters by hand."""
    plain = load_recipe(RECIPES / "models" / "deepseek_v3.toml").model
    model = replace(plain, mtp=MTPConfig(1))
    assert training_flops_per_token(plain, 4096) / 1e9 == pytest.approx(249.8, abs=0.05)
    assert training_flops_per_token(model, 4096) / 1e9 == pytest.approx(260.0, abs=0.05)
    layer = count_parameters(replace(plain, num_layers=5)).total - count_parameters(replace(plain, num_layers=4)).total
    assert count_parameters(model).total - count_parameters(plain).total == layer + 2 * 7168**2 + 3 * 7168
    twice, repeated = (replace(plain, mtp=MTPConfig(2, repeats_layer=repeats)) for repeats in (False, True))
    assert count_parameters(repeated).total == count_parameters(model).total
    assert training_flops_per_token(twice, 4096) == training_flops_per_token(repeated, 4096)


SMALL = ModelConfig(
    vocab_size=11,
    num_layers=3,
    num_dense_layers=1,
    hidden_size=7,
    ffn_hidden_size=5,
    attention=AttentionConfig(num_heads=4, num_kv_heads=2, head_dim=6),
    moe=MoEConfig(num_experts=8, top_k=3, ffn_hidden_size=13, shared_ffn_hidden_size=9),
)


def test_count_of_every_component_by_hand() -> None:
    c = count_parameters(SMALL)
    assert (c["embedding"], c["head"], c["norms"]) == (11 * 7, 11 * 7, 7 * 7)
    assert c["attention"] == 3 * (24 * 7 + 12 * 7 + 12 * 7 + 7 * 24)
    assert (c["router"], c["dense"]) == (2 * 8 * 7, 3 * 7 * 5)
    assert (c["experts"], c["shared"], c["latent"]) == (2 * 8 * 3 * 7 * 13, 2 * 3 * 7 * 9, 0)
    assert c.total == 77 + 77 + 49 + c["attention"] + 112 + 105 + c["experts"] + 378
    assert c.active == c.total - 2 * 5 * 3 * 7 * 13, "five of eight experts rest"


def test_count_with_options() -> None:
    def total(**changes: object) -> int:
        return count_parameters(replace(SMALL, **changes)).total

    def with_moe(**changes: object) -> MoEConfig:
        return replace(SMALL.moe, **changes)

    base = count_parameters(SMALL).total
    assert total(embeddings_are_tied=True) == base - 77
    assert total(attention=replace(SMALL.attention, qk_norm=True)) == base + 3 * 12
    assert total(attention=replace(SMALL.attention, qkv_bias=True)) == base + 3 * (24 + 12 + 12)
    assert total(moe=with_moe(shared_expert_gate=True)) == base + 2 * 7
    assert total(moe=with_moe(latent_size=4)) == base + 2 * 2 * 7 * 4 - 2 * 8 * 3 * 13 * (7 - 4)
    assert total(moe=with_moe(bias_update_speed=1e-3)) == base, "the balancing bias is a buffer"
    assert total(moe=with_moe(num_experts=0)) == count_parameters(replace(SMALL, num_dense_layers=3)).total


def test_count_of_mla_with_and_without_query_compression() -> None:
    mla = AttentionConfig(
        kind="mla", num_heads=2, q_lora_rank=0, kv_lora_rank=5, qk_nope_head_dim=3, qk_rope_head_dim=2, v_head_dim=4
    )
    keys_values_output = (5 + 2) * 7 + 5 + 2 * (3 + 4) * 5 + 7 * 2 * 4
    direct = count_parameters(replace(SMALL, attention=mla))["attention"]
    assert direct == 3 * (2 * 5 * 7 + keys_values_output)
    compressed = count_parameters(replace(SMALL, attention=replace(mla, q_lora_rank=6)))["attention"]
    assert compressed == 3 * (6 * 7 + 6 + 2 * 5 * 6 + keys_values_output)


def test_count_of_flops_is_six_a_used_weight_and_attention() -> None:
    c = count_parameters(SMALL)
    matrices_a_token_meets = c.active - c["embedding"] - c["norms"] - c["router"]
    core = 3 * 6 * 4 * 6 * 100  # layers * 6 * heads * head_dim * half of 100 tokens, in QK^T and in PV
    assert training_flops_per_token(SMALL, 100) == 6 * matrices_a_token_meets + core
    tied = replace(SMALL, embeddings_are_tied=True)
    assert training_flops_per_token(tied, 100) == training_flops_per_token(SMALL, 100), (
        "a tied head is multiplied all the same"
    )


def test_count_of_flops_with_a_window() -> None:
    def core(seq_len_tokens: int, **changes: Any) -> int:
        attention = replace(SMALL.attention, **changes)
        return attention_core_flops_per_token(replace(SMALL, num_layers=6, attention=attention), seq_len_tokens)

    a_pair = 6 * 2 * 4 * 6  # forward and backward, QK^T and PV, heads, head_dim
    assert core(100) == 6 * a_pair * 50
    # of 100 tokens the first 20 see 10 on average, the others 20
    windowed = (20 * 10 + 80 * 20) * a_pair // 100
    assert core(100, sliding_window=20) == 6 * windowed
    assert core(100, sliding_window=20, full_attention_every=3) == 4 * windowed + 2 * a_pair * 50
    assert core(100, sliding_window=20, window_layers=(1, 5)) == 2 * windowed + 4 * a_pair * 50
    assert core(20, sliding_window=20) == core(20, sliding_window=21) == core(20)
    # 14 chunks of 7 tokens, in which a token sees 3.5 on average, and the last 2 tokens
    chunked = 4 * (14 * 49 + 4) * a_pair // 2 // 100
    assert core(100, attention_chunk_size=7, nope_every=3) == chunked + 2 * a_pair * 50
    of_six, shape = replace(SMALL, num_layers=6), replace(SMALL.attention, sliding_window=20)
    saved = training_flops_per_token(of_six, 100) - training_flops_per_token(replace(of_six, attention=shape), 100)
    assert saved == core(100) - core(100, sliding_window=20)


def test_count_of_flops_of_latent_experts() -> None:
    latent = replace(SMALL, moe=replace(SMALL.moe, latent_size=4))
    saved = 2 * 3 * 3 * 13 * (7 - 4) - 2 * 2 * 7 * 4
    assert training_flops_per_token(SMALL, 100) - training_flops_per_token(latent, 100) == 6 * saved


def test_check_counts_no_class_of_the_users() -> None:
    """It is code, which `titan-moe check` does not run: no number is better than that of another model."""
    report = describe(load_recipe(TINY, ["--model.class=mine:Model"]), 1)
    assert 'and FLOPs: those of model.class = "mine:Model" are counted when a run starts' in report
    assert "GFLOP" not in report and "active a token" not in report and "28.96k" not in report
    assert "28.96k" in describe(load_recipe(TINY), 1)
