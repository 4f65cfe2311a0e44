"""The families: Qwen2-MoE, Qwen3-MoE, Mixtral, DeepSeek-V2 and V3, GLM-4.7-Flash, dots.llm1, Solar-Open; and others."""

import math
from collections.abc import Mapping
from dataclasses import replace
from operator import itemgetter
from typing import Any

from titan_moe.checkpoint.hf_names import names
from titan_moe.checkpoint.hf_names.dense import dense_family
from titan_moe.checkpoint.hf_names.ernie import ERNIE4_5_MOE
from titan_moe.checkpoint.hf_names.family import Family, NoWords, Part, Settings, Values
from titan_moe.checkpoint.hf_names.gpt_oss import GPT_OSS
from titan_moe.checkpoint.hf_names.gqa_families import GLM4_MOE, HUNYUAN_V1_MOE, MINIMAX_M2, OLMOE
from titan_moe.checkpoint.hf_names.granite import GRANITE_MOE, GRANITE_MOE_SHARED
from titan_moe.checkpoint.hf_names.llama4 import LLAMA4_TEXT
from titan_moe.checkpoint.hf_names.other_blocks import OTHER_BLOCKS
from titan_moe.checkpoint.hf_names.parts import (
    COMMON,
    DEFAULTS,
    DENSE_BY_FREQUENCY,
    DENSE_LIST,
    FIRST_K_DENSE,
    GQA,
    GROUPS,
    HEAD_DIM,
    LAYER_TYPES_DENSE,
    NEXT_TOKENS,
    ONLY,
    QUERY_LATENT,
    ROPE,
    ROUTED,
    SHARED,
    WINDOW,
)
from titan_moe.checkpoint.hf_names.phimoe import PHIMOE
from titan_moe.checkpoint.hf_names.windowed_families import AFMOE, EXAONE_MOE, MELLUM
from titan_moe.checkpoint.hf_names.windows import BEFORE_LAYER, FROM_LAYER
from titan_moe.config.model import ModelConfig

QWEN = GQA | {
    "num_experts": "moe.num_experts",
    "moe_intermediate_size": "moe.ffn_hidden_size",
    "norm_topk_prob": "moe.normalize_topk",
}
QWEN_DEFAULTS = DEFAULTS | {"mlp_only_layers": None, "decoder_sparse_step": 1, "norm_topk_prob": False}
QWEN_DEFAULTS |= {"use_sliding_window": False, "sliding_window": 4096}


QWEN3_MOE = Family(
    model_type="qwen3_moe",
    architecture="Qwen3MoeForCausalLM",
    fields=QWEN,
    names=lambda model: names.COMMON | names.GQA | names.DENSE | names.EXPERTS,
    fixed={"attention.qk_norm": True},
    only=ONLY,
    defaults=QWEN_DEFAULTS | {"head_dim": None},
    parts=(HEAD_DIM, ROPE, WINDOW, DENSE_LIST),
)
GATED = "feed_forward.shared_experts"
QWEN2_MOE = replace(
    QWEN3_MOE,
    model_type="qwen2_moe",
    architecture="Qwen2MoeForCausalLM",
    fields=QWEN | {"shared_expert_intermediate_size": "moe.shared_ffn_hidden_size", "qkv_bias": "attention.qkv_bias"},
    names=lambda model: (
        QWEN3_MOE.names(model)
        | names.mlp(f"{GATED}.mlp", "mlp.shared_expert")
        | {f"{GATED}.gate.weight": names.one("mlp.shared_expert_gate.weight")}
    ),
    fixed={"moe.shared_expert_gate": True},
    only={"hidden_act": "silu"},
    defaults=QWEN_DEFAULTS | {"qkv_bias": True, "layer_types": None, "max_window_layers": 28, "head_dim": None},
    parts=(HEAD_DIM, ROPE, BEFORE_LAYER, DENSE_LIST),
)
MIXTRAL = Family(
    model_type="mixtral",
    architecture="MixtralForCausalLM",
    fields=GQA | {"num_local_experts": "moe.num_experts", "intermediate_size": "moe.ffn_hidden_size"},
    names=lambda model: names.COMMON | names.GQA | names.routed("block_sparse_moe", "w1", "w3", "w2"),
    only={"hidden_act": "silu"},
    defaults=DEFAULTS | {"rope_theta": 1e6, "rms_norm_eps": 1e-5, "head_dim": None, "sliding_window": None},
    parts=(
        HEAD_DIM,
        ROPE,
        Part(
            lambda settings: {"attention.sliding_window": settings["sliding_window"] or 0},
            lambda model: {"sliding_window": model.attention.sliding_window or None},
        ),
    ),
)
MLA_DEFAULTS = DEFAULTS | {"num_key_value_heads": None, "moe_layer_freq": 1}
WIDTHS = ("kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim")
OF_DEEPSEEK = ROUTED | {name: f"attention.{name}" for name in WIDTHS}


def _names_of_mla(model: ModelConfig) -> names.Names:
    attention = names.MLA if model.attention.q_lora_rank else names.MLA_WITHOUT_QUERY_LATENT
    return names.COMMON | attention | names.DENSE | names.EXPERTS | names.SHARED


def _read_groups_of_v2(settings: Settings) -> Values:
    method = settings["topk_method"]
    if method == "greedy":
        return {}
    if method != "group_limited_greedy":
        raise ValueError(f"topk_method = {method!r} in config.json: greedy and group_limited_greedy are built here")
    groups = {"moe.num_groups": settings["n_group"], "moe.top_k_groups": settings["topk_group"]}
    return groups | {"moe.group_score": "max"}


def _write_groups_of_v2(model: ModelConfig) -> Values:
    if model.moe.num_groups == 1:
        return {"topk_method": "greedy"}
    return {
        "topk_method": "group_limited_greedy",
        "n_group": model.moe.num_groups,
        "topk_group": model.moe.top_k_groups,
    }


def _read_key_heads(settings: Settings) -> Values:
    number, num_heads = settings["num_key_value_heads"], settings["num_attention_heads"]
    if number not in (None, num_heads):
        raise ValueError(f"num_key_value_heads = {number} in config.json: latents give keys to all {num_heads} heads")
    return {}


KEY_HEADS = Part(_read_key_heads, lambda model: {"num_key_value_heads": model.attention.num_heads})
DEEPSEEK_V2 = Family(
    model_type="deepseek_v2",
    architecture="DeepseekV2ForCausalLM",
    fields=COMMON | OF_DEEPSEEK,
    names=_names_of_mla,
    fixed={"attention.kind": "mla", "attention.rope_is_interleaved": True},
    only=ONLY | {"scoring_func": "softmax"},
    defaults=MLA_DEFAULTS
    | {"topk_method": "greedy", "first_k_dense_replace": 0, "norm_topk_prob": False, "routed_scaling_factor": 1.0},
    parts=(KEY_HEADS, ROPE, DENSE_BY_FREQUENCY, SHARED, QUERY_LATENT, Part(_read_groups_of_v2, _write_groups_of_v2)),
)
DEEPSEEK_V3 = replace(
    DEEPSEEK_V2,
    model_type="deepseek_v3",
    architecture="DeepseekV3ForCausalLM",
    fields=COMMON | OF_DEEPSEEK | {"rope_interleave": "attention.rope_is_interleaved"},
    names=lambda model: _names_of_mla(model) | names.ROUTER_BIAS | names.MTP,
    fixed={"attention.kind": "mla", "moe.score_fn": "sigmoid"},
    only=ONLY | {"scoring_func": "sigmoid", "topk_method": "noaux_tc"},
    defaults=MLA_DEFAULTS | {"rope_interleave": True, "num_nextn_predict_layers": 0},
    parts=(KEY_HEADS, ROPE, DENSE_BY_FREQUENCY, SHARED, QUERY_LATENT, GROUPS, NEXT_TOKENS),
    not_built={"mtp": names.prefixes_of_mtp},
    built=frozenset({"mtp"}),
    without={"mtp": {"num_nextn_predict_layers": 0}},
)
GLM4_MOE_LITE = replace(
    DEEPSEEK_V3,
    model_type="glm4_moe_lite",
    architecture="Glm4MoeLiteForCausalLM",
    parts=(KEY_HEADS, ROPE, LAYER_TYPES_DENSE, SHARED, QUERY_LATENT, GROUPS, NEXT_TOKENS),
    defaults=MLA_DEFAULTS
    | {"num_nextn_predict_layers": 0}
    | {"rope_interleave": True, "rms_norm_eps": 1e-5, "mlp_layer_types": None},
)


DOTS1 = Family(
    model_type="dots1",
    architecture="Dots1ForCausalLM",
    fields=GQA | ROUTED,
    names=lambda model: names.COMMON | names.GQA | names.DENSE | names.EXPERTS | names.SHARED | names.ROUTER_BIAS,
    fixed={"attention.qk_norm": True, "moe.score_fn": "sigmoid"},
    only=ONLY,
    defaults=DEFAULTS | {"head_dim": None, "sliding_window": 4096, "max_window_layers": 62, "layer_types": None},
    parts=(
        HEAD_DIM,
        ROPE,
        FROM_LAYER,
        FIRST_K_DENSE,
        SHARED,
        GROUPS,
    ),
)
SOLAR_OPEN = replace(
    DOTS1,
    model_type="solar_open",
    architecture="SolarOpenForCausalLM",
    fixed={"attention.qk_norm": False, "moe.score_fn": "sigmoid"},
    only=ONLY | {"first_k_dense_replace": 0},
    defaults=DEFAULTS | {"head_dim": 128, "rope_theta": 1e6, "rms_norm_eps": 1e-5},
    parts=(HEAD_DIM, ROPE, SHARED, GROUPS),
)

BUILT: tuple[Family, ...] = QWEN3_MOE, QWEN2_MOE, MIXTRAL, DEEPSEEK_V2, DEEPSEEK_V3, GLM4_MOE_LITE, DOTS1, SOLAR_OPEN
BUILT += GLM4_MOE, OLMOE, MINIMAX_M2, HUNYUAN_V1_MOE, GPT_OSS, GRANITE_MOE, GRANITE_MOE_SHARED, ERNIE4_5_MOE
BUILT += PHIMOE, LLAMA4_TEXT, AFMOE, EXAONE_MOE, MELLUM
NUM_NEAREST = 3
"""Families that a message names, of those that have no words for a model."""
FAMILIES = {family.model_type: family for family in BUILT}


def family_of(config: Mapping[str, Any]) -> Family:
    """The family of a config.json: by the class that it names, else by its type.

    Raises: ValueError for one that is not built.
    """
    classes = config.get("architectures") or []
    by_class = [family for family in FAMILIES.values() if family.architecture in classes]
    found = by_class[0] if by_class else FAMILIES.get(config.get("model_type", ""))
    if found is None and (dense := dense_family(config)):
        raise ValueError(
            f"config.json is of {dense.model_type}, a dense model; it can begin a MoE model with "
            "checkpoint.upcycle.granularity, in a recipe that `titan-moe recipe FOLDER --upcycle 8` writes"
        )
    if found is None and (block := OTHER_BLOCKS.get(str(config.get("model_type", "")).removesuffix("_text"))):
        raise ValueError(f"model_type = {config['model_type']!r} in config.json has {block}, which is not built here")
    if found is None:
        raise ValueError(
            f"config.json has model_type = {config.get('model_type')!r} and architectures = {classes}; families that "
            f"can be read are {', '.join(FAMILIES)}"
        )
    return found


def family_for(model: ModelConfig) -> Family:
    """The first family that has words for a model.

    Raises: ValueError with the reasons of the families that lack words for the fewest fields.
    """
    reasons: list[tuple[float, str]] = []
    for family in FAMILIES.values():
        try:
            family.write(model)
        except NoWords as error:
            reasons.append((len(error.fields), str(error)))
        except ValueError as error:
            reasons.append((math.inf, f"{family.model_type}: {error}"))
        else:
            return family
    nearest = [reason for _, reason in sorted(reasons, key=itemgetter(0))]
    others = f"; and {len(nearest) - NUM_NEAREST} more families do not"
    raise ValueError(
        f"no family of Hugging Face computes what this model does: {'; '.join(nearest[:NUM_NEAREST])}{others}"
    )
