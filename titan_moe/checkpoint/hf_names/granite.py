"""Granite-MoE, also with shared experts: four multipliers, and experts that are one tensor on disk."""

from dataclasses import replace

from titan_moe.checkpoint.hf_names import names
from titan_moe.checkpoint.hf_names.family import Family, Part
from titan_moe.checkpoint.hf_names.parts import DEFAULTS, GQA, HEAD_DIM, ONLY, ROPE

MULTIPLIERS = ("embedding_multiplier", "residual_multiplier", "logits_scaling")
SCALE = Part(
    lambda settings: {"attention.softmax_scale": float(settings["attention_multiplier"])},
    lambda model: {"attention_multiplier": model.attention.scale},
)
FUSED: names.Names = names.COMMON | names.GQA | names.NO_BIAS
FUSED |= {
    "feed_forward.router.weight": names.one("block_sparse_moe.router.layer.weight"),
    "feed_forward.experts.gate_up": names.Fused("block_sparse_moe.input_linear.weight", "e2FD", ("e", "2F", "D")),
    "feed_forward.experts.down": names.one("block_sparse_moe.output_linear.weight"),
}
GRANITE_MOE = Family(
    model_type="granitemoe",
    architecture="GraniteMoeForCausalLM",
    fields=GQA
    | {"num_local_experts": "moe.num_experts", "intermediate_size": "moe.ffn_hidden_size"}
    | {name: name for name in MULTIPLIERS},
    names=lambda model: FUSED,
    only=ONLY,
    defaults=DEFAULTS | {"head_dim": None, "attention_multiplier": 1.0} | dict.fromkeys(MULTIPLIERS, 1.0),
    parts=(HEAD_DIM, ROPE, SCALE),
)
GRANITE_MOE_SHARED = replace(
    GRANITE_MOE,
    model_type="granitemoeshared",
    architecture="GraniteMoeSharedForCausalLM",
    fields={**GRANITE_MOE.fields, "shared_intermediate_size": "moe.shared_ffn_hidden_size"},
    names=lambda model: (
        FUSED
        | {
            "feed_forward.shared_experts.gate_up.weight": names.one("shared_mlp.input_linear.weight"),
            "feed_forward.shared_experts.down.weight": names.one("shared_mlp.output_linear.weight"),
        }
    ),
    defaults={**GRANITE_MOE.defaults, "shared_intermediate_size": 0},
)
