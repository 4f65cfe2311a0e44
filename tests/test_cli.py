"""The door: quick answers without torch, one clear refusal, and torchrun only for a sound recipe."""

import gc
import os
import subprocess
import sys
import time
from pathlib import Path
from types import ModuleType

import pytest

from titan_moe import cli
from titan_moe.config import Recipe

QUICKSTART = str(Path(__file__).parents[1] / "recipes" / "quickstart.toml")
QWEN3 = str(Path(__file__).parents[1] / "recipes" / "qwen3_30b_a3b.toml")
TORCHRUN_VARIABLES = ("WORLD_SIZE", "RANK", "LOCAL_RANK")


@pytest.fixture(autouse=True)
def no_torchrun(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in TORCHRUN_VARIABLES:
        monkeypatch.delenv(name, raising=False)


@pytest.fixture
def trained(monkeypatch: pytest.MonkeyPatch) -> list[Recipe]:
    """Recipes that reached the trainer."""
    recipes: list[Recipe] = []
    trainer = ModuleType("titan_moe.train.trainer")
    trainer.run = recipes.append  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "titan_moe.train.trainer", trainer)
    return recipes


@pytest.fixture
def launched(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, list[str]]]:
    """Numbers of ranks that would have been started, and their words; they end with 7."""
    calls: list[tuple[int, list[str]]] = []

    def launch(num_ranks: int, words: list[str]) -> int:
        calls.append((num_ranks, words))
        return 7

    stand_in = ModuleType("titan_moe.train.launch")
    stand_in.launch = launch  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "titan_moe.train.launch", stand_in)
    return calls


def in_new_process(*words: str, **variables: str) -> subprocess.CompletedProcess[str]:
    """Run the door as a user does, and fail if torch was imported on the way."""
    watch = (
        "import sys; from titan_moe.cli import main; code = main(); assert 'torch' not in sys.modules; sys.exit(code)"
    )
    kept = {name: value for name, value in os.environ.items() if name not in TORCHRUN_VARIABLES}
    return subprocess.run(
        [sys.executable, "-c", watch, *words], env=kept | variables, capture_output=True, text=True, timeout=60
    )


def test_check_shows_shape_cost_and_ranks_without_torch() -> None:
    done = in_new_process("check", QWEN3, "--nproc", "16", "--train.global_batch_sequences=64")
    assert done.returncode == 0, done.stderr
    for expected in (
        "30.53B, 3.35B active",
        "23.01 GFLOP",
        "dp_shard 16",
        "edp 2 · ep 8",
        "262,144 tokens = microbatches 1",
        "21.3 GiB",
        'perf.kernels = "auto"',
        "on NVIDIA H200",
        "on other architectures",
    ):
        assert expected in done.stdout


def test_check_answers_in_half_a_second() -> None:
    def seconds() -> float:
        start = time.perf_counter()
        in_new_process("check", QUICKSTART)
        return time.perf_counter() - start

    assert any(seconds() < 0.5 for _ in range(20)), "a busy machine may be slow, but not twenty times in a row"


def test_check_explains_a_key() -> None:
    done = in_new_process("check", "--explain", "model.moe.top_k")
    assert done.returncode == 0 and "Experts that each token is sent to" in done.stdout
    done = in_new_process("check", "--explain", "model.moe.topk")
    assert done.returncode == 2 and "did you mean model.moe.top_k?" in done.stderr


def test_a_reader_may_leave_before_the_end() -> None:
    command = f"{sys.executable} -m titan_moe check --explain model | head -n 1"
    done = subprocess.run(command, shell=True, capture_output=True, text=True, timeout=60)
    assert done.stdout == "[model]\n" and done.stderr == ""


def test_a_key_without_its_section_is_completed(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as leaving:
        cli.main(["train", QUICKSTART, "--steps=5"])
    assert leaving.value.code == 2 and "--steps=5? a field of the recipe" in (said := capsys.readouterr().err)
    assert "did you mean train.steps?" in said


def test_train_refuses_a_broken_recipe_at_once_and_without_torch() -> None:
    done = in_new_process("train", QWEN3, "--nproc", "8", "--parallel.ep=6", "--train.global_batch_sequences=7")
    assert done.returncode == 2 and done.stdout == ""
    assert "titan-moe: 4 problems" in done.stderr
    assert f"{QWEN3}: parallel.ep = 6 does not divide model.moe.num_experts = 128" in done.stderr
    assert "train.global_batch_sequences = 7" in done.stderr


def test_under_torchrun_the_ranks_count_and_the_first_of_a_node_speaks_for_all() -> None:
    speaker = in_new_process("train", QWEN3, WORLD_SIZE="6", RANK="0", LOCAL_RANK="0")
    assert speaker.returncode == 2 and "does not divide the 6 ranks" in speaker.stderr
    start = time.perf_counter()
    waiting = in_new_process("train", QWEN3, WORLD_SIZE="6", RANK="5", LOCAL_RANK="5")
    assert waiting.returncode == 2 and waiting.stderr == speaker.stderr
    assert time.perf_counter() - start > cli.SECONDS_FOR_THE_SPEAKER, "by then torchrun has stopped it"


def test_a_layout_for_more_ranks_on_one_names_nproc() -> None:
    refused = in_new_process("train", QWEN3)
    assert refused.returncode == 2 and "this is 1 rank alone; start as many with --nproc 8" in refused.stderr
    assert "take a divisor" not in refused.stderr


def test_a_launcher_and_nproc_must_agree() -> None:
    refused = in_new_process("train", QUICKSTART, "--nproc", "2", WORLD_SIZE="1", RANK="0")
    assert refused.returncode == 2 and "--nproc 2, but WORLD_SIZE = 1 is set" in refused.stderr


def test_a_wrong_command_line_exits_with_2(capsys: pytest.CaptureFixture[str]) -> None:
    for words in (["train"], ["check"], ["train", QUICKSTART, "--nproc", "0"], ["train", QUICKSTART, "--nprocs=2"], []):
        with pytest.raises(SystemExit) as leaving:
            cli.main(words)
        assert leaving.value.code == 2
    assert "0 is not a number of ranks" in capsys.readouterr().err


def test_one_process_trains_here(trained: list[Recipe], launched: list[tuple[int, list[str]]]) -> None:
    assert cli.main(["train", "--train.steps", "500", QUICKSTART, "--metrics.tensorboard=false"]) == 0
    assert launched == []
    (recipe,) = trained
    assert recipe.model.name == "quickstart" and recipe.train.steps == 500 and not recipe.metrics.tensorboard


def test_nproc_starts_ranks_with_the_same_words_and_ends_as_they_do(
    trained: list[Recipe], launched: list[tuple[int, list[str]]]
) -> None:
    assert cli.main(["train", QWEN3, "--nproc", "8", "--train.steps", "500", "--optim.lr=1e-4"]) == 7
    assert launched == [(8, ["train", QWEN3, "--train.steps", "500", "--optim.lr=1e-4"])]
    assert trained == []


def test_ranks_trace_with_the_same_words(trained: list[Recipe], launched: list[tuple[int, list[str]]]) -> None:
    assert cli.main(["trace", QWEN3, "--nproc", "8", "--profile.num_steps=2"]) == 7
    assert launched == [(8, ["trace", QWEN3, "--profile.num_steps=2"])]
    assert trained == []


def test_a_rank_of_torchrun_trains(
    monkeypatch: pytest.MonkeyPatch, trained: list[Recipe], launched: list[tuple[int, list[str]]]
) -> None:
    monkeypatch.setenv("WORLD_SIZE", "8")
    assert cli.main(["train", QWEN3]) == 0
    assert launched == [] and len(trained) == 1


def test_help_names_the_ways_in(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as leaving:
        cli.main(["-h"])
    assert leaving.value.code == 0
    page = capsys.readouterr().out
    assert "tune" in page and "--train.steps=50" in page and "--explain" in page and "torchrun" in page


def test_what_a_run_imports_is_never_looked_through_for_garbage(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torch", ModuleType("torch"))
    with cli._imports_stay():
        assert gc.isenabled(), "who has torch already may have garbage of their own"
    monkeypatch.delitem(sys.modules, "torch")
    frozen = gc.get_freeze_count()
    try:
        with cli._imports_stay():
            assert not gc.isenabled()
        assert gc.isenabled() and gc.get_freeze_count() > frozen
    finally:
        gc.unfreeze()
