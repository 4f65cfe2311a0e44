"""What `parallel.expert_clones = "auto"` means."""

from pathlib import Path

import pytest

from titan_moe.config import load_recipe
from titan_moe.config.clones import NUM_CLONES, num_clones, resolve_clones

RECIPES = Path(__file__).parents[2] / "recipes"


@pytest.mark.parametrize(
    ("name", "overrides", "world_size", "expected"),
    [
        ("qwen3_30b_a3b", (), 8, NUM_CLONES),
        ("deepseek_v2_lite", (), 8, NUM_CLONES),
        ("mixtral_8x7b", (), 8, 0),  # few slots of large experts
        ("quickstart", (), 1, 0),
        ("qwen3_30b_a3b", ("--parallel.expert_clones=1",), 8, 1),
        ("qwen3_30b_a3b", ("--parallel.expert_clones=0",), 8, 0),
        ("qwen3_30b_a3b", ("--model.moe.num_experts=8",), 8, 1),  # as many as a rank owns
        ("qwen3_30b_a3b", ("--parallel.dispatcher=alltoall", "--parallel.overlap=none"), 8, 0),
        ("qwen3_30b_a3b", ("--train.micro_batch_sequences=1",), 8, 0),
        ("qwen3_30b_a3b", ("--parallel.ep=4",), 8, 0),  # experts are sharded
        ("qwen3_30b_a3b", ("--precision.master=bf16", "--precision.reduce=bf16"), 8, 0),  # no copy for compute
        ("qwen3_30b_a3b", ("--compile.extent=block",), 8, 0),
        ("qwen3_30b_a3b", ("--compile.extent=block", "--run.device=auto"), 8, 0),
        ("qwen3_30b_a3b", ("--memory.recompute=block",), 8, 0),
    ],
)
def test_auto_takes_clones_where_they_pay(
    name: str, overrides: tuple[str, ...], world_size: int, expected: int
) -> None:
    recipe = load_recipe(RECIPES / f"{name}.toml", ["--parallel.expert_clones=auto", *overrides])
    assert num_clones(recipe, world_size) == expected
    assert resolve_clones(recipe, world_size).parallel.expert_clones == expected
