"""A rank that is killed or stopped in the middle of a step over symmetric memory ends the others within the limit.

On a host with two GPUs: python -m pytest -m gpu tests/gpu/test_hangs.py
"""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from support import load
from support.gpus import RANKS_PER_GPU

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs at least two GPUs"),
    pytest.mark.skipif(RANKS_PER_GPU > 1, reason="a killed rank ends the service that ranks of a GPU share"),
]

LIMIT_MINUTES = 0.5
CEILING_S = 300
STEP = 5
MODEL = """
import os, signal
from titan_moe.models.transformer import Transformer
class Model(Transformer):
    num_calls = 0
    def forward(self, *args, **kwargs):
        self.num_calls += self.training
        if self.num_calls == {call} and os.environ["RANK"] == "1":
            blocks = list(self.layers.children())
            blocks[1].register_forward_hook(self.act)  # the next block's exchanges lack this rank
        return super().forward(*args, **kwargs)
    def act(self, *args):
        os.kill(os.getpid(), signal.{signal})
"""


def train(tmp_path: Path, number: signal.Signals) -> tuple[int, str, float]:
    """Exit code, standard error and seconds of a run whose rank 1 gets a signal in the middle of a step."""
    module = load("gpu/test_ranks")
    words = module.words(tmp_path / "case", "--train.steps=100000", f"--run.step_timeout_minutes={LIMIT_MINUTES}")
    num_microbatches = 8 // (2 * 2)  # of a step, on each of two ranks
    model = MODEL.format(call=(STEP - 1) * num_microbatches + 1, signal=number.name)
    (tmp_path / "acting.py").write_text(model)
    layout = ("--parallel.ep=2", "--parallel.dispatcher=symm_mem", "--model.class=acting:Model")
    command = [sys.executable, "-m", "titan_moe", *words, *layout, "--compile.regional=off", "--nproc", "2"]
    begin = time.monotonic()
    ended = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=CEILING_S)
    return ended.returncode, ended.stderr, time.monotonic() - begin


def processes_in(folder: Path) -> list[int]:
    """The processes that run in a folder."""
    found = []
    for process in Path("/proc").glob("[0-9]*"):
        try:
            if os.readlink(process / "cwd") == str(folder):
                found.append(int(process.name))
        except OSError:
            continue
    return found


def test_a_stopped_rank_ends_the_others(tmp_path: Path) -> None:
    exit_code, stderr, _ = train(tmp_path, signal.SIGSTOP)
    assert exit_code == 1, stderr
    assert "rank 1 did not come to an exchange over symmetric memory within 15 seconds" in stderr
    line = next(line for line in stderr.splitlines() if line.startswith("titan-moe: rank 0 "))
    assert f"run.step_timeout_minutes = {LIMIT_MINUTES}" in line or "did not come to an exchange" in line
    assert "rank 1" in line
    assert stderr.strip().splitlines()[-1].startswith("titan-moe: rank 0 failed first: "), stderr
    assert processes_in(tmp_path) == []


def test_a_killed_rank_ends_the_others(tmp_path: Path) -> None:
    exit_code, stderr, _ = train(tmp_path, signal.SIGKILL)
    assert exit_code == 128 + signal.SIGKILL, stderr
    assert stderr.strip().splitlines()[-1] == "titan-moe: rank 1 was ended by SIGKILL"
    assert processes_in(tmp_path) == []
