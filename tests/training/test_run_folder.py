"""A run that starts anew in a used folder loses no record of the attempt before."""

import logging
import shlex
from pathlib import Path

import pytest

from titan_moe.training.run_folder import command_to_go_on, set_aside

pytestmark = pytest.mark.slow


def test_starting_again_keeps_all_records(tiny, caplog: pytest.LogCaptureFixture) -> None:
    run = tiny("--train.steps=3", "--checkpoint.save_last_step=false", "--metrics.tensorboard=true")
    contents = []
    for number, lr in enumerate(("1e-2", "1e-3", "1e-4")):
        assert run.train(f"--optim.lr={lr}") == 0
        contents.append((run.folder / "metrics.jsonl").read_bytes())
        assert run.column("step") == [1, 2, 3]
        warnings = [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]
        assert (f"they are now in {run.folder / f'attempt-{number}'}" in " ".join(warnings)) is (number > 0)
    for number, lr in ((1, "0.01"), (2, "0.001")):
        attempt = run.folder / f"attempt-{number}"
        assert (attempt / "metrics.jsonl").read_bytes() == contents[number - 1]
        assert f"\nlr = {lr}\n" in (attempt / "recipe.toml").read_text()
        assert (attempt / "environment.json").exists() and any((attempt / "tensorboard").iterdir())


def test_a_resumed_run_keeps_what_it_writes_again(tiny) -> None:
    run = tiny("--train.steps=5", "--checkpoint.every_steps=3", "--checkpoint.save_last_step=false")
    assert run.train() == 0
    assert run.train("--optim.lr=1e-3") == 0
    assert run.column("step") == [1, 2, 3, 4, 5] and not list(run.folder.glob("attempt-*"))
    dropped = (run.folder / "metrics.dropped.jsonl").read_text().splitlines()
    assert len(dropped) == 2 and '"step": 4' in dropped[0] and '"step": 5' in dropped[1]


def test_set_aside_finds_records_after_an_interrupted_move(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    names = {"metrics.jsonl", "recipe.toml", "environment.json", "traces"}
    for name in names:
        (tmp_path / name).write_text(name)
    rename = Path.rename

    def fail_at_the_third(path: Path, target: Path) -> Path:
        if path.name == "traces":
            raise OSError("killed")
        return rename(path, target)

    monkeypatch.setattr(Path, "rename", fail_at_the_third)
    with pytest.raises(OSError, match="killed"):
        set_aside(tmp_path)
    monkeypatch.undo()
    assert set_aside(tmp_path) == tmp_path / "attempt-2"
    kept = {path.name for path in tmp_path.glob("attempt-*/*")}
    left = [path.name for path in tmp_path.iterdir() if path.is_file()]
    assert kept == names and left == ["recipe.toml"], "the recipe still names this folder"
    assert set_aside(tmp_path) is None


@pytest.mark.parametrize(("num_ranks", "ranks_of_a_node", "option"), [(1, 1, ""), (4, 4, " --nproc 4"), (4, 2, "")])
def test_the_command_that_goes_on_names_the_ranks_of_one_node(
    monkeypatch: pytest.MonkeyPatch, num_ranks: int, ranks_of_a_node: int, option: str
) -> None:
    monkeypatch.setattr("torch.distributed.get_world_size", lambda: num_ranks)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", str(ranks_of_a_node))
    assert command_to_go_on(Path("runs/one")) == f"titan-moe train runs/one/recipe.toml{option}"
    assert shlex.split(command_to_go_on(Path("my runs/it's")))[2] == "my runs/it's/recipe.toml"
