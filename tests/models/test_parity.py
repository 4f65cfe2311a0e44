"""Model families are data: with the same weights, `Transformer` computes what Hugging Face's models compute.

Each family is one function from its published configuration to ours, and all share one table of names. Tiny models show
that the functions and the layers are right; the published configurations then show that the recipes are.
"""

import json
import re
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from titan_moe.config import load_recipe
from titan_moe.config.kernels import Kernels
from titan_moe.config.model import AttentionConfig, ModelConfig, MoEConfig
from titan_moe.layers.rope import rope_tables
from titan_moe.models.transformer import Transformer

transformers = pytest.importorskip("transformers", minversion="5.0", reason="experts are one tensor from 5.0 on")

RECIPES = Path(__file__).parents[2] / "recipes" / "models"


# --- configurations ---------------------------------------------------------------------------------------------------


def qwen2_moe(hf: Any) -> ModelConfig:
    attention = replace(gqa(hf), head_dim=hf.hidden_size // hf.num_attention_heads, qkv_bias=hf.qkv_bias)
    moe = MoEConfig(shared_ffn_hidden_size=hf.shared_expert_intermediate_size, shared_expert_gate=True)
    return model(hf, attention, replace(moe, **small_experts(hf)), num_dense_layers=len(hf.mlp_only_layers))


def qwen3_moe(hf: Any) -> ModelConfig:
    attention = replace(gqa(hf), head_dim=hf.head_dim, qk_norm=True)
    return model(hf, attention, MoEConfig(**small_experts(hf)), num_dense_layers=len(hf.mlp_only_layers))


def mixtral(hf: Any) -> ModelConfig:
    attention = replace(gqa(hf), head_dim=hf.head_dim or hf.hidden_size // hf.num_attention_heads)
    moe = MoEConfig(
        num_experts=hf.num_local_experts, top_k=hf.num_experts_per_tok, ffn_hidden_size=hf.intermediate_size
    )
    return replace(model(hf, attention, moe, num_dense_layers=0), ffn_hidden_size=0)


def deepseek_v2(hf: Any) -> ModelConfig:
    is_grouped = hf.topk_method == "group_limited_greedy"
    groups = {"num_groups": hf.n_group, "top_k_groups": hf.topk_group, "group_score": "max"} if is_grouped else {}
    return deepseek(hf, hf.first_k_dense_replace, rope_is_interleaved=True, score_fn="softmax", **groups)


def deepseek_v3(hf: Any) -> ModelConfig:
    groups = {"num_groups": hf.n_group, "top_k_groups": hf.topk_group, "group_score": "top2_sum"}
    return deepseek(hf, hf.first_k_dense_replace, rope_is_interleaved=hf.rope_interleave, score_fn="sigmoid", **groups)


def glm4_moe_lite(hf: Any) -> ModelConfig:
    num_dense = hf.mlp_layer_types.index("sparse")
    groups = {"num_groups": hf.n_group, "top_k_groups": hf.topk_group, "group_score": "top2_sum"}
    return deepseek(hf, num_dense, rope_is_interleaved=hf.rope_interleave, score_fn="sigmoid", **groups)


def gqa(hf: Any) -> AttentionConfig:
    return AttentionConfig(
        kind="gqa",
        num_heads=hf.num_attention_heads,
        num_kv_heads=hf.num_key_value_heads,
        **windows(hf),
        **rope(hf.rope_parameters),
    )


def windows(hf: Any) -> dict[str, int]:
    if not hf.sliding_window:
        return {}
    kinds = getattr(hf, "layer_types", ["sliding_attention"] * hf.num_hidden_layers)
    every = kinds.index("full_attention") + 1 if "full_attention" in kinds else 0
    assert [bool(every) and (i + 1) % every == 0 for i in range(len(kinds))] == [k == "full_attention" for k in kinds]
    return {"sliding_window": hf.sliding_window, "full_attention_every": every}


def deepseek(hf: Any, num_dense_layers: int, *, rope_is_interleaved: bool, **routing: Any) -> ModelConfig:
    widths = ("kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim")
    attention = AttentionConfig(
        kind="mla",
        num_heads=hf.num_attention_heads,
        q_lora_rank=hf.q_lora_rank or 0,
        rope_is_interleaved=rope_is_interleaved,
        **{width: getattr(hf, width) for width in widths},
        **rope(hf.rope_parameters),
    )
    moe = MoEConfig(
        num_experts=hf.n_routed_experts,
        top_k=hf.num_experts_per_tok,
        ffn_hidden_size=hf.moe_intermediate_size,
        shared_ffn_hidden_size=hf.n_shared_experts * hf.moe_intermediate_size,
        normalize_topk=hf.norm_topk_prob,
        route_scale=hf.routed_scaling_factor,
        **routing,
    )
    return model(hf, attention, moe, num_dense_layers)


def small_experts(hf: Any) -> dict[str, Any]:
    return {
        "num_experts": hf.num_experts,
        "top_k": hf.num_experts_per_tok,
        "ffn_hidden_size": hf.moe_intermediate_size,
        "normalize_topk": hf.norm_topk_prob,
    }


def rope(parameters: Mapping[str, Any]) -> dict[str, Any]:
    values = {"rope_theta": parameters["rope_theta"]}
    if parameters["rope_type"] == "yarn":
        values["yarn_original_tokens"] = parameters["original_max_position_embeddings"]
        same = ("factor", "beta_fast", "beta_slow", "mscale", "mscale_all_dim")
        values |= {f"yarn_{key}": parameters[key] for key in same if key in parameters}
    return values


def model(hf: Any, attention: AttentionConfig, moe: MoEConfig, num_dense_layers: int) -> ModelConfig:
    return ModelConfig(
        vocab_size=hf.vocab_size,
        num_layers=hf.num_hidden_layers,
        num_dense_layers=num_dense_layers,
        hidden_size=hf.hidden_size,
        ffn_hidden_size=hf.intermediate_size if num_dense_layers else 0,
        norm_eps=hf.rms_norm_eps,
        embeddings_are_tied=hf.tie_word_embeddings,
        attention=attention,
        moe=moe,
    )


# --- names ------------------------------------------------------------------------------------------------------------

NAMES = {
    # ours -> theirs; several of theirs are stacked along their first dimension
    "embed.weight": ["model.embed_tokens.weight"],
    "norm.weight": ["model.norm.weight"],
    "head.weight": ["lm_head.weight"],
    "attention_norm.weight": ["input_layernorm.weight"],
    "ffn_norm.weight": ["post_attention_layernorm.weight"],
    "attention.qkv.weight": ["self_attn.q_proj.weight", "self_attn.k_proj.weight", "self_attn.v_proj.weight"],
    "attention.qkv.bias": ["self_attn.q_proj.bias", "self_attn.k_proj.bias", "self_attn.v_proj.bias"],
    "attention.qk_norm_rope.q_norm_weight": ["self_attn.q_norm.weight"],
    "attention.qk_norm_rope.k_norm_weight": ["self_attn.k_norm.weight"],
    "attention.out.weight": ["self_attn.o_proj.weight"],
    "feed_forward.gate_up.weight": ["mlp.gate_proj.weight", "mlp.up_proj.weight"],
    "feed_forward.down.weight": ["mlp.down_proj.weight"],
    "feed_forward.router.weight": ["mlp.gate.weight"],
    "feed_forward.router.expert_bias_E": ["mlp.gate.e_score_correction_bias"],
    "feed_forward.experts.gate_up": ["mlp.experts.gate_up_proj"],
    "feed_forward.experts.down": ["mlp.experts.down_proj"],
    "feed_forward.shared_experts.gate_up.weight": [
        "mlp.shared_experts.gate_proj.weight",
        "mlp.shared_experts.up_proj.weight",
    ],
    "feed_forward.shared_experts.down.weight": ["mlp.shared_experts.down_proj.weight"],
    "feed_forward.shared_experts.mlp.gate_up.weight": [
        "mlp.shared_expert.gate_proj.weight",
        "mlp.shared_expert.up_proj.weight",
    ],
    "feed_forward.shared_experts.mlp.down.weight": ["mlp.shared_expert.down_proj.weight"],
    "feed_forward.shared_experts.gate.weight": ["mlp.shared_expert_gate.weight"],
}
MLA_NAMES = {
    "attention.q_down.weight": ["self_attn.q_a_proj.weight"],
    "attention.q_norm.weight": ["self_attn.q_a_layernorm.weight"],
    "attention.kv_down.weight": ["self_attn.kv_a_proj_with_mqa.weight"],
    "attention.kv_norm.weight": ["self_attn.kv_a_layernorm.weight"],
    "attention.kv_up.weight": ["self_attn.kv_b_proj.weight"],
}


def names(config: ModelConfig) -> dict[str, list[str]]:
    if config.attention.kind == "gqa":
        return NAMES
    query = "self_attn.q_b_proj.weight" if config.attention.q_lora_rank else "self_attn.q_proj.weight"
    return NAMES | MLA_NAMES | {"attention.q_up.weight": [query]}


def translate(theirs: Mapping[str, Tensor], ours: Mapping[str, Tensor], config: ModelConfig) -> dict[str, Tensor]:
    """Tensors under our names and in our shapes; every one of theirs must be used."""
    table, result, unused = names(config), {}, set(theirs)
    for name, tensor in ours.items():
        layer, local = re.fullmatch(r"(layers\.\d+\.)?(.*)", name).groups()
        sources = [f"model.{layer}{source}" if layer else source for source in table[local]]
        if local.endswith("expert_bias_E") and sources[0] not in theirs:
            continue  # a family without the bias
        result[name] = torch.cat([theirs[source] for source in sources]).view(tensor.shape)
        unused -= set(sources)
    assert not unused
    return result


# --- tiny models ------------------------------------------------------------------------------------------------------


class Family(NamedTuple):
    ours: Callable[[Any], ModelConfig]
    config_class: str
    model_class: str


FAMILIES = {
    "qwen2_moe": Family(qwen2_moe, "Qwen2MoeConfig", "Qwen2MoeForCausalLM"),
    "qwen3_moe": Family(qwen3_moe, "Qwen3MoeConfig", "Qwen3MoeForCausalLM"),
    "mixtral": Family(mixtral, "MixtralConfig", "MixtralForCausalLM"),
    "deepseek_v2": Family(deepseek_v2, "DeepseekV2Config", "DeepseekV2ForCausalLM"),
    "deepseek_v3": Family(deepseek_v3, "DeepseekV3Config", "DeepseekV3ForCausalLM"),
    "glm4_moe_lite": Family(glm4_moe_lite, "Glm4MoeLiteConfig", "Glm4MoeLiteForCausalLM"),
}
TINY: dict[str, Any] = {"vocab_size": 61, "hidden_size": 32, "intermediate_size": 48, "num_attention_heads": 4}
TINY |= {"num_hidden_layers": 3, "num_experts_per_tok": 3, "rms_norm_eps": 1e-2, "max_position_embeddings": 256}
GQA = TINY | {"num_key_value_heads": 2, "num_experts": 8, "moe_intermediate_size": 16}
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
    "deepseek_v3": ("deepseek_v3", MLA | GROUPS | {"q_lora_rank": 24, "rope_parameters": DEEPSEEK_YARN}),
    "glm4_moe_lite": ("glm4_moe_lite", MLA | GLM),
    "deepseek_v3-halves": ("deepseek_v3", MLA | GROUPS | {"q_lora_rank": None, "rope_interleave": False}),
}


def reference(family: Family, settings: dict[str, Any]) -> torch.nn.Module:
    """Their model, every weight random: norms not one, biases not zero."""
    config = getattr(transformers, family.config_class)(
        **settings, attn_implementation="eager", experts_implementation="eager"
    )
    torch.manual_seed(0)
    model = getattr(transformers, family.model_class)(config).train()
    with torch.no_grad():
        for name, tensor in model.state_dict().items():
            tensor.normal_(mean=1.0 if "norm" in name else 0.0, std=0.2)
    return model


def assert_near(actual: Tensor, expected: Tensor, name: str) -> None:
    error = ((actual - expected).norm() / expected.norm()).item()
    assert error < 1e-5, f"{name} differs by {error:.1e}"


@pytest.mark.parametrize("case", CASES)
def test_parity_of_logits_loss_and_gradients(case: str) -> None:
    family, settings = FAMILIES[CASES[case][0]], CASES[case][1]
    theirs = reference(family, settings)
    config = family.ours(theirs.config)
    ours = Transformer(config, kernels=Kernels(experts="reference"), loss_chunk_tokens=16)
    missing, _ = ours.load_state_dict(translate(theirs.state_dict(), ours.state_dict(), config), strict=False)
    assert all(name.endswith("expert_bias_E") for name in missing)

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
    gradients = translate({name: p.grad for name, p in theirs.named_parameters()}, parameters, config)
    assert gradients.keys() == parameters.keys()
    for name, expected in gradients.items():
        assert parameters[name].grad is not None, name
        assert_near(parameters[name].grad, expected, name)


# --- published models -------------------------------------------------------------------------------------------------

PUBLISHED: dict[str, list[Any]] = json.loads(Path(__file__).with_name("published.json").read_text(encoding="utf-8"))
"""Recipe -> family, and the config.json beside the released weights."""


@pytest.mark.parametrize("name", PUBLISHED)
def test_parity_of_recipes_with_published_models(name: str) -> None:
    family, settings = FAMILIES[PUBLISHED[name][0]], PUBLISHED[name][1]
    published = getattr(transformers, family.config_class)(**settings)
    recipe = load_recipe(RECIPES / f"{name}.toml").model
    fields = ("name", "init_std", "embedding_init_std")  # how a run is trained, not what the model is
    free = {field: getattr(recipe, field) for field in fields}
    expected = replace(family.ours(published), **free)
    balance = {"aux_loss_coef": recipe.moe.aux_loss_coef, "group_score": recipe.moe.group_score}
    assert recipe == replace(expected, moe=replace(expected.moe, **balance))
    with torch.device("meta"):
        theirs = getattr(transformers, family.model_class)(published).state_dict()
        ours = Transformer(recipe).state_dict()
    assert translate(theirs, ours, recipe).keys() >= {key for key in ours if "expert_bias" not in key}


def test_parity_of_yarn_tables_with_published_ones() -> None:
    published = transformers.DeepseekV2Config(**PUBLISHED["deepseek_v2_lite"][1])
    frequencies, scale = transformers.modeling_rope_utils.ROPE_INIT_FUNCTIONS["yarn"](published)
    attention = load_recipe(RECIPES / "deepseek_v2_lite.toml").model.attention
    cos, sin = rope_tables(attention, 1024, torch.device("cpu"))
    angles = torch.arange(1024)[:, None] * frequencies
    torch.testing.assert_close(cos, angles.cos() * scale, atol=1e-4, rtol=0)
    torch.testing.assert_close(sin, angles.sin() * scale, atol=1e-4, rtol=0)
