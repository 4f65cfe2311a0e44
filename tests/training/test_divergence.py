"""A diverged run stops, says why, and leaves the checkpoints from before."""

import logging
import os
import signal
from collections.abc import Callable, Collection

import pytest
import torch

from titan_moe.metrics.meter import Meter
from titan_moe.training import trainer
from titan_moe.training.build import assemble

pytestmark = pytest.mark.slow

DIVERGING = ("--optim.lr=1e6", "--optim.warmup_steps=0")


def train_to_failure(run, *words: str) -> None:
    with pytest.raises(SystemExit) as ended:
        run.train(*words)
    assert ended.value.code == 1


@pytest.fixture
def nan_at(monkeypatch: pytest.MonkeyPatch) -> Callable[[Collection[int]], None]:
    """Makes the loss of some steps NaN."""

    def make(steps: Collection[int]) -> None:
        def assembled(recipe, device):
            assembly = assemble(recipe, device)
            step, runner = assembly.step.step, assembly.step
            forward_backward = step.forward_backward

            def with_nan(batch, scale):
                number = runner.num_steps_before + runner.num_steps
                return forward_backward(batch, scale * (float("nan") if number in steps else 1.0))

            step.forward_backward = with_nan
            return assembly

        monkeypatch.setattr(trainer, "assemble", assembled)

    return make


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
    first = skipped[0]
    assert run.saved_steps == [first - 2, first - 1, first + 2, first + 3], (
        "two from before, and two of the same weights"
    )
    (error,) = [record.getMessage() for record in caplog.records if record.levelno == logging.ERROR]
    assert f"ended at step {skipped[-1]}: the gradients of the last 5 steps were not finite" in error
    assert "so nothing was updated, and this step is not saved" in error
    assert all(word in error for word in ("optim.lr", "optim.warmup_steps", "checkpoint.load_from"))
    assert f"continues after step {first + 3}, its newest checkpoint, with the weights of step {first - 1}" in error


@pytest.mark.parametrize("is_async", [False, True])
def test_a_last_step_that_is_skipped_is_saved(tiny, nan_at, is_async: bool, caplog: pytest.LogCaptureFixture) -> None:
    """The checkpoint has the weights and moments of the last update, and the older ones stay."""
    nan_at([6])
    run = tiny("--train.steps=6", "--checkpoint.every_steps=1", f"--checkpoint.is_async={str(is_async).lower()}")
    assert run.train() == 0
    assert skipped_steps(run) == [6] and run.saved_steps == [4, 5, 6]
    assert "step 6 is saved with the weights of step 5: its gradients were not finite" in caplog.text
    before, after = run.checkpoint(5), run.checkpoint(6)
    kept = [name for name in before if name.startswith(("/layers", "/embed", "/head", "/optimizer"))]
    assert len(kept) > 20 and all(torch.equal(before[name], after[name]) for name in kept)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGUSR1])
def test_a_run_stopped_at_a_skipped_step_is_saved_and_goes_on(
    tiny, nan_at, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    log = Meter.log

    def log_and_signal(self, step: int, **values):
        if step == 5:
            os.kill(os.getpid(), number)
        return log(self, step, **values)

    nan_at([6])
    whole, run = tiny("--train.steps=10"), tiny("--train.steps=10")
    assert whole.train() == 0
    with monkeypatch.context() as patched:
        patched.setattr(Meter, "log", log_and_signal)
        assert run.train() == 0
    assert run.column("step")[-1] == 6 and run.saved_steps == [6]
    assert run.train() == 0
    assert run.column("loss")[6:] == whole.column("loss")[6:]


def test_nan_in_every_second_step_leaves_checkpoints(tiny, nan_at) -> None:
    nan_at(range(2, 41, 2))
    run = tiny("--train.steps=40", "--checkpoint.every_steps=2")
    assert run.train() == 0 and len(skipped_steps(run)) == 20
    assert run.saved_steps == [36, 38, 40], "two that an update has followed, and the newest"


def test_skips_in_a_row_are_counted_over_a_resume(tiny, nan_at) -> None:
    """A resumed run ends where the uninterrupted one does, and keeps what it would."""
    nan_at([5, 6, 7, 8, 9])
    words = ("--train.max_skipped_in_row=4", "--checkpoint.every_steps=1", "--optim.decay_steps=0")
    whole, parted = tiny(*words), tiny(*words)
    train_to_failure(whole, "--train.steps=20")
    assert parted.train("--train.steps=6") == 0
    train_to_failure(parted, "--train.steps=20")
    assert whole.column("step")[-1] == parted.column("step")[-1] == 8
    assert whole.saved_steps == parted.saved_steps == [3, 4, 6, 7]


def test_the_limit_is_twenty_steps_unless_the_recipe_says_otherwise(tiny) -> None:
    run = tiny(*DIVERGING, "--train.steps=30")
    train_to_failure(run)
    assert len(skipped_steps(run)) == 20
    patient = tiny(*DIVERGING, "--train.steps=30", "--train.max_skipped_in_row=0")
    assert patient.train() == 0 and patient.column("step")[-1] == 30 and patient.saved_steps == [30]


def test_a_diverged_run_stops_soon_where_few_steps_are_logged(tiny) -> None:
    run = tiny(*DIVERGING, "--train.steps=200", "--metrics.every_steps=1000", "--train.max_skipped_in_row=4")
    train_to_failure(run)
    assert run.column("step") == [1], "the last step that is logged is the first"
    whole = tiny(*DIVERGING, "--train.steps=200", "--train.max_skipped_in_row=4")
    train_to_failure(whole)
    assert whole.column("step")[-1] < 200


def test_a_diverged_run_ends_on_all_ranks(ranks, tiny) -> None:
    run = tiny(*DIVERGING, "--train.steps=100", "--train.max_skipped_in_row=3", "--checkpoint.every_steps=1")
    said = run.on(ranks, 2, "--parallel.ep=2", "--parallel.dispatcher=alltoall", exit_code=1)
    assert said.count("the gradients of the last 3 steps were not finite") == 1
    first = skipped_steps(run)[0]
    assert run.saved_steps == [first - 2, first - 1, first, first + 1]


def test_a_loss_that_explodes_is_warned_of_once(tiny, caplog: pytest.LogCaptureFixture) -> None:
    run = tiny("--train.steps=20", "--optim.lr=3", "--optim.warmup_steps=0", "--optim.decay_steps=0")
    assert run.train() == 0
    assert max(run.column("loss")) > 10 and run.column("skipped_steps")[-1] == 0
    (warning,) = [message for message in caplog.messages if "exploded" in message]
    assert "the larger of ln(vocab_size) and the first loss of the run" in warning and "optim.lr" in warning
