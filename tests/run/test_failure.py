"""The first failure of a run is told in its own words, disk full and the like in one sentence."""

import errno
import json
from inspect import currentframe
from pathlib import Path

import pytest
from support.runs import COMMAND
from torch._inductor.exc import InductorError, InvalidCxxCompiler
from torch.distributed.checkpoint.api import CheckpointException

from titan_moe.checkpoint.hf_folder import HuggingFaceError
from titan_moe.config import RecipeError
from titan_moe.run.failure import first_rank_has_refused, plain_words, record_failure, recorded_failures

LIMIT_FILES = """
import resource
resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, resource.getrlimit(resource.RLIMIT_FSIZE)[1]))
"""


def full(path: str | None = None) -> OSError:
    return OSError(errno.ENOSPC, "No space left on device", path)


def test_failure_recorded_first_stays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for rank, errors in enumerate([[RecipeError(["no data"])], [ArithmeticError("first"), RuntimeError("second")]]):
        (tmp_path / str(rank)).mkdir()
        monkeypatch.setenv("RANK", str(rank))
        monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(tmp_path / str(rank) / "error.json"))
        for error in errors:
            record_failure(error)
    found = recorded_failures(tmp_path)
    assert [tuple(failure[:3]) for failure in found] == [(0, "no data", 2), (1, "ArithmeticError: first", 1)]
    stored = json.loads((tmp_path / "1" / "error.json").read_text())["message"]
    assert "first" in stored["extraInfo"]["py_callstack"], "torchrun reads it too"


def test_a_refused_checkpoint_ends_a_rank_as_one_process(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where the cause is a full disk: the advice for runs is not for conversions."""
    monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(tmp_path / "error.json"))
    error = HuggingFaceError(Path("out"), ["it cannot be written", "another"])
    error.__cause__ = full()
    record_failure(error)
    (failure,) = recorded_failures(tmp_path)
    assert (failure.words, failure.exit_code) == ("out: it cannot be written; out: another", 2)


def test_refusal_of_the_first_rank_is_seen_by_the_others(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TORCHELASTIC_ERROR_FILE", raising=False)
    assert not first_rank_has_refused()

    def record(rank: int, error: Exception) -> None:
        (tmp_path / str(rank)).mkdir(exist_ok=True)
        monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(tmp_path / str(rank) / "error.json"))
        record_failure(error)

    record(1, RecipeError(["no data"]))
    assert not first_rank_has_refused()
    record(0, RuntimeError("connection closed by peer"))
    assert not first_rank_has_refused(), "it says something else"
    (tmp_path / "0" / "error.json").unlink()
    record(0, RecipeError(["no data"]))
    monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(tmp_path / "1" / "error.json"))
    assert first_rank_has_refused()


def test_failure_disk_full_is_one_sentence() -> None:
    told = "the disk is full: {} cannot be written (No space left on device); free some space and start the run again"
    by_file, by_folder = told.format("a/b"), told.format("runs/x")
    assert plain_words(full("a/b"), "runs/x").startswith(by_file)
    in_save = CheckpointException("write", {0: (full(), None)})
    assert plain_words(in_save, "runs/x").startswith(by_folder)
    wrapped = RuntimeError("save failed")
    wrapped.__cause__ = full()
    assert plain_words(wrapped, "runs/x").startswith(by_folder)
    assert plain_words(RuntimeError("another"), "runs/x") == ""


@pytest.mark.parametrize(
    ("error", "package"),
    [
        (InvalidCxxCompiler(), "package g++"),
        (RuntimeError("Failed to find C compiler. Please specify via CC environment variable"), "package gcc"),
        (RuntimeError("main.c:5:10: fatal error: Python.h: No such file or directory"), "package python3-dev"),
    ],
)
def test_failure_without_a_compiler_is_one_sentence(error: Exception, package: str) -> None:
    """PyTorch's own words are 139 lines long."""
    wrapped = InductorError(error, currentframe())
    words = plain_words(wrapped.with_traceback(None), "runs/x")
    assert package in words and 'compile.regional = "off"' in words and "\n" not in words


@pytest.mark.slow
@pytest.mark.launches
@pytest.mark.parametrize(
    ("num_ranks", "saves"),
    [
        (1, ()),
        (1, ("--checkpoint.every_steps=3", "--checkpoint.is_async=true")),
        (2, ("--checkpoint.every_steps=3",)),
    ],
)
def test_failure_of_a_full_disk_is_the_last_line(
    tiny, monkeypatch: pytest.MonkeyPatch, num_ranks: int, saves: tuple[str, ...]
) -> None:
    """The kernel's limit of a file's size fails like a full disk, in metrics or in a save. Python would cut off
    compiled modules too, and read them again in other tests."""
    monkeypatch.setenv("PYTHONDONTWRITEBYTECODE", "1")
    run = tiny("--train.steps=200", *saves)
    process = run.start(*(("--nproc", "2") if num_ranks == 2 else ()), script=LIMIT_FILES + COMMAND)
    stderr = process.communicate(timeout=180)[1]
    assert process.returncode == 1
    last_line = stderr.strip().splitlines()[-1]
    assert last_line.startswith("titan-moe: ") and "disk is" in last_line and "free some space" in last_line
    assert "Traceback" not in stderr or num_ranks == 2, "ranks that lost their peer say so before"
    assert (run.folder / "recipe.toml").read_text().strip()
