"""Recipes from Python: `titan_moe.train` and `titan_moe.check`."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

import titan_moe
from titan_moe.config.parse import RecipeError

RECIPES = Path(__file__).parents[1] / "recipes"
TINY = Path(__file__).parent / "training" / "tiny.toml"


def test_check_returns_the_report_without_torch() -> None:
    code = "import sys, titan_moe; print(titan_moe.check(sys.argv[1], num_ranks=8)); assert 'torch' not in sys.modules"
    run = subprocess.run([sys.executable, "-c", code, RECIPES / "qwen3_30b_a3b.toml"], capture_output=True, text=True)
    assert run.returncode == 0 and "GiB" in run.stdout, run.stderr


def test_check_refuses_a_recipe_with_all_problems() -> None:
    with pytest.raises(RecipeError, match="parallel.ep = 3"):
        titan_moe.check(RECIPES / "qwen3_30b_a3b.toml", ["--parallel.ep=3"], num_ranks=8)


def test_check_says_what_attention_is() -> None:
    words = ["sliding_window=8", "full_attention_every=2", "window_rope_theta=500", "llama3_factor=8"]
    words = [f"--model.attention.{word}" for word in [*words, "output_gate=head"]]
    report = titan_moe.check(RECIPES / "qwen3_30b_a3b.toml", [*words, "--model.norm_placement=after_moe"], num_ranks=8)
    more = "context extended by 8 as in Llama 3.1, gates of each head, norms before, and after experts"
    assert f"window 8, 1 layer in 2 full, RoPE of base 500 in windowed layers, {more}" in report


def test_train_runs_a_recipe(tmp_path: Path) -> None:
    recipe = titan_moe.load_recipe(TINY, [f"--run.folder={tmp_path}", "--train.steps=2", "--metrics.every_steps=1"])
    with pytest.raises(TypeError, match="for the recipe of a file"):
        titan_moe.train(recipe, ["--train.steps=3"])
    titan_moe.train(recipe)
    records = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert [record["step"] for record in records if "loss" in record] == [1, 2]
