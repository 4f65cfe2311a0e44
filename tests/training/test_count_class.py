"""The step on the meta device finds the published FLOPs of a model that it knows nothing of."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from titan_moe.config import load_recipe
from titan_moe.config.kernels import DEFAULT_KERNELS
from titan_moe.models.transformer import Transformer
from titan_moe.plan.cost.count import training_flops_per_token
from titan_moe.training.count_class import count_model

RECIPES = Path(__file__).parents[2] / "recipes"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "num_layers", "total", "active", "gflop"),
    [  # published for all layers: parameters in billions, GFLOP a token at 4,096 tokens
        ("qwen3_30b_a3b", 48, 30.53, 3.35, 23.01),
        ("deepseek_v2_lite", 27, 15.71, 2.66, 16.4),
        ("mixtral_8x7b", 32, 46.70, 12.88, 79.7),
    ],
)
def test_counts_are_those_published(name: str, num_layers: int, total: float, active: float, gflop: float) -> None:
    """From models of two and three layers: every further one adds the same."""
    recipe = load_recipe(RECIPES / f"{name}.toml", ["--train.seq_len_tokens=4096"])
    by_depth = {}
    for depth in (2, 3):
        model = replace(recipe.model, num_layers=depth)
        own = replace(recipe, model=replace(model, class_="mine:Model"))
        with torch.device("meta"):
            built = Transformer(model, kernels=DEFAULT_KERNELS)
        counts = count_model(own, lambda built=built: built)
        assert counts.active is not None and counts.flops_per_token is not None
        by_depth[depth] = counts.parameters / 1e9, counts.active / 1e9, counts.flops_per_token / 1e9
    whole = [two + (num_layers - 2) * (three - two) for two, three in zip(by_depth[2], by_depth[3], strict=True)]
    assert whole[:2] == [pytest.approx(total, abs=5e-3), pytest.approx(active, abs=5e-3)]
    assert whole[2] == pytest.approx(gflop, abs=0.05)


@pytest.mark.parametrize(
    "patterns", [("layers.1.attention.qkv.weight", "layers.1.*.router.weight"), ("layers.0.attention.out.weight",)]
)
def test_frozen_weights_have_fewer_flops(patterns: tuple[str, ...]) -> None:
    """A step on the meta device computes as many as the table counts, whose modules have widths of their own."""
    recipe = load_recipe(RECIPES / "qwen3_30b_a3b.toml", ["--model.num_layers=2", "--train.seq_len_tokens=512"])
    own = replace(recipe.model, class_="mine:Model")
    with torch.device("meta"):
        built = Transformer(recipe.model, kernels=DEFAULT_KERNELS)
    counts = count_model(replace(recipe, model=own, optim=replace(recipe.optim, trainable=patterns)), lambda: built)
    assert counts.flops_per_token == pytest.approx(training_flops_per_token(recipe.model, 512, patterns), rel=1e-3)
    assert counts.flops_per_token < 0.9 * training_flops_per_token(recipe.model, 512)
