"""How long a run is: steps, tokens or epochs, from the nearest source that says it."""

from dataclasses import replace
from pathlib import Path

import pytest

from titan_moe.config import Recipe, load_recipe
from titan_moe.config.parse import RecipeError, dump_recipe
from titan_moe.config.run_length import known_steps, with_steps
from titan_moe.config.train import TrainConfig

SIZES = {"seq_len_tokens": 32, "global_batch_sequences": 4}


@pytest.mark.parametrize(
    ("given", "samples_per_epoch", "steps"),
    [
        ({}, 0, 100),
        ({"steps": 7}, 10, 7),
        ({"tokens": 128 * 9}, 0, 9),
        ({"tokens": 128 * 9 + 63}, 0, 9),
        ({"tokens": 128 * 9 + 64}, 0, 10),
        ({"tokens": 1}, 0, 1),
        ({"epochs": 1.0}, 40, 10),
        ({"epochs": 2.5}, 41, 26),
        ({"epochs": 0.1}, 4, 1),
        ({"epochs": 1.0}, 0, None),
    ],
)
def test_length_becomes_whole_steps(given: dict, samples_per_epoch: int, steps: int | None) -> None:
    recipe = Recipe(train=TrainConfig(**SIZES, **given))
    assert known_steps(recipe.train, samples_per_epoch) == steps
    if steps is None:
        with pytest.raises(ValueError, match="train.epochs = 1 needs data of a known size, .*give train.steps or"):
            with_steps(recipe, samples_per_epoch)
        return
    resolved = with_steps(recipe, samples_per_epoch)
    assert resolved.train == TrainConfig(**SIZES, steps=steps)
    assert with_steps(resolved, samples_per_epoch) == resolved


BASE, FILE = "steps = 240", 'base = "base.toml"\n[train]\n'


@pytest.mark.parametrize(
    ("file", "overrides", "expected"),
    [
        ("", [], (240, 0, 0.0)),
        ("epochs = 3", [], (100, 0, 3.0)),
        ("epochs = 3", ["--train.tokens=1000"], (100, 1000, 0.0)),
        ("tokens = 5", ["--train.steps", "7"], (7, 0, 0.0)),
        ("tokens = 5", ["--train.steps=100"], (100, 0, 0.0)),
        ("", ["--train.epochs=0", "--train.tokens=0"], (240, 0, 0.0)),
    ],
)
def test_nearest_source_says_it(tmp_path: Path, file: str, overrides: list[str], expected: tuple) -> None:
    (tmp_path / "base.toml").write_text(f"[train]\n{BASE}")
    (tmp_path / "r.toml").write_text(FILE + file)
    recipe = load_recipe(tmp_path / "r.toml", overrides)
    assert (recipe.train.steps, recipe.train.tokens, recipe.train.epochs) == expected
    (tmp_path / "again.toml").write_text(dump_recipe(recipe))
    assert load_recipe(tmp_path / "again.toml") == recipe
    resolved = with_steps(replace(recipe), 40)
    assert load_recipe(tmp_path / "again.toml", [f"--train.steps={resolved.train.steps}"]) == resolved


@pytest.mark.parametrize(
    ("file", "overrides", "words"),
    [
        (
            "steps = 100\nepochs = 2.5",
            [],
            "r.toml: train.steps = 100 and train.epochs = 2.5 both say how long the run is",
        ),
        ("", ["--train.tokens=9", "--train.steps", "100"], "command line: train.steps = 100 and train.tokens = 9 both"),
        ("steps = 100\ntokens = 9", ["--train.epochs=1"], "r.toml: train.steps = 100 and train.tokens = 9 both"),
    ],
)
def test_default_of_the_steps_is_a_length_too(tmp_path: Path, file: str, overrides: list[str], words: str) -> None:
    (tmp_path / "r.toml").write_text(f"[train]\n{file}")
    with pytest.raises(RecipeError, match=words):
        load_recipe(tmp_path / "r.toml", overrides)
