"""Tiny models of transformers with odd sizes, and ours for their checkpoints."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from titan_moe.checkpoint.hf_recipe import read_model
from titan_moe.config.kernels import Kernels
from titan_moe.models.transformer import Transformer


class OnUse:
    """A module that is imported when something of it is needed: to import transformers takes seconds, and ranks need
    the sizes of the twins alone."""

    def __init__(self, name: str, **requirements: str) -> None:
        self.name, self.requirements = name, requirements

    def __getattr__(self, attribute: str) -> Any:
        return getattr(pytest.importorskip(self.name, **self.requirements), attribute)


transformers = OnUse("transformers", minversion="5.0", reason="experts are one tensor from 5.0 on")
core = OnUse("transformers.core_model_loading")

BASE = {"vocab_size": 61, "hidden_size": 54, "intermediate_size": 38, "num_attention_heads": 9, "num_hidden_layers": 3}
BASE |= {"num_experts_per_tok": 3, "max_position_embeddings": 256, "rms_norm_eps": 1e-3}
BASE |= {"pad_token_id": None}  # transformers does not train the embedding of one
GQA = BASE | {"num_key_value_heads": 3, "num_experts": 5, "moe_intermediate_size": 14}
MLA = BASE | {"num_key_value_heads": 9, "kv_lora_rank": 10, "qk_nope_head_dim": 6, "qk_rope_head_dim": 4}
MLA |= {"v_head_dim": 5, "n_routed_experts": 6, "n_shared_experts": 3, "moe_intermediate_size": 14}
MLA |= {"first_k_dense_replace": 1}
GROUPED = {"num_key_value_heads": 3, "n_routed_experts": 6, "n_shared_experts": 2, "moe_intermediate_size": 14}
GROUPED |= {"n_group": 2, "topk_group": 1, "norm_topk_prob": True, "routed_scaling_factor": 1.5}
YARN = {"rope_type": "yarn", "rope_theta": 10_000.0, "factor": 4.0, "original_max_position_embeddings": 64}
GRANITE = {"num_key_value_heads": 3, "num_local_experts": 5, "embedding_multiplier": 7, "logits_scaling": 3.0}
GRANITE |= {"residual_multiplier": 0.4, "attention_multiplier": 0.3}
ERNIE = {"num_key_value_heads": 3, "moe_num_experts": 5, "moe_k": 3, "moe_intermediate_size": 14}
ERNIE |= {"num_hidden_layers": 5, "moe_num_shared_experts": 2, "moe_layer_interval": 2, "moe_layer_end_index": 3}
ERNIE |= {"pad_token_id": None}
LATE = ["full_attention", "full_attention", "sliding_attention"]
QWEN2 = {"shared_expert_intermediate_size": 22, "mlp_only_layers": [1]}
HUNYUAN = BASE | {"num_key_value_heads": 3, "num_experts": 5, "moe_topk": 3, "head_dim": 6}
STRETCHED = {"rope_type": "dynamic", "rope_theta": 10_000.0, "factor": 1.0, "alpha": 20.0}
GPT_OSS = BASE | {"num_key_value_heads": 3, "head_dim": 6, "num_local_experts": 5, "intermediate_size": 14}
GPT_OSS |= {"sliding_window": 5, "swiglu_limit": 0.5, "rope_parameters": YARN | {"truncate": False, "factor": 32.0}}
LONGROPE = {"rope_type": "longrope", "rope_theta": 10_000.0, "original_max_position_embeddings": 64}
LONGROPE |= {"short_factor": [1.0, 1.4, 2.5], "long_factor": [1.0, 4.0, 16.0], "short_mscale": 1.2, "long_mscale": 1.3}
PHIMOE = BASE | {"num_key_value_heads": 3, "num_local_experts": 5, "intermediate_size": 14, "num_experts_per_tok": 2}
PHIMOE |= {"attention_bias": True, "lm_head_bias": True, "rope_parameters": LONGROPE, "max_position_embeddings": 2048}
PHIMOE |= {"router_jitter_noise": 0.0}  # with another one experts are drawn in training
LLAMA4 = BASE | {"num_key_value_heads": 3, "head_dim": 6, "num_local_experts": 5, "intermediate_size": 14}
LLAMA4 |= {"num_hidden_layers": 4, "interleave_moe_layer_step": 2, "intermediate_size_mlp": 38, "floor_scale": 3}
LLAMA4 |= {"no_rope_layer_interval": 2, "attention_chunk_size": 11, "attn_scale": 0.3}
AFMOE = GQA | {"head_dim": 6, "num_hidden_layers": 4, "num_shared_experts": 2, "route_scale": 1.5, "mup_enabled": True}
AFMOE |= {"sliding_window": 7, "layer_types": ["sliding_attention", "full_attention", *["sliding_attention"] * 2]}
EXAONE = GQA | {"head_dim": 6, "num_experts": 6, "n_group": 2, "topk_group": 1, "norm_topk_prob": True}
EXAONE |= {"sliding_window": 7, "sliding_window_pattern": 2}
MELLUM = GQA | {
    "head_dim": 6,
    "norm_topk_prob": True,
    "sliding_window": 7,
    "mlp_layer_types": ["sparse", "dense", "sparse"],
}
MELLUM |= {"layer_types": LATE, "rope_parameters": {"sliding_attention": {"rope_type": "default", "rope_theta": 300.0}}}
MELLUM["rope_parameters"]["full_attention"] = YARN
LLAMA3 = {"rope_type": "llama3", "rope_theta": 50.0, "factor": 8.0, "original_max_position_embeddings": 64}
LLAMA3 |= {"low_freq_factor": 1.0, "high_freq_factor": 4.0}
TWINS: dict[str, tuple[str, dict[str, Any]]] = {
    "qwen3_moe": ("Qwen3Moe", GQA | {"head_dim": 6, "norm_topk_prob": True, "mlp_only_layers": [0]}),
    "qwen3_moe-tied": ("Qwen3Moe", GQA | {"head_dim": 8, "tie_word_embeddings": True, "rope_parameters": YARN}),
    "qwen2_moe": ("Qwen2Moe", GQA | QWEN2 | {"use_sliding_window": True, "sliding_window": 7, "layer_types": LATE}),
    "qwen3_moe-every_second": ("Qwen3Moe", GQA | {"decoder_sparse_step": 2, "num_hidden_layers": 4}),
    "granitemoe": ("GraniteMoe", BASE | GRANITE),
    "granitemoeshared": ("GraniteMoeShared", BASE | GRANITE | {"shared_intermediate_size": 22}),
    "ernie4_5_moe": ("Ernie4_5_Moe", BASE | ERNIE),
    "mixtral": ("Mixtral", BASE | {"num_key_value_heads": 3, "num_local_experts": 5, "sliding_window": 11}),
    "deepseek_v2": ("DeepseekV2", MLA | {"q_lora_rank": None}),
    "glm4_moe_lite": ("Glm4MoeLite", MLA | {"q_lora_rank": 8, "mlp_layer_types": ["dense", "dense", "sparse"]}),
    "dots1": ("Dots1", BASE | GROUPED | {"first_k_dense_replace": 1, "sliding_window": 9, "max_window_layers": 1}),
    "solar_open": ("SolarOpen", BASE | GROUPED | {"n_group": 1, "topk_group": 1, "head_dim": 8}),
    "glm4_moe": (
        "Glm4Moe",
        BASE | GROUPED | {"head_dim": 12, "use_qk_norm": True, "attention_bias": True, "partial_rotary_factor": 0.5},
    ),
    "olmoe": ("Olmoe", BASE | {"num_key_value_heads": 3, "num_experts": 5, "clip_qkv": 1.1}),
    "minimax_m2": ("MiniMaxM2", GQA | {"head_dim": 10, "rotary_dim": 4}),
    "hunyuan_v1_moe": ("HunYuanMoEV1", HUNYUAN | {"rope_parameters": STRETCHED}),
    "gpt_oss": ("GptOss", GPT_OSS),
    "gpt_oss-without_yarn": ("GptOss", GPT_OSS | {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4}}),
    "phimoe": ("Phimoe", PHIMOE),
    "llama4_text": ("Llama4Text", LLAMA4),
    "afmoe": ("Afmoe", AFMOE),
    "exaone_moe": ("ExaoneMoe", EXAONE),
    "mellum": ("Mellum", MELLUM),
    "mixtral-llama3": (
        "Mixtral",
        BASE | {"num_key_value_heads": 3, "num_local_experts": 5, "head_dim": 12, "rope_parameters": LLAMA3},
    ),
    "deepseek_v3": ("DeepseekV3", MLA | {"q_lora_rank": 8, "n_group": 2, "topk_group": 1}),
}


DENSE = BASE | {"num_key_value_heads": 3, "intermediate_size": 42}
DENSE_TWINS: dict[str, tuple[str, dict[str, Any]]] = {
    "qwen3": (
        "Qwen3",
        DENSE | {"head_dim": 8, "use_sliding_window": True, "sliding_window": 7, "max_window_layers": 1},
    ),
    "llama": ("Llama", DENSE | {"head_dim": 12, "rope_parameters": LLAMA3, "tie_word_embeddings": True}),
    "mistral": ("Mistral", DENSE | {"sliding_window": 11}),
}
"""Models without experts."""


def twin(name: str, **changes: Any) -> nn.Module:
    """A tiny model of theirs, every weight random."""
    return _random(*TWINS[name], changes)


def dense_twin(name: str, **changes: Any) -> nn.Module:
    """The same without experts."""
    return _random(*DENSE_TWINS[name], changes)


def _random(prefix: str, settings: Mapping[str, Any], changes: Mapping[str, Any]) -> nn.Module:
    options = {"attn_implementation": "eager", "experts_implementation": "eager"}
    config = getattr(transformers, f"{prefix}Config")(**{**settings, **changes, **options})
    torch.manual_seed(0)
    model = getattr(transformers, f"{prefix.removesuffix('Text')}ForCausalLM")(config)
    with torch.no_grad():
        for key, tensor in model.state_dict().items():
            tensor.normal_(mean=1.0 if "norm" in key else 0.0, std=0.2)
    return model


def ours_for(folder: Path) -> Transformer:
    model = Transformer(read_model(folder)[1], kernels=Kernels(experts="reference"))
    for tensor in model.state_dict().values():
        tensor.fill_(torch.nan)
    return model


def on_disk(model: nn.Module, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Tensors by the names that transformers saves them under."""
    return core.revert_weight_conversion(model, dict(tensors))


def greedy(theirs: nn.Module, prompts: list[list[int]], num_tokens: int) -> list[list[int]]:
    """Each prompt with the tokens that transformers' greedy search adds."""
    options = {"max_new_tokens": num_tokens, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}
    return [theirs.eval().generate(torch.tensor([prompt]), **options)[0].tolist() for prompt in prompts]


def assert_equal_in_transformers(folder: Path, theirs: nn.Module) -> None:
    options = {"attn_implementation": "eager", "experts_implementation": "eager"}
    again, report = transformers.AutoModelForCausalLM.from_pretrained(folder, output_loading_info=True, **options)
    assert not any(report[kind] for kind in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    for key, tensor in theirs.state_dict().items():
        assert torch.equal(again.state_dict()[key], tensor), key
    tokens = torch.arange(40)[None]
    assert torch.equal(again(tokens).logits, theirs.eval()(tokens).logits)
