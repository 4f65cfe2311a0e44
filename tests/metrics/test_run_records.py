"""What is read of a run's folder, whole or damaged."""

import json
from pathlib import Path

import pytest

from titan_moe.config import Recipe, RecipeError, dump_recipe
from titan_moe.config.train import TrainConfig
from titan_moe.metrics.run_records import read_runs


def write(folder: Path, *lines: str, recipe: str = "") -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    if lines:
        (folder / "metrics.jsonl").write_text("\n".join(lines))
    if recipe:
        (folder / "recipe.toml").write_text(recipe)
    return folder


def test_lines_that_are_no_records_are_left_out(tmp_path: Path) -> None:
    lines = ['{"step": 1, "loss": 2.0}', "\xff", "[1]", '{"step": "x"}', '{"step": 1, "validation_loss": 3.0}']
    run = write(tmp_path / "run", *lines, '{"step": 2, "data_before": "a"}', '{"step": 2, "lo')
    (read,) = read_runs([run])
    assert read.name == "run" and read.fields == {}
    assert [record["step"] for record in read.steps] == [1] and read.validations == [json.loads(lines[-1])]


def test_a_run_that_has_logged_nothing_has_a_recipe(tmp_path: Path) -> None:
    recipe = dump_recipe(Recipe(train=TrainConfig(steps=7)))
    (read,) = read_runs([write(tmp_path / "run", recipe=recipe)])
    assert read.steps == read.validations == [] and read.fields["train.steps"] == 7


def test_a_recipe_that_is_no_longer_accepted_is_read(tmp_path: Path) -> None:
    of_old = write(tmp_path / "a", recipe='[optim]\nlr = 0.5\n[perf]\noptimizer = "fused"\n')
    broken = write(tmp_path / "b", recipe="[optim")
    assert [run.fields for run in read_runs([of_old, broken])] == [{"optim.lr": 0.5, "perf.optimizer": "fused"}, {}]


def test_runs_of_one_name_are_told_apart(tmp_path: Path) -> None:
    runs = [write(tmp_path / name / "run", "{}") for name in ("a", "b")]
    assert [run.name for run in read_runs([runs[0], runs[1] / "metrics.jsonl"])] == ["a/run", "b/run"]
    assert [run.name for run in read_runs([runs[0], runs[0]])] == ["run", "run"]
    inner = write(runs[0] / "run", "{}")
    assert [run.name for run in read_runs([runs[0], inner])] == ["run", "run/run"]


def test_folders_without_a_run_are_refused_at_once(tmp_path: Path) -> None:
    with pytest.raises(RecipeError) as refused:
        read_runs([tmp_path, tmp_path / "none"])
    assert refused.value.problems == [
        f"{tmp_path} is not the folder of a run: it has neither metrics.jsonl nor recipe.toml",
        f"{tmp_path / 'none'} does not exist",
    ]
