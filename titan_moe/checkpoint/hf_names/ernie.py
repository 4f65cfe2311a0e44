"""Ernie-4.5-MoE: a bias is added to softmax scores to select experts; of some layers, every n-th has experts."""

from titan_moe.checkpoint.hf_names import names
from titan_moe.checkpoint.hf_names.family import Family, Part, Settings, Values
from titan_moe.checkpoint.hf_names.parts import (
    COMMON,
    DEFAULTS,
    HEAD_DIM,
    ROPE,
    dense_layers,
    dense_width,
    moe_step,
    num_leading,
    num_shared,
)
from titan_moe.config.model import ModelConfig

SIZES = {key: field for key, field in COMMON.items() if field != "moe.top_k"} | {
    "num_key_value_heads": "attention.num_kv_heads",
    "moe_k": "moe.top_k",
    "moe_num_experts": "moe.num_experts",
    "moe_intermediate_size": "moe.ffn_hidden_size",
}


def _read_interval(settings: Settings) -> Values:
    every, first = range(settings["num_hidden_layers"]), settings["moe_layer_start_index"]
    last, step = settings["moe_layer_end_index"], settings["moe_layer_interval"]
    end = len(every) if last == -1 else last + 1
    return dense_layers([i for i in every if not first <= i < end or (i + 1) % step], settings)


def _write_interval(model: ModelConfig) -> Values:
    values: Values = {"moe_layer_start_index": num_leading(model), "moe_layer_interval": moe_step(model)}
    values["moe_layer_end_index"] = model.moe_layers[-1] if model.num_moe_layers else -1
    return values | {"intermediate_size": dense_width(model)}


def _read_shared(settings: Settings) -> Values:
    number, width = settings["moe_num_shared_experts"] or 0, settings["moe_intermediate_size"]
    return {"moe.shared_ffn_hidden_size": number * width}


BIAS = names.Fused("mlp.moe_statics.e_score_correction_bias", "e", ("", "e"))
SHARED_NAMES = names.mlp("feed_forward.shared_experts", "mlp.shared_experts")
ERNIE4_5_MOE = Family(
    model_type="ernie4_5_moe",
    architecture="Ernie4_5_MoeForCausalLM",
    fields=SIZES,
    names=lambda model: (
        names.COMMON
        | names.GQA
        | names.DENSE
        | names.EXPERTS
        | SHARED_NAMES
        | {"feed_forward.router.expert_bias_E": BIAS}
    ),
    fixed={"attention.rope_is_interleaved": True},
    only={"hidden_act": "silu", "use_bias": False, "moe_norm_min": 1e-12},
    defaults=DEFAULTS
    | {"head_dim": None, "rope_theta": 500_000.0, "rms_norm_eps": 1e-5, "tie_word_embeddings": True}
    | {"moe_num_shared_experts": 2, "moe_layer_start_index": 1, "moe_layer_end_index": -1, "moe_layer_interval": 1},
    parts=(
        HEAD_DIM,
        ROPE,
        Part(_read_interval, _write_interval),
        Part(_read_shared, lambda model: {"moe_num_shared_experts": num_shared(model)}),
    ),
    not_built={"mtp": lambda model: ("model.mtp_",)},
    without={"mtp": {"num_nextn_predict_layers": 0}},
)
