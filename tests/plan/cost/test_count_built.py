"""Counted parameters equal built ones, for every shape in the recipes and every option with weights."""

from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from titan_moe.config import load_recipe
from titan_moe.config.kernels import Kernels
from titan_moe.config.model import AttentionConfig, ModelConfig, MoEConfig
from titan_moe.config.mtp import MTPConfig
from titan_moe.models.transformer import Transformer
from titan_moe.plan.cost.count import count_parameters

RECIPES = {
    path.stem: load_recipe(path).model for path in (Path(__file__).parents[3] / "recipes" / "models").glob("*.toml")
}
GQA = AttentionConfig(num_heads=6, num_kv_heads=2, head_dim=10)
MLA = AttentionConfig(
    kind="mla", num_heads=3, kv_lora_rank=20, qk_nope_head_dim=7, qk_rope_head_dim=6, v_head_dim=5, q_lora_rank=0
)
MOE = MoEConfig(num_experts=8, top_k=3, ffn_hidden_size=11, shared_ffn_hidden_size=13)
BASE = ModelConfig(
    vocab_size=97, num_layers=4, num_dense_layers=1, hidden_size=24, ffn_hidden_size=17, attention=GQA, moe=MOE
)
VARIANTS = {
    "base": BASE,
    "tied embeddings": replace(BASE, embeddings_are_tied=True),
    "query and key norms": replace(BASE, attention=replace(GQA, qk_norm=True)),
    "norms over all heads": replace(BASE, attention=replace(GQA, qk_norm=True, qk_norm_over="all_heads", clip_qkv=2.0)),
    "norms without weights": replace(
        BASE, attention=replace(GQA, qk_norm=True, qk_norm_is_after_rope=True, qk_norm_has_weights=False)
    ),
    "biases": replace(BASE, attention=replace(GQA, qkv_bias=True, out_bias=True, sinks=True)),
    "gate of elements": replace(BASE, attention=replace(GQA, output_gate="element")),
    "gate of heads": replace(BASE, attention=replace(GQA, output_gate="head")),
    "mla": replace(BASE, attention=MLA),
    "mla with query compression": replace(BASE, attention=replace(MLA, q_lora_rank=9)),
    "no shared experts": replace(BASE, moe=replace(MOE, shared_ffn_hidden_size=0)),
    "shared gate": replace(BASE, moe=replace(MOE, shared_expert_gate=True)),
    "expert biases": replace(BASE, moe=replace(MOE, expert_mlp_bias=True, router_bias=True, latent_size=12)),
    "latent": replace(BASE, moe=replace(MOE, latent_size=12)),
    "bias and groups": replace(
        BASE, moe=replace(MOE, score_fn="sigmoid", bias_update_speed=1e-3, num_groups=4, top_k_groups=2)
    ),
    "norms after branches": replace(BASE, norm_placement="both"),
    "norms after moe layers": replace(BASE, norm_placement="after_moe", norm="layer"),
    "layer norms": replace(BASE, norm="layer", head_bias=True),
    "multi-token prediction": replace(BASE, mtp=MTPConfig(2)),
    "repeated prediction": replace(BASE, norm="layer", moe=MoEConfig(num_experts=0), mtp=MTPConfig(2, 0.1, True)),
    "dense": replace(BASE, moe=MoEConfig(num_experts=0)),
    "dense layers anywhere": replace(BASE, num_dense_layers=0, moe_every=2, dense_layers=(3,)),
}
COMPONENTS = {
    # a part of a parameter's name -> the component that counts it; the first that fits
    "embed.": "embedding",
    "head.": "head",
    ".attention.": "attention",
    "norm.": "norms",
    ".router.": "router",
    ".shared_experts.": "shared",
    ".experts.": "experts",
    ".latent_": "latent",
    ".eh_proj.": "mtp",
    ".feed_forward.": "dense",
}


@pytest.mark.parametrize("name", [*RECIPES, *VARIANTS])
def test_count_equals_the_built_model(name: str) -> None:
    model = (RECIPES | VARIANTS)[name]
    with torch.device("meta"):
        parameters = dict(Transformer(model, kernels=Kernels(experts="reference")).named_parameters())
    built: Counter[str] = Counter()
    for key, parameter in parameters.items():
        built[next(component for part, component in COMPONENTS.items() if part in key)] += parameter.numel()
    counted = count_parameters(model)
    assert {component: counted[component] for component in COMPONENTS.values()} == {
        component: built[component] for component in COMPONENTS.values()
    }
    assert counted.total == sum(parameter.numel() for parameter in parameters.values())


def test_count_covers_all_recipes() -> None:
    assert {"qwen3_30b_a3b", "deepseek_v2_lite", "mixtral_8x7b"} <= RECIPES.keys()
