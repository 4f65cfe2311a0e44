"""`titan-moe check --json`: the numbers of the report, and breaches of rules."""

import json
from pathlib import Path

import pytest

from titan_moe.cli import main
from titan_moe.config import load_recipe
from titan_moe.plan.check_data import check_data

RECIPES = Path(__file__).parents[2] / "recipes"
SMALL = ["--parallel.ep=4", "--model.num_layers=4", "--train.global_batch_sequences=16"]


def test_one_object(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["check", str(RECIPES / "qwen3_30b_a3b.toml"), *SMALL, "--nproc", "4", "--gpu", "H100", "--json"]
    assert main(words) == 0
    data = json.loads(capsys.readouterr().out)
    assert data["breaches"] == []
    assert data["shape"]["experts"] == 128
    assert data["layout"]["ep"] == 4
    regions = data["parameters"]
    assert regions["total"] == sum(size for name, size in regions.items() if name not in ("total", "active"))
    assert data["memory_gib"]["states"] < data["memory_gib"]["peak"] < data["limit_gib"]
    assert data["speed"]["step_ms"] == pytest.approx(sum(data["speed"]["parts_ms"].values()), rel=1e-3)


def test_breaches_are_data(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["check", str(RECIPES / "qwen3_30b_a3b.toml"), "--parallel.tp=3", "--nproc", "8", "--json"]
    assert main(words) == 2
    assert any("tp" in breach for breach in json.loads(capsys.readouterr().out)["breaches"])


def test_a_run_on_cpus_has_no_speed() -> None:
    recipe = load_recipe(RECIPES / "quickstart.toml")
    data = check_data(recipe, 1)
    assert data["speed"] is data["memory_gib"] is None
    assert data["flops_per_token"] > 0
