"""Parts of config.json that several families share: rotary embedding, windows, dense layers, shared experts."""

from typing import Any

from titan_moe.checkpoint.hf_names.family import Part, Settings, Values
from titan_moe.config.model import ModelConfig

COMMON = {
    "vocab_size": "vocab_size",
    "num_hidden_layers": "num_layers",
    "hidden_size": "hidden_size",
    "rms_norm_eps": "norm_eps",
    "tie_word_embeddings": "embeddings_are_tied",
    "num_attention_heads": "attention.num_heads",
    "num_experts_per_tok": "moe.top_k",
}
GQA = COMMON | {"num_key_value_heads": "attention.num_kv_heads"}
ONLY = {"hidden_act": "silu", "attention_bias": False, "mlp_bias": False}
ROUTED = {
    "n_routed_experts": "moe.num_experts",
    "moe_intermediate_size": "moe.ffn_hidden_size",
    "norm_topk_prob": "moe.normalize_topk",
    "routed_scaling_factor": "moe.route_scale",
}
YARN = {
    "factor": "yarn_factor",
    "original_max_position_embeddings": "yarn_original_tokens",
    "beta_fast": "yarn_beta_fast",
    "beta_slow": "yarn_beta_slow",
    "truncate": "yarn_truncate",
    "mscale": "yarn_mscale",
    "mscale_all_dim": "yarn_mscale_all_dim",
}
ROPE_NEUTRAL = {"attention_factor": None}
"""Keys of a rotary embedding with the only value that is built."""


def _read_rope(settings: Settings) -> Values:
    values = _read_partial_rope(settings)
    if (share := values.pop("attention.partial_rotary_factor", 1.0)) != 1.0:
        raise ValueError(f"partial_rotary_factor = {share!r} in config.json: of this family only 1.0 is built here")
    return values


def _read_partial_rope(settings: Settings) -> Values:
    """Both forms: `rope_parameters`, and the older `rope_theta` with `rope_scaling`."""
    parameters: dict[str, Any] = dict(settings["rope_parameters"] or settings["rope_scaling"] or {})
    theta = parameters.pop("rope_theta", None) or settings["rope_theta"]
    kind = parameters.pop("rope_type", None) or parameters.get("type", "default")
    parameters.pop("type", None)
    if "partial_rotary_factor" in {*settings.values, *settings.defaults}:  # outside of the table in older files
        parameters.setdefault("partial_rotary_factor", settings["partial_rotary_factor"])
    values: Values = {"attention.rope_theta": float(theta)}
    if (share := parameters.pop("partial_rotary_factor", None)) is not None:
        values["attention.partial_rotary_factor"] = share
    for key, value in ROPE_NEUTRAL.items():
        if (found := parameters.pop(key, value)) != value:
            raise ValueError(f"{key} = {found!r} of the rotary embedding in config.json: only {value!r} is built here")
    if kind == "default":
        return values
    if kind != "yarn":
        raise ValueError(f"the rotary embedding {kind!r} in config.json is not built here; default and yarn are")
    if unknown := parameters.keys() - YARN.keys():
        raise ValueError(f"{', '.join(sorted(unknown))} of yarn in config.json are not built here")
    if bool(parameters.get("mscale")) != bool(parameters.get("mscale_all_dim")):
        raise ValueError("config.json has one of mscale and mscale_all_dim of yarn; both or none are built here")
    parameters.setdefault("original_max_position_embeddings", settings["max_position_embeddings"])
    kept = {key: value for key, value in parameters.items() if value is not None}
    return values | {f"attention.{YARN[key]}": type_of(key)(value) for key, value in kept.items()}


def type_of(key: str) -> type:
    """Of a value of yarn."""
    return {"original_max_position_embeddings": int, "truncate": bool}.get(key, float)


def _write_rope(model: ModelConfig) -> Values:
    a = model.attention
    values: Values = {"rope_theta": a.rope_theta}
    if a.yarn_factor != 1.0:
        scaling = {"type": "yarn", "rope_type": "yarn", **{key: getattr(a, ours) for key, ours in YARN.items()}}
        if not a.yarn_mscale_all_dim and a.yarn_mscale == 1.0:
            del scaling["mscale"], scaling["mscale_all_dim"]
        if a.yarn_truncate:
            del scaling["truncate"]
        values |= {"rope_scaling": scaling, "max_position_embeddings": int(a.yarn_factor * a.yarn_original_tokens)}
    return values


ROPE = Part(_read_rope, _write_rope)
PARTIAL_ROPE = Part(
    _read_partial_rope,
    lambda model: _write_rope(model) | {"partial_rotary_factor": model.attention.partial_rotary_factor},
)
"""It may rotate a share of a head. Its family has a default for `partial_rotary_factor`."""
ROPE_DEFAULTS: Values = {"rope_parameters": None, "rope_scaling": None, "rope_theta": 10_000.0}

DEFAULTS = ROPE_DEFAULTS | {"tie_word_embeddings": False, "rms_norm_eps": 1e-6}


def _read_head_dim(settings: Settings) -> Values:
    derived = settings["hidden_size"] // settings["num_attention_heads"]
    return {"attention.head_dim": settings["head_dim"] or derived}


HEAD_DIM = Part(_read_head_dim, lambda model: {"head_dim": model.attention.head_dim})
"""Optional: by default heads have the model's width together."""


def _read_window(settings: Settings) -> Values:
    return {"attention.sliding_window": (settings["sliding_window"] or 0) if settings["use_sliding_window"] else 0}


def _write_window(model: ModelConfig) -> Values:
    window = model.attention.sliding_window
    return {"sliding_window": window or None, "use_sliding_window": bool(window)}


WINDOW = Part(_read_window, _write_window)
"""All layers have it."""


def _read_leading(settings: Settings) -> Values:
    dense = list(settings["mlp_only_layers"] or [])
    if dense != list(range(len(dense))):
        raise ValueError(f"mlp_only_layers = {dense} in config.json: only the first layers can be dense here")
    return _dense(len(dense), settings)


def _dense(num_layers: int, settings: Settings) -> Values:
    return {"num_dense_layers": num_layers, "ffn_hidden_size": settings["intermediate_size"] if num_layers else 0}


def _write_leading(model: ModelConfig) -> Values:
    return {"mlp_only_layers": list(range(model.num_dense_layers)), "intermediate_size": _dense_width(model)}


def _dense_width(model: ModelConfig) -> int:
    return model.ffn_hidden_size or model.moe.ffn_hidden_size


LEADING_DENSE = Part(_read_leading, _write_leading)
"""A list of the dense layers."""
FIRST_K_DENSE = Part(
    lambda settings: _dense(settings["first_k_dense_replace"] or 0, settings),
    lambda model: {"first_k_dense_replace": model.num_dense_layers, "intermediate_size": _dense_width(model)},
)
"""Their number."""


def _read_layer_types(settings: Settings) -> Values:
    types = settings["mlp_layer_types"] or ["dense"] + ["sparse"] * (settings["num_hidden_layers"] - 1)
    num_dense = types.index("sparse") if "sparse" in types else len(types)
    if "dense" in types[num_dense:]:
        raise ValueError("mlp_layer_types in config.json: only the first layers can be dense here")
    return _dense(num_dense, settings)


def _write_layer_types(model: ModelConfig) -> Values:
    types = ["dense"] * model.num_dense_layers + ["sparse"] * model.num_moe_layers
    return {"mlp_layer_types": types, "intermediate_size": _dense_width(model)}


LAYER_TYPES_DENSE = Part(_read_layer_types, _write_layer_types)
"""The kind of each layer."""


def _read_shared(settings: Settings) -> Values:
    return {"moe.shared_ffn_hidden_size": (settings["n_shared_experts"] or 0) * settings["moe_intermediate_size"]}


def _write_shared(model: ModelConfig) -> Values:
    number, rest = divmod(model.moe.shared_ffn_hidden_size, model.moe.ffn_hidden_size)
    if rest:
        width = model.moe.ffn_hidden_size
        raise ValueError(
            f"model.moe.shared_ffn_hidden_size = {model.moe.shared_ffn_hidden_size} is no multiple of "
            f"model.moe.ffn_hidden_size = {width}, as shared experts of this family are"
        )
    return {"n_shared_experts": number}


SHARED = Part(_read_shared, _write_shared)
"""Shared experts, each as wide as a routed one."""
GROUPS = Part(
    lambda settings: {
        "moe.num_groups": settings["n_group"] or 1,
        "moe.top_k_groups": settings["topk_group"] or 1,
        "moe.group_score": "top2_sum",
    },
    lambda model: {"n_group": model.moe.num_groups, "topk_group": model.moe.top_k_groups},
)
QUERY_LATENT = Part(
    lambda settings: {"attention.q_lora_rank": settings["q_lora_rank"] or 0},
    lambda model: {"q_lora_rank": model.attention.q_lora_rank or None},
)
