"""gpt-oss: sinks, biases, a clamped activation, windows in every second layer, and fused experts on disk."""

from titan_moe.checkpoint.hf_names import names
from titan_moe.checkpoint.hf_names.family import Family, Part, Values
from titan_moe.checkpoint.hf_names.names import Fused, NotOnDisk, one
from titan_moe.checkpoint.hf_names.parts import GQA, ROPE, ROPE_DEFAULTS, read_rope
from titan_moe.checkpoint.hf_names.windows import EVERY_SECOND
from titan_moe.config.model import ModelConfig

YARN: Values = {"rope_type": "yarn", "factor": 32.0, "beta_fast": 32.0, "beta_slow": 1.0, "truncate": False}
YARN |= {"original_max_position_embeddings": 4096}
"""What the family takes where a config.json says nothing of a rotary embedding."""


def _write_rope(model: ModelConfig) -> Values:
    """In both forms, a plain one too: without a word of it, it would be YaRN."""
    values: Values = {"rope_scaling": {"rope_type": "default"}, **ROPE.write(model)}
    return values | {"rope_parameters": {**values["rope_scaling"], "rope_theta": values["rope_theta"]}}


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
    parts=(Part(lambda settings: read_rope(settings, YARN), _write_rope), EVERY_SECOND),
)
