"""A run resumes after any end: bit for bit on a CPU, on another layout within rounding."""

import logging
import random
import signal
import subprocess
import time
from pathlib import Path
from threading import Event

import pytest
import torch
from torch.distributed.checkpoint.filesystem import FileSystemWriter

from titan_moe import cli
from titan_moe.checkpoint.folders import CheckpointFolders
from titan_moe.checkpoint.manifest import read_manifest
from titan_moe.training.trainer import Trainer

pytestmark = pytest.mark.slow

STEPS = 60
SAVING = ("--checkpoint.every_steps=5", "--checkpoint.keep_latest=0", "--validation.every_steps=20")
SCHEDULES = (  # the batch grows at step 26
    "--train.global_batch_sequences=8",
    "--train.batch_schedule=[{until_tokens=3200,global_batch_sequences=4}]",
    "--optim.decay_ends=[30]",
    "--optim.ema_decay=0.9",
    "--model.moe.input_jitter=0.1",
    '--optim.groups=[{parameters="*.router.weight",lr_scale=0.5,weight_decay_scale=0}]',
)
RUN = (f"--train.steps={STEPS}", "--validation.num_sequences=4", *SCHEDULES, *SAVING)


def finish(process: subprocess.Popen[str], exit_code: int = 0) -> str:
    """Wait for the end; returns the output."""
    said = process.communicate(timeout=120)[1]
    assert process.returncode == exit_code, said
    return said


@pytest.fixture
def rng() -> random.Random:
    """Random numbers whose seed a failed test prints."""
    seed = random.randrange(10**6)
    print(f"rng has the seed {seed}")
    return random.Random(seed)


def assert_same_state(state: dict, expected: dict) -> None:
    assert state.keys() == expected.keys()
    for name, value in expected.items():
        if isinstance(value, torch.Tensor):
            assert torch.equal(state[name], value), name
        else:
            assert state[name] == value, name


@pytest.fixture(scope="module")
def straight(make_run):
    """An uninterrupted run."""
    run = make_run(*RUN)
    assert run.train() == 0
    assert run.column("step") == sorted([*range(1, STEPS + 1), *range(20, STEPS + 1, 20)])
    assert run.saved_steps == list(range(5, STEPS + 1, 5))
    bias = next(value for name, value in run.checkpoint(STEPS).items() if name.endswith("expert_bias_E"))
    assert bias.abs().max() > 0, "the balancing bias must have moved for the comparisons to mean something"
    return run


@pytest.mark.few("async")
@pytest.mark.parametrize(
    ("saves", "kills"),
    [
        pytest.param((), [(1, 25), (25, 45)], id="sync"),  # the first may die before a checkpoint
        pytest.param(("--checkpoint.is_async=true",), [(16, 45)], id="async"),
    ],
)
def test_resume_after_kills_at_random_steps(
    tiny,
    straight,
    saves: tuple[str, ...],
    kills: list[tuple[int, int]],
    rng: random.Random,
    caplog: pytest.LogCaptureFixture,
) -> None:
    run = tiny(*RUN, *saves)
    for step in (rng.randrange(*steps) for steps in kills):
        finish(run.start_signalled(step, signal.SIGKILL, rng.uniform(0, 0.03)), -signal.SIGKILL)
    caplog.set_level(logging.INFO, logger="titan_moe")
    assert run.train() == 0
    assert "continuing after step" in caplog.text
    assert run.trace == straight.trace
    assert run.saved_steps == straight.saved_steps
    assert_same_state(run.checkpoint(STEPS), straight.checkpoint(STEPS))


@pytest.mark.few("SIGINT")
@pytest.mark.parametrize(("number", "exit_code"), [(signal.SIGINT, 130), (signal.SIGHUP, 0)], ids=["SIGINT", "SIGHUP"])
def test_resume_of_a_stopped_run(
    tiny,
    straight,
    number: signal.Signals,
    exit_code: int,
    rng: random.Random,
    caplog: pytest.LogCaptureFixture,
) -> None:
    run = tiny(*RUN, "--checkpoint.every_steps=0")
    said = finish(run.start_signalled(rng.randrange(1, 40), number, rng.uniform(0, 0.03)), exit_code)
    (saved,) = run.saved_steps
    assert run.column("loss")[saved - 1 :] == run.column("loss")[-1:], "the last step is the saved one"
    assert f"stopped by {number.name} after step {saved}; to go on: titan-moe train {run.folder}/recipe.toml" in said
    caplog.set_level(logging.INFO, logger="titan_moe")
    assert run.again() == 0
    assert f"continuing after step {saved}" in caplog.text
    assert run.trace == straight.trace


def test_a_checkpoint_has_the_validation_loss_of_its_step(straight) -> None:
    """Validated at every 20th step, saved at every 5th."""
    folders = CheckpointFolders(straight.folder / "checkpoints")
    manifests = {step: read_manifest(folders.path(step)) for step in (15, 20, 40)}
    losses = dict(zip((20, 40), straight.column("validation_loss"), strict=False))
    assert {step: manifest.validation_loss for step, manifest in manifests.items()} == {15: None} | losses


@pytest.mark.few("--parallel.ep=2 --parallel.dispatcher=alltoall")
@pytest.mark.parametrize("layout", ["--parallel.ep=2 --parallel.dispatcher=alltoall", "--parallel.etp=2"])
def test_resume_with_two_ranks_and_expert_parallelism(ranks, tmp_path: Path, straight, layout: str) -> None:
    run = straight.copy(tmp_path / "two", last_step=40)
    said = run.on(ranks, 2, *layout.split())
    assert "continuing after step 40" in said and "2 x cpu" in said
    assert run.column("step") == straight.column("step")
    assert run.trace[:40] == straight.trace[:40]
    for name in ("loss", "validation_loss"):
        torch.testing.assert_close(run.column(name), straight.column(name), rtol=1e-5, atol=1e-5)
    assert run.column("lr") == straight.column("lr")


def test_resume_after_sigterm_to_torchrun(tiny) -> None:
    run = tiny("--train.steps=100000", *SAVING)
    process = run.start("--nproc", "2")
    while process.poll() is None and len(run.column("loss")) < 6:
        time.sleep(0.005)
    process.terminate()
    said = finish(process, 128 + signal.SIGTERM)
    assert "stopped by SIGTERM after step" in said and "Traceback" not in said
    assert run.saved_steps[-1] == run.column("step")[-1]


def test_resume_leaves_a_finished_run(tiny, caplog: pytest.LogCaptureFixture) -> None:
    run = tiny("--train.steps=6", "--checkpoint.every_steps=3", "--checkpoint.keep_latest=0")
    assert run.train() == 0

    def left() -> dict[str, tuple[int, bytes]]:
        files = (path for path in run.folder.rglob("*") if path.is_file())
        return {str(path): (path.stat().st_mtime_ns, path.read_bytes()) for path in files}

    before = left()
    caplog.set_level(logging.INFO, logger="titan_moe")
    for steps in (6, 4):
        assert run.again(f"--train.steps={steps}") == 0
        assert any(f"{run.folder} is finished after step 6; a larger train.steps" in said for said in caplog.messages)
        caplog.clear()
        assert left() == before


def test_resume_of_a_folder_that_was_moved(tiny, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "first").mkdir()
    (tmp_path / "second").mkdir()
    monkeypatch.chdir(tmp_path / "first")
    run = tiny("--run.folder=runs/one", "--optim.decay_steps=0")
    assert run.train("--train.steps=4") == 0
    run.folder = (tmp_path / "first" / "runs" / "one").rename(tmp_path / "moved")
    monkeypatch.chdir(tmp_path / "second")
    assert run.again("--train.steps=6") == 0
    assert run.column("step") == [1, 2, 3, 4, 5, 6] and run.saved_steps == [4, 6]
    monkeypatch.chdir(run.folder)
    assert cli.main(["train", "recipe.toml", "--train.steps=7"]) == 0
    assert not [*(tmp_path / "second").iterdir(), *(tmp_path / "first" / "runs").iterdir()]
    whole = tiny("--train.steps=7", "--optim.decay_steps=0")
    assert whole.train() == 0 and run.trace == whole.trace


def test_resume_with_other_settings_and_more_steps(tiny) -> None:
    run = tiny("--train.steps=6", "--checkpoint.every_steps=3", "--optim.decay_steps=0")
    assert run.train() == 0
    before = run.trace
    assert run.again("--train.steps=12", "--metrics.every_steps=5", "--checkpoint.every_steps=4") == 0
    assert run.trace[: len(before)] == before
    assert run.column("step")[len(before) :] == [7, 10, 12]
    whole = tiny("--train.steps=12", "--optim.decay_steps=0")
    assert whole.train() == 0
    by_step = {record["step"]: record for record in whole.trace}
    assert run.trace == [by_step[record["step"]] for record in run.trace]


def test_resume_refuses_what_does_not_fit(tiny, capsys: pytest.CaptureFixture[str]) -> None:
    run = tiny("--train.steps=4", "--checkpoint.every_steps=2")
    assert run.train() == 0
    recipe = (run.folder / "recipe.toml").read_text()
    for override, expected in {
        "--model.hidden_size=48": "model.hidden_size = 48 (was 32)",
        "--train.seq_len_tokens=16": "train.seq_len_tokens = 16 (was 32)",
    }.items():
        assert run.again("--train.steps=8", override) == 2
        assert expected in capsys.readouterr().err
    assert (run.folder / "recipe.toml").read_text() == recipe
    assert run.again("--train.steps=8") == 0
    assert run.column("step")[-1] == 8


def test_resume_of_bf16_moments(tiny, tmp_path: Path) -> None:
    steps = ("--train.steps=8", "--optim.decay_steps=0", "--checkpoint.every_steps=4", "--checkpoint.keep_latest=0")
    ours = ("--optim.kind=fused_adamw", "--precision.moments=bf16")
    straight, torchs = tiny(*steps, *ours), tiny(*steps)
    assert straight.train() == torchs.train() == 0
    torch.testing.assert_close(straight.column("loss"), torchs.column("loss"), rtol=2e-3, atol=0)
    moments = [value for name, value in straight.checkpoint(8).items() if "exp_avg" in name]
    assert moments and {moment.dtype for moment in moments} == {torch.bfloat16}

    resumed = straight.copy(tmp_path / "resumed", last_step=4)
    assert resumed.train() == 0
    assert resumed.trace == straight.trace
    assert_same_state(resumed.checkpoint(8), straight.checkpoint(8))

    changed = torchs.copy(tmp_path / "changed", last_step=4)
    assert changed.train(*ours) == 0
    assert changed.trace[:5] == torchs.trace[:5], "the fifth step starts from the same weights"
    torch.testing.assert_close(changed.column("loss"), torchs.column("loss"), rtol=2e-3, atol=0)


def test_resume_of_8bit_moments(tiny, tmp_path: Path) -> None:
    steps = ("--train.steps=4", "--optim.decay_steps=0", "--checkpoint.every_steps=2", "--checkpoint.keep_latest=0")
    ours = ("--optim.kind=fused_adamw", "--precision.moments=fp8")
    straight, torchs = tiny(*steps, *ours), tiny(*steps)
    assert straight.train() == torchs.train() == 0
    torch.testing.assert_close(straight.column("loss"), torchs.column("loss"), rtol=5e-3, atol=0)
    assert {value.dtype for name, value in straight.checkpoint(4).items() if "exp_avg" in name} == {torch.float32}

    resumed = straight.copy(tmp_path / "resumed", last_step=2)
    assert resumed.train("--checkpoint.is_async=true") == 0
    assert resumed.trace == straight.trace
    assert_same_state(resumed.checkpoint(4), straight.checkpoint(4))

    changed = straight.copy(tmp_path / "changed", last_step=2)
    assert changed.train("--precision.moments=master", "--optim.kind=adamw") == 0
    assert changed.trace[:3] == straight.trace[:3], "the third step starts from the same weights"
    torch.testing.assert_close(changed.column("loss"), torchs.column("loss"), rtol=5e-3, atol=0)


def test_resume_from_weights_starts_another_run(tiny, capsys: pytest.CaptureFixture[str]) -> None:
    first, second = tiny("--train.steps=4", "--checkpoint.every_steps=2"), tiny("--train.steps=2")
    assert first.train() == 0
    weights = first.folder / "checkpoints" / "step-4"
    assert second.train(f"--checkpoint.load_from={weights}") == 0
    assert second.column("step") == [1, 2]
    assert second.column("loss")[0] < first.column("loss")[0] - 0.1
    assert tiny().train(f"--checkpoint.load_from={weights.parent}") == 2
    assert "step-2, step-4" in capsys.readouterr().err


def test_resume_without_a_manifest_refuses_another_model_or_order(tiny, capsys: pytest.CaptureFixture[str]) -> None:
    run = tiny("--train.steps=2", "--checkpoint.every_steps=2")
    assert run.train() == 0
    (run.folder / "checkpoints" / "step-2" / "manifest.json").unlink()
    for change, said in (
        ("--model.num_layers=1", "fit this run's model: only in the checkpoint: layers.1."),
        ("--model.embeddings_are_tied=true", "tied only in the model: embed.weight, head.weight; "),
        ("--run.seed=7", "set run.seed and data.is_shuffled back"),
    ):
        assert run.train("--train.steps=4", change) == 2
        assert said in capsys.readouterr().err
    assert run.saved_steps == [2] and run.train("--train.steps=4") == 0


def test_resume_from_a_checkpoint_saved_during_a_failure(tiny, monkeypatch: pytest.MonkeyPatch) -> None:
    failed, write, take_step = Event(), FileSystemWriter.write_data, Trainer._take_step

    def write_late(self, *args):
        failed.wait(60)
        return write(self, *args)

    def fail_late(self) -> None:
        if self.progress.step == 4:
            failed.set()
            raise ArithmeticError("at step 5")
        take_step(self)

    monkeypatch.setattr(FileSystemWriter, "write_data", write_late)
    monkeypatch.setattr(Trainer, "_take_step", fail_late)
    run = tiny("--train.steps=8", "--checkpoint.every_steps=3", "--checkpoint.is_async=true")
    with pytest.raises(ArithmeticError, match="at step 5"):
        run.train()
    assert CheckpointFolders(run.folder / "checkpoints").complete_steps() == [3]
