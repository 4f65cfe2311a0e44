"""Model families are data: with the same weights, `Transformer` computes what Hugging Face's models compute.

Each family has a map of its configuration to ours and a table of names (checkpoint/hf_names/). Tiny models show that
these and the layers are right; the published configurations then show that the recipes are.
"""

import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from titan_moe.checkpoint.hf_names.families import FAMILIES
from titan_moe.checkpoint.hf_names.family import different_fields
from titan_moe.checkpoint.hf_weights import pieces_of
from titan_moe.config import load_recipe
from titan_moe.config.kernels import Kernels
from titan_moe.config.model import ModelConfig
from titan_moe.layers.rope import rope_tables
from titan_moe.models.transformer import Transformer

transformers = pytest.importorskip("transformers", minversion="5.0", reason="experts are one tensor from 5.0 on")
core_model_loading = pytest.importorskip("transformers.core_model_loading")

RECIPES = Path(__file__).parents[2] / "recipes" / "models"


# --- tiny models ------------------------------------------------------------------------------------------------------


PREFIXES = {
    "qwen2_moe": "Qwen2Moe",
    "qwen3_moe": "Qwen3Moe",
    "mixtral": "Mixtral",
    "deepseek_v2": "DeepseekV2",
    "deepseek_v3": "DeepseekV3",
    "glm4_moe_lite": "Glm4MoeLite",
    "glm4_moe": "Glm4Moe",
    "olmoe": "Olmoe",
    "minimax_m2": "MiniMaxM2",
    "afmoe": "Afmoe",
}
"""Of the classes of a family."""


def published_config(family: str, settings: dict[str, Any]) -> Any:
    return getattr(transformers, f"{PREFIXES[family]}Config")(**settings)


def translate(
    theirs: torch.nn.Module, tensors: Mapping[str, Tensor], ours: Mapping[str, Tensor], config: ModelConfig
) -> dict[str, Tensor]:
    """Tensors of theirs under our names and in our shapes; every one of theirs must be used."""
    on_disk = core_model_loading.revert_weight_conversion(theirs, dict(tensors))
    if config.embeddings_are_tied:
        on_disk.pop("lm_head.weight", None)
    shapes = {name: tuple(tensor.shape) for name, tensor in ours.items()}
    result = {name: torch.empty(shape) for name, shape in shapes.items()}
    cut = pieces_of(FAMILIES[theirs.config.model_type], config, shapes)
    for piece in cut:
        result[piece.ours][piece.box] = on_disk[piece.name]
    assert on_disk.keys() == {piece.name for piece in cut}
    return {name: tensor for name, tensor in result.items() if name in {piece.ours for piece in cut}}


TINY: dict[str, Any] = {"vocab_size": 61, "hidden_size": 32, "intermediate_size": 48, "num_attention_heads": 4}
TINY |= {"num_hidden_layers": 3, "num_experts_per_tok": 3, "rms_norm_eps": 1e-2, "max_position_embeddings": 256}
GQA = TINY | {"num_key_value_heads": 2, "num_experts": 8, "moe_intermediate_size": 16}
NO_MTP = {"num_nextn_predict_layers": 0}  # transformers has a number, and no layers
MLA = TINY | {
    "num_key_value_heads": 4,
    "kv_lora_rank": 20,
    "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 16,
    "v_head_dim": 12,
    "n_routed_experts": 16,
    "n_shared_experts": 2,
    "moe_intermediate_size": 16,
    "first_k_dense_replace": 1,
}
GROUPS = {"n_group": 4, "topk_group": 2}
GLM = {"n_group": 1, "topk_group": 1, "q_lora_rank": 24, "mlp_layer_types": ["dense", "sparse", "sparse"]}
PLAIN_ROPE = {"rope_type": "default", "rope_theta": 500.0}
YARN = {"rope_type": "yarn", "rope_theta": 10_000.0, "factor": 40.0, "original_max_position_embeddings": 64}
YARN |= {"beta_fast": 4.0, "beta_slow": 0.5}
DEEPSEEK_YARN = YARN | {"mscale": 0.7, "mscale_all_dim": 0.9}
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "qwen2_moe": (
        "qwen2_moe",
        GQA | {"shared_expert_intermediate_size": 24, "mlp_only_layers": [0], "norm_topk_prob": False},
    ),
    "qwen3_moe": ("qwen3_moe", GQA | {"head_dim": 16, "norm_topk_prob": True, "rope_parameters": PLAIN_ROPE}),
    "qwen3_moe-tied-yarn": ("qwen3_moe", GQA | {"head_dim": 16, "tie_word_embeddings": True, "rope_parameters": YARN}),
    "mixtral": ("mixtral", TINY | {"num_key_value_heads": 2, "num_local_experts": 8, "rope_parameters": PLAIN_ROPE}),
    "mixtral-window": (
        "mixtral",
        TINY | {"num_key_value_heads": 2, "num_local_experts": 8, "sliding_window": 7},
    ),
    "qwen2_moe-every-second-full": (
        "qwen2_moe",
        GQA | {"shared_expert_intermediate_size": 24, "use_sliding_window": True, "sliding_window": 5},
    ),
    "deepseek_v2-lite": (
        "deepseek_v2",
        MLA | {"q_lora_rank": None, "topk_method": "greedy", "rope_parameters": DEEPSEEK_YARN},
    ),
    "deepseek_v2": (
        "deepseek_v2",
        MLA | GROUPS | {"q_lora_rank": 24, "topk_method": "group_limited_greedy", "routed_scaling_factor": 16.0},
    ),
    "deepseek_v3": ("deepseek_v3", MLA | GROUPS | {"q_lora_rank": 24, "rope_parameters": DEEPSEEK_YARN} | NO_MTP),
    "glm4_moe_lite": ("glm4_moe_lite", MLA | GLM),
    "deepseek_v3-halves": ("deepseek_v3", MLA | GROUPS | {"q_lora_rank": None, "rope_interleave": False} | NO_MTP),
}


def reference(family: str, settings: dict[str, Any]) -> torch.nn.Module:
    """Their model, every weight random: norms not one, biases not zero."""
    config = published_config(family, settings | {"attn_implementation": "eager", "experts_implementation": "eager"})
    torch.manual_seed(0)
    model = getattr(transformers, f"{PREFIXES[family]}ForCausalLM")(config).train()
    with torch.no_grad():
        for name, tensor in model.state_dict().items():
            tensor.normal_(mean=1.0 if "norm" in name else 0.0, std=0.2)
    return model


def assert_near(actual: Tensor, expected: Tensor, name: str) -> None:
    error = ((actual - expected).norm() / expected.norm()).item()
    assert error < 1e-5, f"{name} differs by {error:.1e}"


@pytest.mark.parametrize("case", CASES)
def test_parity_of_logits_loss_and_gradients(case: str) -> None:
    family, settings = CASES[case]
    theirs = reference(family, settings)
    config = FAMILIES[family].read(theirs.config.to_dict())[0]
    ours = Transformer(config, kernels=Kernels(experts="reference"), loss_chunk_tokens=16)
    missing, _ = ours.load_state_dict(translate(theirs, theirs.state_dict(), ours.state_dict(), config), strict=False)
    assert all(
        name.endswith("expert_bias_E") or name == "head.weight" and config.embeddings_are_tied for name in missing
    )

    tokens, labels = torch.randint(settings["vocab_size"], (2, 2, 40)).unbind()
    labels[0, :7] = -100
    logits = theirs(tokens).logits
    assert_near(ours(tokens), logits, "logits")
    expected_loss = F.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="sum")
    loss = ours(tokens, labels)
    assert_near(loss, expected_loss, "loss")

    expected_loss.backward()
    loss.backward()
    parameters = dict(ours.named_parameters())
    gradients = translate(theirs, {name: p.grad for name, p in theirs.named_parameters()}, parameters, config)
    assert gradients.keys() == parameters.keys()
    for name, expected in gradients.items():
        assert parameters[name].grad is not None, name
        assert_near(parameters[name].grad, expected, name)


# --- published models -------------------------------------------------------------------------------------------------

PUBLISHED: dict[str, list[Any]] = json.loads(Path(__file__).with_name("published.json").read_text(encoding="utf-8"))
"""Recipe -> family, and the config.json beside the released weights."""


@pytest.mark.few("qwen3_30b_a3b", "mixtral_8x7b", "deepseek_v2_lite", "olmoe_1b_7b")
@pytest.mark.parametrize("name", PUBLISHED)
def test_parity_of_recipes_with_published_models(name: str) -> None:
    family, settings = PUBLISHED[name]
    published = published_config(family, settings)
    recipe = load_recipe(RECIPES / f"{name}.toml").model
    fields = ("name", "init_std", "embedding_init_std")  # how a run is trained, not what the model is
    free = {field: getattr(recipe, field) for field in fields}
    expected = replace(FAMILIES[family].read(published.to_dict())[0], **free)
    balancing = ("aux_loss_coef", "z_loss_coef", "bias_update_speed", "group_score")
    balance = {field: getattr(recipe.moe, field) for field in balancing}
    assert recipe == replace(expected, moe=replace(expected.moe, **balance))
    rope = settings["rope_parameters"]  # as releases of before transformers 5 write it
    theta, scaling = rope["rope_theta"], {key: value for key, value in rope.items() if key != "rope_theta"}
    older = {key: value for key, value in settings.items() if key != "rope_parameters"} | {"rope_theta": theta}
    older["rope_scaling"] = scaling if scaling["rope_type"] != "default" else None
    assert different_fields(FAMILIES[family].read(older)[0], recipe) == []
    with torch.device("meta"):
        theirs = getattr(transformers, f"{PREFIXES[family]}ForCausalLM")(published)
        ours = Transformer(recipe).state_dict()
        translated = translate(theirs, theirs.state_dict(), ours, recipe)
    assert translated.keys() >= {key for key in ours if "expert_bias" not in key}


def test_parity_of_yarn_tables_with_published_ones() -> None:
    published = transformers.DeepseekV2Config(**PUBLISHED["deepseek_v2_lite"][1])
    frequencies, scale = transformers.modeling_rope_utils.ROPE_INIT_FUNCTIONS["yarn"](published)
    attention = load_recipe(RECIPES / "deepseek_v2_lite.toml").model.attention
    cos, sin = rope_tables(attention, 1024, torch.device("cpu"))
    angles = torch.arange(1024)[:, None] * frequencies
    torch.testing.assert_close(cos, angles.cos() * scale, atol=1e-4, rtol=0)
    torch.testing.assert_close(sin, angles.sin() * scale, atol=1e-4, rtol=0)
