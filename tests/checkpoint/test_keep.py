"""Which checkpoints stay beside the newest ones."""

from pathlib import Path

from titan_moe.checkpoint.folders import METADATA_FILE, CheckpointFolders
from titan_moe.checkpoint.keep import kept_steps
from titan_moe.checkpoint.manifest import Manifest
from titan_moe.config.train import CheckpointConfig


def test_losses_on_other_data_are_not_compared(tmp_path: Path) -> None:
    """The best one of the earlier data stays, though its loss is higher or lower than that on the new data."""
    losses = {1: ("old", 2.0), 2: ("old", 1.5), 3: ("new", 1.75), 4: ("new", 1.25), 5: ("new", 1.5), 6: ("newer", 3.0)}
    for step, (data, loss) in losses.items():
        (folder := tmp_path / f"step-{step}").mkdir()
        Manifest({}, data, {}, loss).write(folder)
        (folder / METADATA_FILE).touch()
    assert kept_steps(CheckpointFolders(tmp_path), CheckpointConfig(keep_best=True)) == {2, 4, 6}


def test_losses_on_other_data_of_validation_are_not_compared(tmp_path: Path) -> None:
    recipes = {
        1: ({}, 2.0),
        2: ({"validation.path": "", "validation.sets": {}, "validation.every_steps": 5}, 1.5),
        3: ({"validation.path": "own.txt"}, 1.0),
        4: ({"validation.path": "own.txt", "validation.sets": {"code": "a.py"}}, 1.75),
        5: ({"validation.path": "own.txt"}, 1.25),
    }
    for step, (recipe, loss) in recipes.items():
        (folder := tmp_path / f"step-{step}").mkdir()
        Manifest(recipe, "data", {}, loss).write(folder)
        (folder / METADATA_FILE).touch()
    assert kept_steps(CheckpointFolders(tmp_path), CheckpointConfig(keep_best=True)) == {2, 3, 4}
