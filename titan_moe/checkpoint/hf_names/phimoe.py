"""Phi-3.5-MoE: layer norms, biases, LongRoPE, and two experts a token that sparsemixer weighs."""

from titan_moe.checkpoint.hf_names import names
from titan_moe.checkpoint.hf_names.family import Family, Part, Settings, Values
from titan_moe.checkpoint.hf_names.parts import DEFAULTS, GQA, HEAD_DIM, ROPE
from titan_moe.config.model import ModelConfig

LONGROPE = {
    "short_factor": "longrope_short_factor",
    "long_factor": "longrope_long_factor",
    "short_mscale": "longrope_short_scale",
    "long_mscale": "longrope_long_scale",
    "original_max_position_embeddings": "longrope_original_tokens",
}


def _read_rope(settings: Settings) -> Values:
    """LongRoPE, or none. `factor` and `attention_factor` have no effect beside the two scales."""
    parameters = dict(settings["rope_parameters"] or settings["rope_scaling"] or {})
    kind = parameters.get("rope_type") or parameters.get("type", "default")
    if kind != "longrope":
        return ROPE.read(settings)
    values: Values = {"rope_theta": float(parameters.get("rope_theta") or settings["rope_theta"])}
    for key, ours in LONGROPE.items():
        if key not in parameters:
            raise ValueError(f"the longrope of config.json has no {key}, which this family needs; add it")
        value = parameters[key]
        values[ours] = tuple(map(float, value)) if isinstance(value, list) else value
    return {f"attention.{key}": value for key, value in values.items()}


def _write_rope(model: ModelConfig) -> Values:
    a = model.attention
    if not a.longrope_short_factor:
        return ROPE.write(model)
    scaling = {key: getattr(a, ours) for key, ours in LONGROPE.items()}
    lists = {key: list(scaling[key]) for key in ("short_factor", "long_factor")}
    return {
        "rope_theta": a.rope_theta,
        "rope_scaling": {"type": "longrope", "rope_type": "longrope"} | scaling | lists,
        "max_position_embeddings": 32 * a.longrope_original_tokens,
    }


PHIMOE = Family(
    model_type="phimoe",
    architecture="PhimoeForCausalLM",
    fields=GQA
    | {
        "num_local_experts": "moe.num_experts",
        "intermediate_size": "moe.ffn_hidden_size",
        "router_jitter_noise": "moe.sparsemixer_jitter",
        "lm_head_bias": "head_bias",
    },
    names=lambda model: (
        names.COMMON
        | names.GQA
        | names.routed("block_sparse_moe", "w1", "w3", "w2")
        | {
            "norm.bias": names.one("model.norm.bias"),
            "attention_norm.bias": names.one("input_layernorm.bias"),
            "ffn_norm.bias": names.one("post_attention_layernorm.bias"),
        }
    ),
    fixed={"norm": "layer", "moe.score_fn": "sparsemixer", "moe.normalize_topk": False},
    only={"hidden_act": "silu", "input_jitter_noise": 0.0},
    defaults=DEFAULTS
    | {
        "rope_theta": 1e6,
        "rms_norm_eps": 1e-5,
        "head_dim": None,
        "sliding_window": None,
        "attention_bias": False,
        "lm_head_bias": False,
        "router_jitter_noise": 0.01,
    },
    parts=(
        HEAD_DIM,
        Part(_read_rope, _write_rope),
        Part(
            lambda settings: dict.fromkeys(("attention.qkv_bias", "attention.out_bias"), settings["attention_bias"]),
            lambda model: {"attention_bias": model.attention.out_bias},
        ),
        Part(
            lambda settings: {"attention.sliding_window": settings["sliding_window"] or 0},
            lambda model: {"sliding_window": model.attention.sliding_window or None},
        ),
    ),
)
