"""The families of grouped-query attention with options of their own: GLM-4.5, OLMoE, MiniMax-M2, Hunyuan-V1-MoE."""

from typing import Any

from titan_moe.checkpoint.hf_names import names
from titan_moe.checkpoint.hf_names.family import Family, Part, Settings, Values
from titan_moe.checkpoint.hf_names.parts import (
    DEFAULTS,
    FIRST_K_DENSE,
    GQA,
    GROUPS,
    HEAD_DIM,
    NEXT_TOKENS,
    ONLY,
    PARTIAL_ROPE,
    ROPE,
    ROUTED,
    SHARED,
)
from titan_moe.config.model import ModelConfig

GLM4_MOE = Family(
    model_type="glm4_moe",
    architecture="Glm4MoeForCausalLM",
    fields=GQA | ROUTED | {"use_qk_norm": "attention.qk_norm", "attention_bias": "attention.qkv_bias"},
    names=lambda model: (
        names.COMMON | names.GQA | names.DENSE | names.EXPERTS | names.SHARED | names.ROUTER_BIAS | names.MTP
    ),
    fixed={"moe.score_fn": "sigmoid"},
    only={"hidden_act": "silu"},
    defaults=DEFAULTS
    | {"head_dim": None, "rms_norm_eps": 1e-5, "partial_rotary_factor": 0.5, "use_qk_norm": False}
    | {"attention_bias": False, "norm_topk_prob": True, "routed_scaling_factor": 1.0, "first_k_dense_replace": 1}
    | {"num_nextn_predict_layers": 0},
    parts=(
        HEAD_DIM,
        PARTIAL_ROPE,
        FIRST_K_DENSE,
        SHARED,
        GROUPS,
        NEXT_TOKENS,
    ),
    not_built={"mtp": names.prefixes_of_mtp},
    built=frozenset({"mtp"}),
    without={"mtp": {"num_nextn_predict_layers": 0}},
)
OLMOE = Family(
    model_type="olmoe",
    architecture="OlmoeForCausalLM",
    fields=GQA
    | {"num_experts": "moe.num_experts", "intermediate_size": "moe.ffn_hidden_size"}
    | {"norm_topk_prob": "moe.normalize_topk"},
    names=lambda model: names.COMMON | names.GQA | names.EXPERTS,
    fixed={"attention.qk_norm": True, "attention.qk_norm_over": "all_heads"},
    only={"hidden_act": "silu", "attention_bias": False},
    defaults=DEFAULTS | {"rms_norm_eps": 1e-5, "norm_topk_prob": False, "clip_qkv": None},
    parts=(
        ROPE,
        Part(
            lambda settings: {"attention.head_dim": settings["hidden_size"] // settings["num_attention_heads"]},
            lambda model: {},
        ),
        Part(
            lambda settings: {"attention.clip_qkv": settings["clip_qkv"] or 0.0},
            lambda model: {"clip_qkv": model.attention.clip_qkv or None},
        ),
    ),
)


def _read_rotary_dim(settings: Settings) -> Values:
    """The share of a head, or the number of its elements, as in released files."""
    values = PARTIAL_ROPE.read(settings)
    if settings["rotary_dim"] is not None and "attention.partial_rotary_factor" not in values:
        values["attention.partial_rotary_factor"] = settings["rotary_dim"] / settings["head_dim"]
    return values


MINIMAX_M2 = Family(
    model_type="minimax_m2",
    architecture="MiniMaxM2ForCausalLM",
    fields=GQA
    | {"num_local_experts": "moe.num_experts", "intermediate_size": "moe.ffn_hidden_size"}
    | {"head_dim": "attention.head_dim"},
    names=lambda model: (
        names.COMMON
        | names.GQA
        | names.routed("block_sparse_moe", "w1", "w3", "w2")
        | {"feed_forward.router.expert_bias_E": names.one("block_sparse_moe.e_score_correction_bias")}
    ),
    fixed={"attention.qk_norm": True, "attention.qk_norm_over": "all_heads", "moe.score_fn": "sigmoid"},
    only={"hidden_act": "silu", "use_qk_norm": True, "qk_norm_type": "per_layer", "scoring_func": "sigmoid"}
    | {"use_routing_bias": True, "shared_intermediate_size": 0, "router_jitter_noise": 0.0},
    defaults=DEFAULTS | {"head_dim": 128, "rope_theta": 5e6, "rotary_dim": None},
    parts=(
        Part(
            _read_rotary_dim,
            lambda model: PARTIAL_ROPE.write(model) | {"rotary_dim": model.attention.rotated_head_dim},
        ),
    ),
)


def _of_every_layer(settings: Settings, key: str) -> Any:
    """A number, or a list with the same number for each layer."""
    found = settings[key]
    values = found if isinstance(found, list) else [found]
    if len(set(values)) != 1:
        raise ValueError(f"{key} = {values} in config.json: layers that differ are not built here")
    return values[0]


def _read_hunyuan(settings: Settings) -> Values:
    """Lists of equal layers, and a shared expert of the width of a routed one."""
    if (number := _of_every_layer(settings, "num_shared_expert")) != 1:
        raise ValueError(f"num_shared_expert = {number} in config.json: only 1 is built here")
    width = settings["intermediate_size"]
    if (of_experts := _of_every_layer(settings, "moe_intermediate_size")) not in (None, width):
        raise ValueError(f"moe_intermediate_size = {of_experts} in config.json is not intermediate_size = {width}")
    return {
        "moe.num_experts": _of_every_layer(settings, "num_experts"),
        "moe.top_k": _of_every_layer(settings, "moe_topk"),
        "moe.ffn_hidden_size": width,
        "moe.shared_ffn_hidden_size": width,
    }


def _write_hunyuan(model: ModelConfig) -> Values:
    moe = model.moe
    values: Values = {"num_experts": moe.num_experts, "moe_topk": moe.top_k, "num_shared_expert": 1}
    return values | dict.fromkeys(("intermediate_size", "moe_intermediate_size"), moe.ffn_hidden_size)


def _read_stretched_rope(settings: Settings) -> Values:
    """With `alpha`, the frequencies are those of a larger base, whatever the sequence's length."""
    scaling = settings["rope_parameters"] or settings["rope_scaling"] or {}
    if "dynamic" not in (scaling.get("rope_type"), scaling.get("type")) or not scaling.get("alpha"):
        return ROPE.read(settings)
    theta, width = scaling.get("rope_theta") or settings["rope_theta"], HEAD_DIM.read(settings)["attention.head_dim"]
    return {"attention.rope_theta": theta * scaling["alpha"] ** (width / (width - 2))}


HUNYUAN_V1_MOE = Family(
    model_type="hunyuan_v1_moe",
    architecture="HunYuanMoEV1ForCausalLM",
    fields={key: ours for key, ours in GQA.items() if key != "num_experts_per_tok"},
    names=lambda model: (
        names.COMMON
        | names.GQA
        | names.EXPERTS
        | names.mlp("feed_forward.shared_experts", "mlp.shared_mlp")
        | {
            "feed_forward.router.weight": names.one("mlp.gate.wg.weight"),
            "attention.qk_norm_rope.q_norm_weight": names.one("self_attn.query_layernorm.weight"),
            "attention.qk_norm_rope.k_norm_weight": names.one("self_attn.key_layernorm.weight"),
        }
    ),
    fixed={"attention.qk_norm": True, "attention.qk_norm_is_after_rope": True},
    only=ONLY | {"use_qk_norm": True, "use_cla": False, "moe_layer_num_skipped": 0},
    defaults=DEFAULTS | {"head_dim": None, "rms_norm_eps": 1e-5, "num_shared_expert": 1, "moe_intermediate_size": None},
    parts=(HEAD_DIM, Part(_read_stretched_rope, ROPE.write), Part(_read_hunyuan, _write_hunyuan)),
)
