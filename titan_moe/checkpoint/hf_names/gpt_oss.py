"""gpt-oss: sinks, biases, a clamped activation, windows in every second layer, and fused experts on disk."""

from titan_moe.checkpoint.hf_names import names
from titan_moe.checkpoint.hf_names.family import Family, Part, Settings, Values
from titan_moe.checkpoint.hf_names.names import Fused, NotOnDisk, one
from titan_moe.checkpoint.hf_names.parts import GQA, ROPE, ROPE_DEFAULTS, read_rope
from titan_moe.config.model import ModelConfig

YARN: Values = {"rope_type": "yarn", "factor": 32.0, "beta_fast": 32.0, "beta_slow": 1.0, "truncate": False}
YARN |= {"original_max_position_embeddings": 4096}
"""What the family takes where a config.json says nothing of a rotary embedding."""


def _write_rope(model: ModelConfig) -> Values:
    """In both forms, a plain one too: without a word of it, it would be YaRN."""
    values: Values = {"rope_scaling": {"rope_type": "default"}, **ROPE.write(model)}
    return values | {"rope_parameters": {**values["rope_scaling"], "rope_theta": values["rope_theta"]}}


PATTERN = ("sliding_attention", "full_attention")


def _read_windows(settings: Settings) -> Values:
    """Full attention in every n-th layer, n = 2 where config.json does not list the layers."""
    num_layers, window = settings["num_hidden_layers"], settings["sliding_window"]
    types = settings["layer_types"] or [PATTERN[i % 2] for i in range(num_layers)]
    every = types.index(PATTERN[1]) + 1 if PATTERN[1] in types else 0
    if types != _types(num_layers, every) or not (window or set(types) == {PATTERN[1]}):
        raise ValueError("layer_types in config.json: full attention in every n-th layer alone is built here")
    if every == 1:
        return {"attention.sliding_window": 0}
    return {"attention.sliding_window": window, "attention.full_attention_every": every}


def _types(num_layers: int, every: int) -> list[str]:
    return [PATTERN[every > 0 and (i + 1) % every == 0] for i in range(num_layers)]


def _write_windows(model: ModelConfig) -> Values:
    a = model.attention
    types = _types(model.num_layers, a.full_attention_every if a.sliding_window else 1)
    return {"layer_types": types, "sliding_window": a.sliding_window or None}


EXPERTS = "mlp.experts"
NAMES: names.Names = (
    names.COMMON
    | names.GQA
    | {
        "feed_forward.router.weight": one("mlp.router.weight"),
        "feed_forward.router.bias": one("mlp.router.bias"),
        "feed_forward.router.expert_bias_E": NotOnDisk(),
        "feed_forward.experts.gate_up": Fused(
            f"{EXPERTS}.gate_up_proj", "e2FL", ("e", "L", "F2"), in_mxfp4=("e", "F2", "L")
        ),
        "feed_forward.experts.down": Fused(f"{EXPERTS}.down_proj", "eLF", ("e", "F", "L"), in_mxfp4=("e", "L", "F")),
        "feed_forward.experts.gate_up_bias": Fused(f"{EXPERTS}.gate_up_proj_bias", "e2F", ("e", "F2")),
        "feed_forward.experts.down_bias": one(f"{EXPERTS}.down_proj_bias"),
    }
)
GPT_OSS = Family(
    model_type="gpt_oss",
    architecture="GptOssForCausalLM",
    fields=GQA
    | {
        "head_dim": "attention.head_dim",
        "num_local_experts": "moe.num_experts",
        "intermediate_size": "moe.ffn_hidden_size",
        "swiglu_limit": "moe.swiglu_limit",
        "swiglu_alpha": "moe.swiglu_alpha",
    },
    names=lambda model: NAMES,
    fixed={
        "attention.qkv_bias": True,
        "attention.out_bias": True,
        "attention.sinks": True,
        "moe.router_bias": True,
        "moe.expert_mlp_bias": True,
        "moe.swiglu_up_offset": 1.0,
    },
    only={"hidden_act": "silu", "attention_bias": True},
    defaults=ROPE_DEFAULTS
    | {
        "tie_word_embeddings": False,
        "rms_norm_eps": 1e-5,
        "rope_theta": 150_000.0,
        "layer_types": None,
        "swiglu_alpha": 1.702,
        "swiglu_limit": 7.0,
    },
    parts=(Part(lambda settings: read_rope(settings, YARN), _write_rope), Part(_read_windows, _write_windows)),
)
