"""Runs of one tiny recipe by the command line, in this process or, where it is killed, in another."""

import io
import json
import logging
import os
import shutil
import socket
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

from support.forks import Forked
from titan_moe import cli

TINY = Path(__file__).parents[1] / "training" / "tiny.toml"
TORCHRUN_VARIABLES = ("WORLD_SIZE", "RANK", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
MEASURED = {"tokens_per_second_per_gpu", "tflops_per_gpu", "mfu", "step_ms", "memory_gib"}
"""What differs between two runs of one recipe."""
COMMAND = """
import sys
from titan_moe import cli
sys.exit(cli.main())
"""
FORK_RANKS = """
from support import forks
forks.fork_ranks()
"""
SIGNALLED = """
import os, sys, threading
from titan_moe import cli
from titan_moe.metrics.meter import Meter
step, number, delay_s = int(sys.argv.pop(1)), int(sys.argv.pop(1)), float(sys.argv.pop(1))
log = Meter.log
def log_and_signal(self, logged, **values):
    log(self, logged, **values)
    if logged == step:
        threading.Timer(delay_s, os.kill, (os.getpid(), number)).start()
Meter.log = log_and_signal
sys.exit(cli.main())
"""
"""A run that sends itself a signal: an observer could be too late on a busy machine."""
Started = subprocess.Popen[str] | Forked
HAS_GPUS = torch.cuda.is_available()
"""Runs are no forks there: GPUs do not survive one."""


class Run:
    """The tiny recipe with overrides of its own, in a run folder."""

    def __init__(self, folder: Path, *overrides: str) -> None:
        self.folder = folder
        self.words = ["train", str(TINY), f"--run.folder={folder}", *overrides]

    def train(self, *words: str) -> int:
        """Train here and return the exit code."""
        return cli.main([*self.words, *words])

    def again(self, *words: str) -> int:
        """Resume with the recipe of the run folder."""
        return cli.main(["train", str(self.folder / "recipe.toml"), *words])

    def on(self, ranks: Any, num_ranks: int, *words: str, verb: str = "train", exit_code: int = 0) -> str:
        """Train (or trace) on ranks of the pool, which have done their imports; the messages of the first one."""
        with socket.create_server(("127.0.0.1", 0)) as server:
            port = server.getsockname()[1]
        answers = ranks(num_ranks, run_command, port, [verb, *self.words[1:], *words])
        assert {code for code, _ in answers} == {exit_code}, answers
        return answers[0][1]

    def start_signalled(self, step: int, number: int, delay_s: float) -> Started:
        """Train in another process that gets a signal this long after it has logged a step."""
        return start([str(step), str(int(number)), str(delay_s), *self.words], SIGNALLED)

    def start(
        self,
        *words: str,
        folder: Path | None = None,
        script: str = COMMAND,
        is_fork: bool = not HAS_GPUS,
    ) -> Started:
        """Train in another process, on one thread; `folder` is its working folder. A fork has done its imports."""
        return start([*self.words, *words], script, folder, is_fork)

    def copy(self, folder: Path, last_step: int) -> "Run":
        """This run as if it had died after saving a step."""
        shutil.copytree(self.folder, folder)
        for checkpoint in (folder / "checkpoints").iterdir():
            if int(checkpoint.name.removeprefix("step-")) > last_step:
                shutil.rmtree(checkpoint)
        copied = Run(folder)
        copied.words += self.words[3:]
        return copied

    @property
    def records(self) -> list[dict[str, Any]]:
        """All records of metrics.jsonl; an incomplete last line is left out."""
        path = self.folder / "metrics.jsonl"
        return [json.loads(line) for line in path.read_text().split("\n")[:-1]] if path.exists() else []

    @property
    def trace(self) -> list[dict[str, Any]]:
        """The records without times and memory."""
        return [{name: value for name, value in record.items() if name not in MEASURED} for record in self.records]

    def column(self, name: str) -> list[Any]:
        """One field of all records that have it."""
        return [record[name] for record in self.records if name in record]

    @property
    def saved_steps(self) -> list[int]:
        """All checkpoints."""
        return sorted(int(path.name.removeprefix("step-")) for path in (self.folder / "checkpoints").glob("step-*"))

    def checkpoint(self, step: int) -> dict[str, Any]:
        """The content of a checkpoint, flat, with full tensors."""
        file = self.folder / f"step-{step}.pt"
        dcp_to_torch_save(self.folder / "checkpoints" / f"step-{step}", file)
        return _flat(torch.load(file, weights_only=False))


def run_command(port: int, words: list[str]) -> tuple[int, str]:
    """Run `titan-moe` on this rank as torchrun would start it; the exit code and the messages."""
    rank, num_ranks = str(dist.get_rank()), str(dist.get_world_size())
    dist.destroy_process_group()  # the command makes its own
    values = (num_ranks, rank, rank, num_ranks, "127.0.0.1", str(port))
    said, logger = logging.StreamHandler(io.StringIO()), logging.getLogger("titan_moe")
    logger.addHandler(said)
    try:
        with mock.patch.dict(os.environ, zip(TORCHRUN_VARIABLES, values, strict=True)):
            return cli.main(words), said.stream.getvalue()
    except SystemExit as ended:  # of a run that has diverged
        return ended.code, said.stream.getvalue()
    finally:
        logger.removeHandler(said)


def start(words: list[str], script: str, folder: Path | None = None, is_fork: bool = not HAS_GPUS) -> Started:
    """A script in another process, as by `python -c SCRIPT WORDS`."""
    kept = {name: value for name, value in os.environ.items() if name not in TORCHRUN_VARIABLES}
    variables = {**kept, "OMP_NUM_THREADS": "1"}
    if is_fork:
        return Forked(FORK_RANKS + script, words, variables, folder)
    command = [sys.executable, "-c", script, *words]
    return subprocess.Popen(
        command, env=variables, cwd=folder, text=True, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE
    )


def _flat(state: Any, prefix: str = "") -> dict[str, Any]:
    if not isinstance(state, dict):
        return {prefix: state}
    return {name: value for key in state for name, value in _flat(state[key], f"{prefix}/{key}").items()}


@pytest.fixture(autouse=True)
def one_process(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in TORCHRUN_VARIABLES:
        monkeypatch.delenv(name, raising=False)


@pytest.fixture
def tiny(tmp_path: Path) -> Callable[..., Run]:
    """Makes runs: `tiny("--train.steps=5")`, each in a folder of its own."""
    folders = iter(tmp_path / f"run-{number}" for number in range(100))
    return lambda *overrides: Run(next(folders), *overrides)


@pytest.fixture(scope="module")
def make_run(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Run]:
    """As `tiny`, for runs that several tests share."""
    return lambda *overrides: Run(tmp_path_factory.mktemp("shared") / "run", *overrides)
