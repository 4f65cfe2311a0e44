"""Stages: what each has, and where it is."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from titan_moe.config import Recipe, load_recipe
from titan_moe.config.model import ModelConfig, MoEConfig
from titan_moe.config.parallel import ParallelConfig
from titan_moe.models.part import part_of
from titan_moe.models.transformer import Transformer
from titan_moe.plan.cost.count import training_flops_per_token
from titan_moe.plan.pipeline.flops import flops_of_module, flops_of_stage
from titan_moe.plan.pipeline.stages import rank_of_stage, stages_of, stages_of_rank

RECIPES = Path(__file__).parents[3] / "recipes"
MODEL = ModelConfig(num_layers=7, num_dense_layers=2, ffn_hidden_size=96, moe=MoEConfig(8, ffn_hidden_size=64))


def sizes(stages: tuple[tuple[str, ...], ...]) -> list[int]:
    return [sum(name.startswith("layers.") for name in stage) for stage in stages]


@pytest.mark.parametrize(
    "parallel",
    [
        ParallelConfig(),
        ParallelConfig(pp=3),
        ParallelConfig(pp=2, vpp=2, pp_schedule="zbv"),
        ParallelConfig(pp=2, vpp=2, pp_schedule="interleaved_1f1b", pp_layout="Et*3||tt|ttL"),
    ],
)
def test_stages_split_a_built_model(parallel: ParallelConfig) -> None:
    with torch.device("meta"):
        model = Transformer(MODEL)
    stages = stages_of(Recipe(model=MODEL, parallel=parallel))
    assert len(stages) == parallel.pp * parallel.vpp
    names = {name for stage in stages for name, _ in part_of(model, stage).named_parameters()}
    assert names == {name for name, _ in model.named_parameters()}
    assert [name for stage in stages for name in stage if name.startswith("layers.")] == [
        f"layers.{layer}" for layer in range(7)
    ]
    assert stages[0][0] == "embed" and stages[-1][-2:] == ("norm", "head")


def test_stages_of_a_published_model_are_balanced_with_the_head() -> None:
    """Of 48 equal layers, and a head that has the FLOPs of 4.2."""
    recipe = load_recipe(RECIPES / "qwen3_30b_a3b.toml", ["--parallel.pp=4"])
    layer, head = (flops_of_module(recipe, name).total for name in ("layers.0", "head"))
    assert 3 < head / layer < 5
    by_stage = sizes(stages_of(recipe))
    assert stages_of(recipe) is stages_of(replace(recipe, memory=recipe.memory)), "divided once for a report"
    assert sum(by_stage) == 48 and by_stage[-1] == min(by_stage)
    assert max(by_stage) == -(-(48 + round(head / layer)) // 4)
    slowest = max(flops_of_stage(recipe, stage).total for stage in stages_of(recipe))
    evenly = [flops_of_stage(recipe, [f"layers.{i}" for i in range(12)] + ["head"]).total]
    assert slowest < max(evenly)


def test_stages_count_windows_and_dense_layers() -> None:
    """Full layers of long sequences take longer than windowed ones, and so have fewer neighbours."""
    a = replace(MODEL.attention, sliding_window=16, full_attention_every=4)
    model = replace(MODEL, num_layers=8, num_dense_layers=0, attention=a)
    recipe = Recipe(model=model, parallel=ParallelConfig(pp=2))
    long = replace(recipe, train=replace(recipe.train, seq_len_tokens=100_000))
    windowed, full = (flops_of_module(long, f"layers.{layer}").total for layer in (0, 3))
    assert full > 3 * windowed
    assert sizes(stages_of(long)) == [4, 4]
    shifted = replace(long, model=replace(model, num_layers=5, attention=replace(a, full_attention_every=5)))
    assert sizes(stages_of(shifted)) == [4, 1]
    wide = replace(recipe, model=replace(MODEL, num_layers=6, num_dense_layers=1, ffn_hidden_size=100_000))
    assert sizes(stages_of(wide)) == [1, 5]


@pytest.mark.parametrize("name", ["qwen3_30b_a3b", "deepseek_v2_lite", "mixtral_8x7b"])
def test_flops_of_all_stages_are_those_of_the_model(name: str) -> None:
    recipe = load_recipe(RECIPES / f"{name}.toml", ["--parallel.pp=4", "--model.attention.sliding_window=1000"])
    total = sum(flops_of_stage(recipe, stage).total for stage in stages_of(recipe))
    assert total == pytest.approx(training_flops_per_token(recipe.model, recipe.train.seq_len_tokens))
    assert sum(flops_of_stage(recipe, ()), 0) == 0


def test_flops_of_an_attention_core_have_no_weight_gradient() -> None:
    recipe = Recipe(model=MODEL)
    short, long = (
        flops_of_module(replace(recipe, train=replace(recipe.train, seq_len_tokens=n)), "layers.0") for n in (64, 4096)
    )
    assert long.backward_weight == short.backward_weight == short.forward - (short.backward_input - short.forward)
    assert long.backward_input - short.backward_input == 2 * (long.forward - short.forward) > 0


def test_ranks_of_stages() -> None:
    assert [rank_of_stage(stage, 4, "interleaved_1f1b") for stage in range(12)] == [0, 1, 2, 3] * 3
    for schedule in ("zbv", "dualpipev"):
        assert [rank_of_stage(stage, 4, schedule) for stage in range(8)] == [0, 1, 2, 3, 3, 2, 1, 0]
    assert stages_of_rank(1, ParallelConfig(pp=4, vpp=2, pp_schedule="zbv")) == [1, 6]
    assert stages_of_rank(1, ParallelConfig(pp=4, vpp=3, pp_schedule="interleaved_1f1b")) == [1, 5, 9]
    assert stages_of_rank(3, ParallelConfig(pp=4)) == [3]
