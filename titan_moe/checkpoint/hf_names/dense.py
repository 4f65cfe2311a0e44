"""Families without experts, whose weights can begin a MoE model: Qwen3, Llama, Mistral."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from titan_moe.checkpoint.hf_names import names
from titan_moe.checkpoint.hf_names.family import Family, Part
from titan_moe.checkpoint.hf_names.parts import COMMON, DEFAULTS, HEAD_DIM, ONLY, ROPE
from titan_moe.checkpoint.hf_names.windows import FROM_LAYER_IF_USED

FIELDS = {key: ours for key, ours in COMMON.items() if key != "num_experts_per_tok"}
FIELDS |= {"intermediate_size": "ffn_hidden_size"}
KEY_HEADS = Part(
    lambda settings: {"attention.num_kv_heads": settings["num_key_value_heads"] or settings["num_attention_heads"]},
    lambda model: {"num_key_value_heads": model.attention.num_kv_heads},
)
"""Optional: by default each head has its own keys."""

LLAMA = Family(
    model_type="llama",
    architecture="LlamaForCausalLM",
    fields=FIELDS,
    names=lambda model: names.COMMON | names.GQA | names.DENSE,
    only=ONLY | {"pretraining_tp": 1},
    defaults=DEFAULTS | {"head_dim": None, "num_key_value_heads": None},
    parts=(HEAD_DIM, KEY_HEADS, ROPE),
)
MISTRAL = replace(
    LLAMA,
    model_type="mistral",
    architecture="MistralForCausalLM",
    only={"hidden_act": "silu"},
    defaults={**LLAMA.defaults, "sliding_window": 4096, "num_key_value_heads": 8},
    parts=(
        *LLAMA.parts,
        Part(
            lambda settings: {"attention.sliding_window": settings["sliding_window"] or 0},
            lambda model: {"sliding_window": model.attention.sliding_window or None},
        ),
    ),
)
QWEN3 = replace(
    LLAMA,
    model_type="qwen3",
    architecture="Qwen3ForCausalLM",
    fixed={"attention.qk_norm": True},
    only={"hidden_act": "silu", "attention_bias": False},
    defaults=DEFAULTS
    | {"head_dim": 128, "num_key_value_heads": 32, "use_sliding_window": False, "sliding_window": 4096}
    | {"max_window_layers": 28, "layer_types": None},
    parts=(HEAD_DIM, KEY_HEADS, ROPE, FROM_LAYER_IF_USED),
)
DENSE = {family.model_type: family for family in (QWEN3, LLAMA, MISTRAL)}


def dense_family(config: Mapping[str, Any]) -> Family | None:
    """The family of a config.json: by the class that it names, else by its type; None for another one."""
    classes = config.get("architectures") or []
    by_class = (family for family in DENSE.values() if family.architecture in classes)
    return next(by_class, None if classes else DENSE.get(config.get("model_type", "")))
