"""Families whose layers differ by their windows: AFMoE, EXAONE-MoE and Mellum, in rotary embeddings too."""

from typing import Any

from titan_moe.checkpoint.hf_names import names
from titan_moe.checkpoint.hf_names.family import Family, Part, Settings, Values
from titan_moe.checkpoint.hf_names.parts import (
    DEFAULTS,
    GQA,
    GROUPS,
    HEAD_DIM,
    LAYER_TYPES_DENSE,
    ONLY,
    ROPE,
    dense_layers,
    num_shared,
)
from titan_moe.checkpoint.hf_names.windows import FULL, WINDOWED, by_types, read_types
from titan_moe.config.model import ModelConfig

OF_EXPERTS = {"num_experts": "moe.num_experts", "moe_intermediate_size": "moe.ffn_hidden_size"}


def _every_nth(key: str) -> Part:
    """Windows in all layers but every n-th, where no list says otherwise."""

    def types(settings: Settings, num_layers: int) -> list[str]:
        every = settings[key] if settings["sliding_window"] else 1
        if not isinstance(every, int) or every < 1:
            raise ValueError(f"{key} = {every!r} in config.json: a number is built here; name the types in layer_types")
        return [(FULL, WINDOWED)[(i + 1) % every > 0] for i in range(num_layers)]

    return by_types(types)


def _read_shared(settings: Settings) -> Values:
    number, width = settings["num_shared_experts"] or 0, settings["moe_intermediate_size"]
    return {"moe.shared_ffn_hidden_size": number * width}


SHARED = Part(_read_shared, lambda model: {"num_shared_experts": num_shared(model)})


def _read_scaled_embedding(settings: Settings) -> Values:
    """muP: embeddings times the root of their width."""
    return {"embedding_multiplier": settings["hidden_size"] ** 0.5 if settings["mup_enabled"] else 1.0}


AFMOE_WINDOWS = _every_nth("global_attn_every_n_layers")


def _read_afmoe(settings: Settings) -> Values:
    values = AFMOE_WINDOWS.read(settings)
    if not values["attention.sliding_window"]:
        raise ValueError(
            "layer_types in config.json: only windowed layers of afmoe have a rotary embedding, and none is one"
        )
    return values


AFMOE = Family(
    model_type="afmoe",
    architecture="AfmoeForCausalLM",
    fields=GQA | OF_EXPERTS | {"route_scale": "moe.route_scale", "head_dim": "attention.head_dim"},
    names=lambda model: (
        names.COMMON
        | names.GQA
        | names.DENSE
        | names.EXPERTS
        | names.SHARED
        | {
            "attention_post_norm.weight": names.one("post_attention_layernorm.weight"),
            "ffn_norm.weight": names.one("pre_mlp_layernorm.weight"),
            "ffn_post_norm.weight": names.one("post_mlp_layernorm.weight"),
            "attention.gate.weight": names.one("self_attn.gate_proj.weight"),
            "feed_forward.router.weight": names.one("mlp.router.gate.weight"),
            "feed_forward.router.expert_bias_E": names.one("mlp.expert_bias"),
        }
    ),
    fixed={"attention.qk_norm": True, "attention.output_gate": "element", "attention.rope_layers": "windowed"}
    | {"norm_placement": "both", "moe.score_fn": "sigmoid"},
    only={"hidden_act": "silu", "attention_bias": False, "score_func": "sigmoid", "route_norm": True},
    defaults=DEFAULTS
    | {"rms_norm_eps": 1e-5, "head_dim": 128, "num_shared_experts": 2, "route_scale": 1.0, "num_dense_layers": 1}
    | {"layer_types": None, "sliding_window": 1024, "global_attn_every_n_layers": 4, "mup_enabled": False},
    parts=(
        ROPE,
        Part(_read_afmoe, AFMOE_WINDOWS.write),
        SHARED,
        Part(_read_scaled_embedding, lambda model: {"mup_enabled": model.embedding_multiplier != 1.0}),
        Part(
            lambda settings: dense_layers(range(settings["num_dense_layers"] or 0), settings),
            lambda model: {"num_dense_layers": len(model.layers_by_kind[0]), **_width_of_dense(model)},
        ),
    ),
)


def _width_of_dense(model: ModelConfig) -> Values:
    return {"intermediate_size": model.ffn_hidden_size or model.moe.ffn_hidden_size}


EXAONE_WINDOWS = _every_nth("sliding_window_pattern")


def _read_exaone(settings: Settings) -> Values:
    """With windows, the other layers have no rotary embedding."""
    values = EXAONE_WINDOWS.read(settings)
    if settings["sliding_window"] and not values["attention.sliding_window"]:
        raise ValueError("layer_types in config.json: exaone_moe with a sliding_window has windowed layers")
    return values | {"attention.rope_layers": "windowed" if values["attention.sliding_window"] else "all"}


def _read_dense_of_exaone(settings: Settings) -> Values:
    if settings["mlp_layer_types"] is None:
        return dense_layers(range(settings["first_k_dense_replace"] or 0), settings)
    return LAYER_TYPES_DENSE.read(settings)


EXAONE_MOE = Family(
    model_type="exaone_moe",
    architecture="ExaoneMoeForCausalLM",
    fields=GQA | OF_EXPERTS | {"norm_topk_prob": "moe.normalize_topk", "routed_scaling_factor": "moe.route_scale"},
    names=lambda model: (
        names.COMMON
        | names.GQA
        | names.DENSE
        | names.EXPERTS
        | names.SHARED
        | {"feed_forward.router.expert_bias_E": names.one("mlp.e_score_correction_bias")}
    ),
    fixed={"attention.qk_norm": True, "moe.score_fn": "sigmoid"},
    only=ONLY,
    defaults=DEFAULTS
    | {"rms_norm_eps": 1e-5, "head_dim": None, "num_shared_experts": 1, "norm_topk_prob": True}
    | {"routed_scaling_factor": 2.5, "n_group": 1, "topk_group": 1, "layer_types": None, "sliding_window": 4096}
    | {"sliding_window_pattern": 4, "mlp_layer_types": None, "first_k_dense_replace": 1},
    parts=(
        HEAD_DIM,
        ROPE,
        Part(_read_exaone, EXAONE_WINDOWS.write),
        SHARED,
        GROUPS,
        Part(_read_dense_of_exaone, LAYER_TYPES_DENSE.write),
    ),
    not_built={"mtp": lambda model: ("mtp.",)},
    without={"mtp": {"num_nextn_predict_layers": 0}},
)


def _read_rope_by_type(settings: Settings) -> Values:
    """A table for each type of layers. Nothing may extend the context of windowed ones."""
    types = settings["layer_types"] or [FULL] * settings["num_hidden_layers"]
    tables: dict[str, Any] = settings["rope_parameters"]
    read = {}
    for kind in sorted(set(types)):
        own = Settings({**settings.values, "rope_parameters": tables[kind]}, settings.defaults)
        read[kind] = ROPE.read(own)
        settings.used |= own.used
    values = read_types(types, settings["sliding_window"]) | read.get(FULL, read.get(WINDOWED, {}))
    if FULL in read and WINDOWED in read:
        values["attention.window_rope_theta"] = read[WINDOWED].pop("attention.rope_theta")
        if read[WINDOWED]:
            raise ValueError(f"rope_parameters of {WINDOWED} in config.json: of them rope_theta alone is built here")
    return values


def _write_rope_by_type(model: ModelConfig) -> Values:
    a, written = model.attention, ROPE.write(model)
    full = {**written.get("rope_scaling", {"rope_type": "default"}), "rope_theta": a.rope_theta}
    windowed = {"rope_type": "default", "rope_theta": a.window_rope_theta} if a.window_rope_theta else full
    kinds = by_types(_all_full).write(model)
    return kinds | {"rope_parameters": {FULL: full, WINDOWED: windowed}}


def _all_full(settings: Settings, num_layers: int) -> list[str]:
    return [FULL] * num_layers


def _read_sparse(settings: Settings) -> Values:
    types = settings["mlp_layer_types"] or []
    return dense_layers([i for i, kind in enumerate(types) if kind == "dense"], settings)


PLAIN = {FULL: {"rope_type": "default", "rope_theta": 5e5}, WINDOWED: {"rope_type": "default", "rope_theta": 1e4}}
MELLUM = Family(
    model_type="mellum",
    architecture="MellumForCausalLM",
    fields=GQA | OF_EXPERTS | {"norm_topk_prob": "moe.normalize_topk", "head_dim": "attention.head_dim"},
    names=lambda model: names.COMMON | names.GQA | names.DENSE | names.EXPERTS,
    fixed={"attention.qk_norm": True},
    only=ONLY,
    defaults=DEFAULTS
    | {"head_dim": 128, "norm_topk_prob": True, "layer_types": None, "mlp_layer_types": None, "sliding_window": 1024}
    | {"rope_parameters": PLAIN},
    parts=(Part(_read_rope_by_type, _write_rope_by_type), Part(_read_sparse, LAYER_TYPES_DENSE.write)),
    not_built={"mtp": lambda model: ("mtp.",)},
    without={"mtp": {"num_nextn_predict_layers": 0}},
)
