"""The run lock: one run at a time in a folder, and no folder after a refusal."""

import os
import re
import signal
import socket
import time
from pathlib import Path

import pytest

from titan_moe.config import RecipeError
from titan_moe.run.run_lock import run_lock

pytestmark = [pytest.mark.slow, pytest.mark.launches]


def test_run_lock_refuses_a_second_run(tmp_path: Path) -> None:
    folder = tmp_path / "runs" / "one"
    holder = rf"is in use by another run \(process {os.getpid()} on {re.escape(socket.gethostname())}\)"
    with run_lock(folder):
        with pytest.raises(RecipeError, match=holder), run_lock(folder):
            pass
        (folder / "recipe.toml").write_text("")
    with run_lock(folder):
        assert (folder / "recipe.toml").exists()
    assert [path.name for path in folder.iterdir()] == ["recipe.toml"]


def test_run_lock_is_released_by_a_killed_run(tiny, capsys: pytest.CaptureFixture[str]) -> None:
    run = tiny("--train.steps=100000", "--metrics.every_steps=1")
    process = run.start()
    while process.poll() is None and not run.column("loss"):
        time.sleep(0.01)
    process.send_signal(signal.SIGSTOP)  # it keeps the lock, and leaves the processor to the others
    assert run.train() == 2, "the other process has the lock"
    assert "is in use by another run" in capsys.readouterr().err
    process.send_signal(signal.SIGKILL)
    process.communicate()
    assert run.train("--train.steps=2") == 0


def test_run_lock_unwritable_folder_is_named_by_its_key(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(RecipeError, match=r'run.folder = ".*/file/run" cannot be written: Not a directory'):
        run_lock(tmp_path / "file" / "run").__enter__()


def test_run_lock_removes_an_empty_folder(tmp_path: Path) -> None:
    with run_lock(tmp_path / "run"):
        pass
    assert not (tmp_path / "run").exists()
