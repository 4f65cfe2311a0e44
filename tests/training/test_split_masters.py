"""Runs with fp32 masters in two parts beside runs with fp32 masters; gradients in a dtype of their own."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

pytestmark = pytest.mark.slow

RUN = ("--train.steps=4", "--optim.decay_steps=0", "--checkpoint.every_steps=1", "--checkpoint.keep_latest=0")
BF16 = ("--precision.compute=bf16", "--optim.kind=fused_adamw")
SPLIT, WHOLE = "--precision.master=fp32_split", "--precision.master=fp32"
A2A = "--parallel.dispatcher=alltoall"
ONCE = ("--parallel.accumulate_unsharded=true",)
AT_REST = "--optim.lr=1e-30"
"""Too low for weights to change."""


def weights_of(run: Any, step: int) -> dict[str, Tensor]:
    return {
        name: value
        for name, value in run.checkpoint(step).items()
        if isinstance(value, Tensor) and "optimizer" not in name and "expert_bias" not in name
    }


def assert_same(state: dict[str, Any], expected: dict[str, Any]) -> None:
    assert state.keys() == expected.keys()
    for name, value in expected.items():
        assert torch.equal(state[name], value) if isinstance(value, Tensor) else state[name] == value, name


def assert_close(own: Any, other: Any) -> None:
    """A master between two weights may be rounded in another way, which is one of 65,536."""
    torch.testing.assert_close(torch.tensor(own.column("loss")), torch.tensor(other.column("loss")), rtol=5e-3, atol=0)


@pytest.mark.few("2")
@pytest.mark.parametrize(
    "more", [(), ("--optim.kind=muon",), ("--precision.moments=fp8", "--model.embeddings_are_tied=true")], ids=len
)
def test_split_masters_train_and_resume_as_fp32_ones_do(tiny, tmp_path: Path, more: tuple[str, ...]) -> None:
    whole, split = tiny(*RUN, *BF16, *more), tiny(*RUN, *BF16, *more, SPLIT)
    assert whole.train() == split.train() == 0
    assert_same(split.checkpoint(1), whole.checkpoint(1))
    assert_close(split, whole)
    assert {value.dtype for value in weights_of(split, 4).values()} == {torch.float32}

    resumed = split.copy(tmp_path / "resumed", last_step=2)
    assert resumed.train("--checkpoint.is_async=true") == 0
    assert resumed.trace == split.trace
    assert_same(resumed.checkpoint(4), split.checkpoint(4))

    for number, (run, master) in enumerate([(split, WHOLE), (whole, SPLIT)]):
        changed = run.copy(tmp_path / str(number), last_step=2)
        assert changed.train(master, AT_REST) == 0
        assert_same(weights_of(changed, 4), weights_of(run, 2))
        assert changed.column("loss")[2] == pytest.approx(run.column("loss")[2], rel=5e-3)


@pytest.mark.few("options0", "options2")
@pytest.mark.parametrize("options", [(SPLIT,), (WHOLE,), ("--precision.master=bf16", "--precision.reduce=bf16")])
def test_gradients_have_a_dtype_of_their_own(tiny, options: tuple[str, ...]) -> None:
    """Sums in bf16 train nearly as sums in fp32 do."""
    runs = [tiny(*RUN, *BF16, *options, f"--precision.gradients={dtype}") for dtype in ("bf16", "fp32")]
    assert [run.train() for run in runs] == [0, 0]
    losses = [torch.tensor(run.column("loss")) for run in runs]
    assert not torch.equal(*losses)
    torch.testing.assert_close(*losses, rtol=5e-3, atol=0)


@pytest.mark.few("edp", "zbv")
@pytest.mark.parametrize(
    ("num_ranks", "layout"),
    [
        (2, ("--parallel.ep=2", A2A)),  # unsharded experts
        (4, ("--parallel.ep=2", A2A, *ONCE)),
        (4, ("--parallel.ep=2", A2A, "--parallel.tp=2", "--model.attention.num_kv_heads=2")),
        (4, ("--parallel.pp=2", "--model.embeddings_are_tied=true", "--parallel.pp_schedule=1f1b")),
        (2, ("--parallel.pp=2", "--model.num_layers=4", "--parallel.vpp=2", *ONCE, "--parallel.pp_schedule=zbv")),
        (2, ("--parallel.ep=2", A2A, *ONCE, "--parallel.overlap=microbatch")),
    ],
    ids=["ep", "edp", "tp", "pp", "zbv", "overlap"],
)
def test_ranks_have_the_masters_of_one_process(ranks: Any, tiny, num_ranks: int, layout: tuple[str, ...]) -> None:
    """After a step the masters of a run with fp32 masters on the same ranks, bit for bit."""
    words = ("--train.steps=1", *BF16, "--train.micro_batch_sequences=1", "--train.global_batch_sequences=8", *layout)
    split, whole = (tiny(*words, master) for master in (SPLIT, WHOLE))
    for run in (split, whole):
        run.on(ranks, num_ranks)
    assert split.column("loss") == whole.column("loss") and split.column("grad_norm") == whole.column("grad_norm")
    assert_same(split.checkpoint(1), whole.checkpoint(1))
