"""A pipeline's run by the command line: killed and resumed bit for bit, and on one rank within rounding."""

import random
import subprocess
import time

import pytest
import torch

pytestmark = pytest.mark.slow

STEPS = 24
RUN = (
    "--model.num_layers=4",
    f"--train.steps={STEPS}",
    "--train.micro_batch_sequences=1",
    "--checkpoint.every_steps=3",
    "--checkpoint.keep_latest=0",
    "--validation.every_steps=12",
    "--validation.num_sequences=4",
)
PP2 = ("--nproc", "2", "--parallel.pp=2")
PAIRS = (
    "--parallel.pp_schedule=interleaved_1f1b",
    "--parallel.vpp=2",
    "--parallel.accumulate_unsharded=true",
    "--parallel.dispatcher=alltoall",
    "--parallel.overlap=microbatch",
)


def finish(process: subprocess.Popen[str]) -> str:
    """Wait for the end; returns the output."""
    said = process.communicate(timeout=120)[1]
    assert process.returncode == 0, said
    return said


@pytest.mark.parametrize("schedule", [(), PAIRS], ids=["1f1b", "interleaved_pairs"])
def test_pipeline_resumes_after_a_kill_bit_for_bit(tiny, schedule: tuple[str, ...]) -> None:
    straight, killed, whole = tiny(*RUN), tiny(*RUN), tiny(*RUN)
    finish(straight.start(*PP2, *schedule))
    step = random.randrange(5, STEPS - 5)
    print(f"killed after step {step}")
    process = killed.start(*PP2, *schedule)
    while process.poll() is None and len(killed.column("loss")) < step:
        time.sleep(0.005)
    process.kill()
    process.wait()
    assert "continuing after step" in finish(killed.start(*PP2, *schedule))
    assert killed.trace == straight.trace and killed.column("step")[-1] == STEPS
    expected, state = straight.checkpoint(STEPS), killed.checkpoint(STEPS)
    assert state.keys() == expected.keys()
    for name, value in expected.items():
        assert torch.equal(state[name], value) if isinstance(value, torch.Tensor) else state[name] == value, name

    assert whole.train() == 0
    for name in ("loss", "validation_loss", "grad_norm"):
        torch.testing.assert_close(straight.column(name), whole.column(name), rtol=1e-4, atol=1e-5)
    assert straight.checkpoint(STEPS).keys() == whole.checkpoint(STEPS).keys()
