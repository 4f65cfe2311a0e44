"""Llama 4's language model: layers without rotary embedding, chunks, an attention temperature, and fused experts."""

from titan_moe.checkpoint.hf_names import names
from titan_moe.checkpoint.hf_names.family import Family, Part, Settings, Values
from titan_moe.checkpoint.hf_names.parts import DEFAULTS, GQA, HEAD_DIM, ONLY, ROPE, dense_layers
from titan_moe.config.model import ModelConfig


def _has_rope(num_layers: int, every: int) -> list[int]:
    return [int(every == 0 or (i + 1) % every > 0) for i in range(num_layers)]


def _read_attention(settings: Settings) -> Values:
    """Every n-th layer without rotary embedding, and what other layers, or these alone, have."""
    num_layers, interval = settings["num_hidden_layers"], settings["no_rope_layer_interval"]
    has_rope = [int(value) for value in settings["no_rope_layers"] or _has_rope(num_layers, interval)][:num_layers]
    every = has_rope.index(0) + 1 if 0 in has_rope else 0
    chunk, types = settings["attention_chunk_size"] or 0, settings["layer_types"]
    if has_rope != _has_rope(num_layers, every):
        raise ValueError("no_rope_layers in config.json: every n-th layer without rotary embedding is built here")
    if types is not None and types != _types(num_layers, every, chunk):
        raise ValueError("layer_types in config.json: chunks in the layers with rotary embedding are built here")
    is_tuned, has_norm = settings["attn_temperature_tuning"] and every > 0, settings["use_qk_norm"]
    values: Values = {"attention.nope_every": every, "attention.attention_chunk_size": chunk if every != 1 else 0}
    values |= {"attention.attn_scale": settings["attn_scale"] if is_tuned else 0.0}
    values |= {"attention.floor_scale": settings["floor_scale"], "attention.qk_norm": has_norm and every != 1}
    if values["attention.qk_norm"]:
        values |= {"attention.qk_norm_is_after_rope": True, "attention.qk_norm_has_weights": False}
        values |= {"attention.qk_norm_layers": "rope" if every else "all"}
    return values


def _types(num_layers: int, every: int, chunk: int) -> list[str]:
    return [("full_attention", "chunked_attention")[has and chunk > 0] for has in _has_rope(num_layers, every)]


def _write_attention(model: ModelConfig) -> Values:
    a = model.attention
    return {
        "no_rope_layers": _has_rope(model.num_layers, a.nope_every),
        "no_rope_layer_interval": a.nope_every or model.num_layers + 1,
        "attention_chunk_size": a.attention_chunk_size or None,
        "layer_types": _types(model.num_layers, a.nope_every, a.attention_chunk_size),
        "attn_temperature_tuning": a.attn_scale > 0,
        "attn_scale": a.attn_scale,
        "floor_scale": a.floor_scale,
        "use_qk_norm": a.qk_norm,
    }


def _read_experts(settings: Settings) -> Values:
    num_layers, step = settings["num_hidden_layers"], settings["interleave_moe_layer_step"]
    listed = settings["moe_layers"]
    moe = list(range(step - 1, num_layers, step)) if listed is None else listed
    dense = [i for i in range(num_layers) if i not in moe]
    width = settings["intermediate_size"]
    values = dense_layers(dense, settings) | {"moe.ffn_hidden_size": width, "moe.shared_ffn_hidden_size": width}
    return values | {"ffn_hidden_size": settings["intermediate_size_mlp"] if dense else 0}


def _write_experts(model: ModelConfig) -> Values:
    layers, step = list(model.moe_layers), model.moe_every
    return {
        "moe_layers": layers,
        "interleave_moe_layer_step": step,
        "intermediate_size": model.moe.ffn_hidden_size,
        "intermediate_size_mlp": model.ffn_hidden_size or model.moe.ffn_hidden_size,
    }


MOE = "feed_forward"
NAMES: names.Names = names.COMMON | names.GQA | names.NO_BIAS | names.mlp(MOE, MOE)
NAMES |= names.mlp(f"{MOE}.shared_experts", f"{MOE}.shared_expert")
NAMES |= {
    f"{MOE}.router.weight": names.one(f"{MOE}.router.weight"),
    f"{MOE}.experts.gate_up": names.Fused(f"{MOE}.experts.gate_up_proj", "e2FD", ("e", "D", "2F")),
    f"{MOE}.experts.down": names.Fused(f"{MOE}.experts.down_proj", "eDF", ("e", "F", "D")),
}
LLAMA4_TEXT = Family(
    model_type="llama4_text",
    architecture="Llama4ForCausalLM",
    fields=GQA | {"num_local_experts": "moe.num_experts"},
    names=lambda model: NAMES,
    fixed={
        "attention.rope_is_interleaved": True,
        "moe.score_fn": "sigmoid",
        "moe.normalize_topk": False,
        "moe.score_on": "input",
    },
    only={key: value for key, value in ONLY.items() if key != "mlp_bias"},
    defaults=DEFAULTS
    | {"head_dim": None, "rms_norm_eps": 1e-5, "rope_theta": 500_000.0, "num_experts_per_tok": 1}
    | {"no_rope_layers": None, "no_rope_layer_interval": 4, "layer_types": None, "attention_chunk_size": 8192}
    | {"attn_temperature_tuning": True, "attn_scale": 0.1, "floor_scale": 8192, "use_qk_norm": True}
    | {"moe_layers": None, "interleave_moe_layer_step": 1, "intermediate_size_mlp": 16384},
    parts=(HEAD_DIM, ROPE, Part(_read_attention, _write_attention), Part(_read_experts, _write_experts)),
)
