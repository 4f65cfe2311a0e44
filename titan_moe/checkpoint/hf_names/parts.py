"""What config.json of several families says alike: sizes, rotary embedding, windows, dense layers, shared experts."""

from collections.abc import Iterable, Mapping
from typing import Any

from titan_moe.checkpoint.hf_names.family import Part, Settings, Values
from titan_moe.config.model import ModelConfig, MoEConfig

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
LLAMA3 = {
    "factor": "llama3_factor",
    "original_max_position_embeddings": "llama3_original_tokens",
    "low_freq_factor": "llama3_low_freq_factor",
    "high_freq_factor": "llama3_high_freq_factor",
}
EXTENSIONS = {"yarn": YARN, "llama3": LLAMA3}
"""Kinds of rotary embedding -> their keys and our fields."""
ROPE_NEUTRAL = {"attention_factor": None}
"""Keys of a rotary embedding with the only value that is built."""


def read_rope(settings: Settings, if_missing: Mapping[str, Any] | None = None) -> Values:
    """`if_missing` is what a config.json without a word of a rotary embedding means; by default a plain one."""
    values = _read_partial_rope(settings, if_missing)
    if (share := values.pop("attention.partial_rotary_factor", 1.0)) != 1.0:
        raise ValueError(f"partial_rotary_factor = {share!r} in config.json: of this family only 1.0 is built here")
    return values


def _read_partial_rope(settings: Settings, if_missing: Mapping[str, Any] | None = None) -> Values:
    """Both forms: `rope_parameters`, and the older `rope_theta` with `rope_scaling`."""
    parameters: dict[str, Any] = dict(settings["rope_parameters"] or settings["rope_scaling"] or {})
    if if_missing and not parameters and settings["rope_parameters"] is None:
        parameters, settings.assumed["rope_parameters"] = dict(if_missing), if_missing
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
    if kind not in EXTENSIONS:
        built = "default, yarn and llama3 are"
        raise ValueError(f"the rotary embedding {kind!r} in config.json is not built here; {built}")
    ours = EXTENSIONS[kind]
    if unknown := parameters.keys() - ours.keys():
        raise ValueError(f"{', '.join(sorted(unknown))} of {kind} in config.json are not built here")
    if bool(parameters.get("mscale")) != bool(parameters.get("mscale_all_dim")):
        raise ValueError("config.json has one of mscale and mscale_all_dim of yarn; both or none are built here")
    if "original_max_position_embeddings" not in parameters:
        parameters["original_max_position_embeddings"] = settings["max_position_embeddings"]
    kept = {key: value for key, value in parameters.items() if value is not None}
    return values | {f"attention.{ours[key]}": type_of(key)(value) for key, value in kept.items()}


def type_of(key: str) -> type:
    """Of a value of yarn or llama3."""
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
    if a.llama3_factor != 1.0:
        scaling = {"type": "llama3", "rope_type": "llama3", **{key: getattr(a, ours) for key, ours in LLAMA3.items()}}
        values |= {"rope_scaling": scaling, "max_position_embeddings": int(a.llama3_factor * a.llama3_original_tokens)}
    return values


ROPE = Part(read_rope, _write_rope)
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


def dense_layers(layers: Iterable[int], settings: Settings) -> Values:
    """The fields of `[model]` that say which layers are dense, and their width."""
    number = settings["num_hidden_layers"]
    kinds = ModelConfig(num_layers=number, dense_layers=tuple(layers), moe=MoEConfig(1)).with_layers(range(number))
    values: Values = {name: getattr(kinds, name) for name in ("num_dense_layers", "dense_layers", "moe_every")}
    return values | {"ffn_hidden_size": settings["intermediate_size"] if len(kinds.layers_by_kind[0]) else 0}


def dense_width(model: ModelConfig) -> int:
    """That of dense layers, which config.json has also for a model without any."""
    return model.ffn_hidden_size or model.moe.ffn_hidden_size


def _read_list(settings: Settings) -> Values:
    listed, step = list(settings["mlp_only_layers"] or []), settings["decoder_sparse_step"]
    every = range(settings["num_hidden_layers"])
    return dense_layers([i for i in every if i in listed or (i + 1) % step], settings)


def _write_list(model: ModelConfig) -> Values:
    dense, _ = model.layers_by_kind
    return {"mlp_only_layers": list(dense), "decoder_sparse_step": 1, "intermediate_size": dense_width(model)}


DENSE_LIST = Part(_read_list, _write_list)
"""A list of the dense layers, and all but every n-th."""


def num_leading(model: ModelConfig) -> int:
    """The number of dense layers before the first MoE layer."""
    return model.moe_layers[0] if model.num_moe_layers else model.num_layers


def moe_step(model: ModelConfig) -> int:
    """The layers from one MoE layer to the next."""
    return model.moe_layers[1] - model.moe_layers[0] if model.num_moe_layers > 1 else 1


FIRST_K_DENSE = Part(
    lambda settings: dense_layers(range(settings["first_k_dense_replace"] or 0), settings),
    lambda model: {"first_k_dense_replace": num_leading(model), "intermediate_size": dense_width(model)},
)
"""Their number: they are the first layers."""


def _read_frequency(settings: Settings) -> Values:
    first, frequency = settings["first_k_dense_replace"] or 0, settings["moe_layer_freq"]
    every = range(settings["num_hidden_layers"])
    return dense_layers([i for i in every if i < first or i % frequency], settings)


DENSE_BY_FREQUENCY = Part(
    _read_frequency, lambda model: FIRST_K_DENSE.write(model) | {"moe_layer_freq": moe_step(model)}
)
"""The first layers, and behind them all but every n-th, counted from 0, as in DeepSeek's own code; transformers' has no
n."""


def _read_layer_types(settings: Settings) -> Values:
    types = settings["mlp_layer_types"] or ["dense"] + ["sparse"] * (settings["num_hidden_layers"] - 1)
    return dense_layers([i for i, kind in enumerate(types) if kind == "dense"], settings)


def _write_layer_types(model: ModelConfig) -> Values:
    dense, _ = model.layers_by_kind
    types = ["dense" if i in dense else "sparse" for i in range(model.num_layers)]
    return {"mlp_layer_types": types, "intermediate_size": dense_width(model)}


LAYER_TYPES_DENSE = Part(_read_layer_types, _write_layer_types)
"""The kind of each layer."""


def _read_shared(settings: Settings) -> Values:
    return {"moe.shared_ffn_hidden_size": (settings["n_shared_experts"] or 0) * settings["moe_intermediate_size"]}


def num_shared(model: ModelConfig) -> int:
    """The number of shared experts, each as wide as a routed one; a dense model has none."""
    width = model.moe.ffn_hidden_size
    number, rest = divmod(model.moe.shared_ffn_hidden_size, max(width, 1))
    if rest:
        raise ValueError(
            f"model.moe.shared_ffn_hidden_size = {model.moe.shared_ffn_hidden_size} is no multiple of "
            f"model.moe.ffn_hidden_size = {width}, as shared experts of this family are"
        )
    return number


SHARED = Part(_read_shared, lambda model: {"n_shared_experts": num_shared(model)})
"""Shared experts, each as wide as a routed one."""
NEXT_TOKENS = Part(
    lambda settings: {"mtp.num_depths": settings["num_nextn_predict_layers"] or 0},
    lambda model: {"num_nextn_predict_layers": model.mtp.num_depths},
)
"""Multi-token prediction. Its family has a default."""
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
