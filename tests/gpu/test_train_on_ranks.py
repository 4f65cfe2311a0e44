"""Runs follow each other in the same processes, through the command line's door. Needs no GPU."""

import gc
import json
import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

TINY = Path(__file__).parents[1] / "training" / "tiny.toml"
EXIT_BAD_RECIPE = 2
LAYOUTS = {
    "alltoall": ("--parallel.ep=2", "--parallel.dispatcher=alltoall"),
    "replicas": ("--parallel.dp_replicate=2",),
}


def words(folder: Path, *overrides: str) -> list[str]:
    sizes = ("--train.steps=4", "--train.micro_batch_sequences=1")
    return ["train", str(TINY), f"--run.folder={folder}", *sizes, *overrides]


def losses(folder: Path) -> list[float]:
    records = map(json.loads, (folder / "metrics.jsonl").read_text().splitlines())
    return [record["loss"] for record in records if "loss" in record]


def state_of_process() -> tuple[Any, ...]:
    """What a run may find of those before it: which process this is, and what they changed there."""
    handlers = [signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)]
    is_deterministic = torch.are_deterministic_algorithms_enabled()
    return os.getpid(), sorted(os.environ), handlers, gc.isenabled(), is_deterministic


def num_descriptors() -> int:
    """Of process groups, above all: a run that left its own behind would leave dozens."""
    return len(os.listdir("/proc/self/fd"))


def test_runs_follow_each_other_in_the_same_processes(
    tmp_path: Path, ranks: Callable[..., list[Any]], train_on_ranks: Callable[..., list[int]]
) -> None:
    assert train_on_ranks(1, words(tmp_path / "alone")) == [0]
    before, descriptors = ranks(2, state_of_process), ranks(2, num_descriptors)
    for name in (*LAYOUTS, "alltoall"):
        folder = tmp_path / f"{name}-{len(list(tmp_path.iterdir()))}"
        assert train_on_ranks(2, words(folder, *LAYOUTS[name])) == [0, 0]
        torch.testing.assert_close(losses(folder), losses(tmp_path / "alone"), rtol=1e-5, atol=1e-5)
    assert ranks(2, state_of_process) == before
    # a few are closed by threads of gloo, in their own time
    assert all(now < then + 10 for now, then in zip(ranks(2, num_descriptors), descriptors, strict=True))


def test_a_refused_recipe_is_an_exit_code_and_the_next_one_runs(
    tmp_path: Path, ranks: Callable[..., list[Any]], train_on_ranks: Callable[..., list[int]]
) -> None:
    before = ranks(2, state_of_process)
    nothing = ("--data.source=text", "--data.path=nowhere/*", "--model.vocab_size=256")
    for refused in (nothing, ("--parallel.ep=3",)):  # by the ranks together, and before they are
        assert train_on_ranks(2, words(tmp_path / "refused", *refused)) == [EXIT_BAD_RECIPE] * 2
    assert train_on_ranks(2, words(tmp_path / "good")) == [0, 0]
    assert len(losses(tmp_path / "good")) == 4
    assert ranks(2, state_of_process) == before
