"""A pipeline's run by the command line: killed and resumed bit for bit, and on one rank within rounding."""

import os
import random
import signal
import time
from pathlib import Path

import pytest
import torch
from support.runs import Started

pytestmark = pytest.mark.slow

STEPS = 15
RUN = (
    "--model.num_layers=4",
    f"--train.steps={STEPS}",
    "--train.micro_batch_sequences=1",
    "--checkpoint.every_steps=3",
    "--checkpoint.keep_latest=0",
    "--validation.every_steps=5",
    "--validation.num_sequences=4",
)
PP2 = "--parallel.pp=2"
PAIRS = (
    "--parallel.pp_schedule=interleaved_1f1b",
    "--parallel.vpp=2",
    "--parallel.accumulate_unsharded=true",
    "--parallel.dispatcher=alltoall",
    "--parallel.overlap=microbatch",
)


def ranks_of(launcher: Started) -> list[int]:
    """In the order in which it has started them."""
    return [int(pid) for pid in Path(f"/proc/{launcher.pid}/task/{launcher.pid}/children").read_text().split()]


def kill_launcher(launcher: Started) -> None:
    """Kill it, and wait for the end of its ranks: until then they hold the run folder."""
    ranks = ranks_of(launcher)
    launcher.kill()
    launcher.wait()
    end = time.monotonic() + 120
    while any(Path(f"/proc/{pid}").exists() for pid in ranks):
        assert time.monotonic() < end, "ranks end with their launcher"
        time.sleep(0.01)


def kill_rank(launcher: Started, rank: int) -> str:
    """Kill one rank of a run; what its launcher says when it has ended the others."""
    ranks = ranks_of(launcher)
    os.kill(ranks[rank], signal.SIGKILL)
    said = launcher.communicate(timeout=120)[1]
    assert launcher.returncode == 128 + signal.SIGKILL, said
    assert not any(Path(f"/proc/{pid}").exists() for pid in ranks), "none goes on without the others"
    return said


@pytest.mark.few()
@pytest.mark.parametrize(
    ("schedule", "killed_rank"),
    [pytest.param((), 1, id="1f1b-rank"), pytest.param(PAIRS, None, id="interleaved_pairs-launcher")],
)
def test_pipeline_resumes_after_a_kill_bit_for_bit(
    ranks, tiny, schedule: tuple[str, ...], killed_rank: int | None
) -> None:
    """Only the run that is killed is launched: ranks of the pool have done their imports."""
    straight, killed, whole = tiny(*RUN), tiny(*RUN), tiny(*RUN)
    straight.on(ranks, 2, PP2, *schedule)
    step = random.randrange(4, STEPS - 5)
    print(f"killed after step {step}")
    process = killed.start("--nproc", "2", PP2, *schedule)
    while process.poll() is None and len(killed.column("loss")) < step:
        time.sleep(0.005)
    if killed_rank is None:
        kill_launcher(process)
    else:
        assert f"titan-moe: rank {killed_rank} was ended by SIGKILL" in kill_rank(process, killed_rank)
    assert "continuing after step" in killed.on(ranks, 2, PP2, *schedule)
    assert killed.trace == straight.trace and killed.column("step")[-1] == STEPS
    expected, state = straight.checkpoint(STEPS), killed.checkpoint(STEPS)
    assert state.keys() == expected.keys()
    for name, value in expected.items():
        assert torch.equal(state[name], value) if isinstance(value, torch.Tensor) else state[name] == value, name

    assert whole.train() == 0
    for name in ("loss", "validation_loss", "grad_norm"):
        torch.testing.assert_close(straight.column(name), whole.column(name), rtol=1e-4, atol=1e-5)
    assert straight.checkpoint(STEPS).keys() == whole.checkpoint(STEPS).keys()
