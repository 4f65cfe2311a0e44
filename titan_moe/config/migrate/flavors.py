"""The shapes that torchtitan has by name and flavor, as our fields: facts of its release 0.2.2."""

from collections.abc import Mapping
from typing import Any


def _qwen3(layers: int, hidden: int, heads: int, kv_heads: int, experts: tuple[int, int, int], **others: Any) -> Any:
    number, top_k, width = experts
    return {
        "model.vocab_size": 151936,
        "model.num_layers": layers,
        "model.hidden_size": hidden,
        "model.norm_eps": 1e-6,
        "model.attention.kind": "gqa",
        "model.attention.num_heads": heads,
        "model.attention.num_kv_heads": kv_heads,
        "model.attention.head_dim": 128,
        "model.attention.qk_norm": True,
        "model.attention.rope_theta": 1e6,
        "model.moe.num_experts": number,
        "model.moe.top_k": top_k,
        "model.moe.ffn_hidden_size": width,
        "model.moe.score_fn": "softmax",
        "model.moe.normalize_topk": True,
        "model.moe.bias_update_speed": 1e-3,
    } | {key.replace("__", "."): value for key, value in others.items()}


def _deepseek(
    layers: tuple[int, int],
    hidden: int,
    heads: int,
    widths: tuple[int, int],
    experts: tuple[int, int, int],
    **others: Any,
) -> Any:
    (number, top_k, shared), (dense_width, width) = experts, widths
    return {
        "model.vocab_size": 102400,
        "model.num_layers": layers[0],
        "model.num_dense_layers": layers[1],
        "model.hidden_size": hidden,
        "model.ffn_hidden_size": dense_width,
        "model.norm_eps": 1e-5,
        "model.attention.kind": "mla",
        "model.attention.num_heads": heads,
        "model.attention.q_lora_rank": 0,
        "model.attention.kv_lora_rank": 512,
        "model.attention.qk_nope_head_dim": 128,
        "model.attention.qk_rope_head_dim": 64,
        "model.attention.v_head_dim": 128,
        "model.attention.rope_theta": 10_000.0,
        "model.attention.rope_is_interleaved": True,
        "model.attention.latent_norm_eps": 1e-5,
        "model.moe.num_experts": number,
        "model.moe.top_k": top_k,
        "model.moe.ffn_hidden_size": width,
        "model.moe.shared_ffn_hidden_size": shared * width,
        "model.moe.score_fn": "softmax",
        "model.moe.normalize_topk": False,
        "model.moe.bias_update_speed": 1e-3,
    } | {key.replace("__", "."): value for key, value in others.items()}


GROUPS_OF_8 = {"model__moe__num_groups": 8, "model__moe__group_score": "top2_sum"}
LARGE = {"model__attention__q_lora_rank": 1536}
OF_671B = {
    "model__vocab_size": 129280,
    "model__moe__score_fn": "sigmoid",
    "model__moe__normalize_topk": True,
    "model__moe__route_scale": 2.5,
    "model__moe__top_k_groups": 4,
}
_DEEPSEEK_DEBUG = _deepseek((6, 1), 256, 16, (1024, 256), (8, 3, 2), model__vocab_size=2048)
FLAVORS: Mapping[tuple[str, str], Mapping[str, Any]] = {
    ("qwen3", "debugmodel_moe"): _qwen3(8, 256, 16, 8, (64, 8, 768), model__vocab_size=2048),
    ("qwen3", "30B-A3B"): _qwen3(48, 2048, 32, 4, (128, 8, 768)),
    ("qwen3", "235B-A22B"): _qwen3(94, 4096, 64, 4, (128, 8, 1536), model__attention__rope_theta=5e6),
    ("deepseek_v3", "debugmodel"): _DEEPSEEK_DEBUG,
    ("deepseek_v3", "debugmodel_flex_attn"): _DEEPSEEK_DEBUG,
    ("deepseek_v3", "16B"): _deepseek((27, 1), 2048, 16, (10944, 1408), (64, 6, 2)),
    ("deepseek_v3", "236B"): _deepseek(
        (60, 1), 5120, 128, (12288, 1536), (160, 6, 2), **LARGE, **GROUPS_OF_8,
        model__moe__top_k_groups=3, model__moe__route_scale=16.0,
    ),
    ("deepseek_v3", "671B"): _deepseek(
        (61, 3), 7168, 128, (18432, 2048), (256, 8, 1), **LARGE, **GROUPS_OF_8, **OF_671B
    ),
}  # fmt: skip
"""By `model.name` and `model.flavor`. Contexts beyond 4,096 tokens are extended with YaRN there."""
YARN_FROM_TOKENS = 4096
"""The context of DeepSeek's flavors that torchtitan extends, by a factor of 40."""
SMALL_FLAVORS, SMALL_MSCALE = ("debugmodel", "debugmodel_flex_attn", "16B"), 0.7
"""Those of DeepSeek whose scale of the softmax grows less with it."""
