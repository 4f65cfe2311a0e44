"""Runs whose optimizer states rest on the host have the bits of others, and resume each other."""

from pathlib import Path

import pytest
import torch

pytestmark = pytest.mark.slow

RUN = ("--train.steps=4", "--optim.decay_steps=0", "--checkpoint.every_steps=2", "--checkpoint.keep_latest=0")
STATES = ("--precision.compute=bf16", "--precision.master=fp32_split", "--optim.kind=fused_adamw")


@pytest.mark.few("1")
@pytest.mark.parametrize("more", [(), ("--precision.moments=fp8",)], ids=len)
def test_parked_states_train_and_resume_as_others(tiny, tmp_path: Path, more: tuple[str, ...]) -> None:
    plain, parked = tiny(*RUN, *STATES, *more), tiny(*RUN, *STATES, *more, "--memory.park=states")
    assert plain.train() == parked.train() == 0
    runs = [parked]
    for number, (run, park) in enumerate([(parked, "states"), (plain, "moments"), (parked, "none")]):
        resumed = run.copy(tmp_path / str(number), last_step=2)
        assert resumed.train(f"--memory.park={park}", "--checkpoint.is_async=true") == 0
        runs.append(resumed)
    expected = plain.checkpoint(4)
    for run in runs:
        assert run.trace == plain.trace
        state = run.checkpoint(4)
        assert state.keys() == expected.keys()
        for name, value in expected.items():
            is_tensor = isinstance(value, torch.Tensor)
            assert torch.equal(state[name], value) if is_tensor else state[name] == value, name


@pytest.mark.few()
def test_ranks_park_their_shards(ranks, tiny) -> None:
    words = (*RUN, *STATES, "--parallel.ep=2", "--parallel.dispatcher=alltoall", "--train.micro_batch_sequences=1")
    plain, parked = tiny(*words), tiny(*words, "--memory.park=states")
    for run in (plain, parked):
        run.on(ranks, 2)
    assert parked.column("loss") == plain.column("loss")
    assert all(
        torch.equal(value, plain.checkpoint(4)[name]) for name, value in parked.checkpoint(4).items() if "exp" in name
    )
