"""A diverged run stops, says why, and leaves the checkpoints from before."""

import logging
import signal

import pytest
import torch

from titan_moe.train.step import TrainStep

pytestmark = pytest.mark.slow

DIVERGING = ("--optim.lr=1e6", "--optim.warmup_steps=0")


def train_to_failure(run, *words: str) -> None:
    with pytest.raises(SystemExit) as ended:
        run.train(*words)
    assert ended.value.code == 1


def skipped_steps(run) -> list[int]:
    """The steps that were skipped, of a run that logs every step."""
    counts = [(record["step"], record["skipped_steps"]) for record in run.records]
    return [step for (_, before), (step, after) in zip(counts, counts[1:], strict=False) if after > before]


def test_a_diverged_run_stops_and_keeps_its_checkpoints(tiny, caplog: pytest.LogCaptureFixture) -> None:
    run = tiny("--train.max_skipped_in_row=5")
    assert run.train("--train.steps=6", "--checkpoint.every_steps=3") == 0
    train_to_failure(run, *DIVERGING, "--train.steps=60", "--checkpoint.every_steps=1")
    skipped = skipped_steps(run)
    assert len(skipped) == 5 and skipped[-1] == run.column("step")[-1] < 60
    assert run.saved_steps == [skipped[0] - 2, skipped[0] - 1], "neither a save nor a removal after the last update"
    (error,) = [record.getMessage() for record in caplog.records if record.levelno == logging.ERROR]
    assert f"ended at step {skipped[-1]}: the gradients of the last 5 steps were not finite" in error
    assert all(word in error for word in ("optim.lr", "optim.warmup_steps", "checkpoint.load_from"))
    assert f"recipe.toml continues after step {skipped[0] - 1}, its newest checkpoint" in error


def test_the_limit_is_twenty_steps_unless_the_recipe_says_otherwise(tiny) -> None:
    run = tiny(*DIVERGING, "--train.steps=30")
    train_to_failure(run)
    assert len(skipped_steps(run)) == 20
    patient = tiny(*DIVERGING, "--train.steps=30", "--train.max_skipped_in_row=0")
    train_to_failure(patient)
    assert patient.column("step")[-1] == 30


def test_a_diverged_run_stops_soon_where_few_steps_are_logged(tiny) -> None:
    run = tiny(*DIVERGING, "--train.steps=200", "--metrics.every_steps=1000", "--train.max_skipped_in_row=4")
    train_to_failure(run)
    assert run.column("step") == [1], "the last step that is logged is the first"
    whole = tiny(*DIVERGING, "--train.steps=200", "--train.max_skipped_in_row=4")
    train_to_failure(whole)
    assert whole.column("step")[-1] < 200


def test_a_run_that_ends_in_a_skipped_step_is_not_saved(tiny, caplog: pytest.LogCaptureFixture) -> None:
    run = tiny(*DIVERGING, "--train.steps=10", "--checkpoint.every_steps=10")
    train_to_failure(run)
    assert skipped_steps(run)[-1] == 10 and run.saved_steps == []
    assert "recipe.toml starts again" in caplog.text and "the model is in" not in caplog.text


def test_a_run_stopped_after_a_skipped_step_is_not_saved(tiny) -> None:
    run = tiny(*DIVERGING, "--train.steps=100000", "--train.max_skipped_in_row=0")
    process = run.start_signalled(30, signal.SIGTERM, 0.0)
    stderr = process.communicate(timeout=120)[1]
    assert process.returncode == 1 and run.saved_steps == []
    assert "stopped by SIGTERM after step" in stderr and "nothing was updated or saved" in stderr


def test_a_diverged_run_ends_on_all_ranks(tiny) -> None:
    run = tiny(*DIVERGING, "--train.steps=100", "--train.max_skipped_in_row=3", "--checkpoint.every_steps=1")
    process = run.start("--nproc", "2", "--parallel.ep=2", "--parallel.dispatcher=alltoall")
    stderr = process.communicate(timeout=120)[1]
    assert process.returncode == 1, stderr
    _, *last = [line for line in stderr.splitlines() if "the gradients of the last 3 steps were not finite" in line]
    assert last == [stderr.splitlines()[-1]] and " failed first: " in last[0], "the launcher repeats it at the end"
    assert "Traceback" not in stderr
    assert run.saved_steps[-1] == skipped_steps(run)[0] - 1


@pytest.mark.parametrize(
    ("steps", "expected"),
    [
        (["skip", "skip", "update", "skip"], [1, 2, 0, 1]),
        (["skip", "overflow", "skip", "overflow", "update"], [1, 1, 2, 2, 0]),
        (["skip", "spike", "skip"], [1, 0, 1]),
    ],
)
def test_a_step_that_overflowed_does_not_count(steps: list[str], expected: list[int]) -> None:
    step = TrainStep.__new__(TrainStep)
    step.num_skipped, step.num_skipped_in_row, step.num_spikes = torch.zeros(3, dtype=torch.int64).unbind()
    counts = []
    for what in steps:
        norm = torch.tensor(1.0 if what in ("update", "spike") else float("nan"))
        step._count_skips(norm, torch.tensor(what == "spike"), torch.tensor(what == "overflow"))
        counts.append(int(step.num_skipped_in_row))
    assert counts == expected and int(step.num_skipped) == steps.count("skip")


def test_a_loss_that_explodes_is_warned_of_once(tiny, caplog: pytest.LogCaptureFixture) -> None:
    run = tiny("--train.steps=20", "--optim.lr=3", "--optim.warmup_steps=0", "--optim.decay_steps=0")
    assert run.train() == 0
    assert max(run.column("loss")) > 10 and run.column("skipped_steps")[-1] == 0
    (warning,) = [message for message in caplog.messages if "exploded" in message]
    assert "the larger of ln(vocab_size) and the first loss of the run" in warning and "optim.lr" in warning
