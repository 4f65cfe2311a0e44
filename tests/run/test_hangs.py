"""A run that hangs ends: within the limit of its recipe, or by a signal, and it names the rank that is late."""

import ctypes
import fcntl
import os
import pty
import re
import signal
import subprocess
import sys
import termios
import time
from pathlib import Path

import pytest
from support.runs import COMMAND, Started

pytestmark = [pytest.mark.slow, pytest.mark.launches]

CEILING_S = 180
MODEL = """
import ctypes, os, signal, time
from titan_moe.models.transformer import Transformer
class Model(Transformer):
    num_calls = 0
    def forward(self, *args, **kwargs):
        self.num_calls += self.training
        if self.num_calls == 4 and os.environ.get("RANK", "1") == "1":
            open("reached", "w").close()
            {act}
        return super().forward(*args, **kwargs)
"""
SLEEP_IN_C = "[ctypes.CDLL(None).sleep(1000) for _ in range(1000)]"
IMPATIENT = """
import sys
from titan_moe import cli
from titan_moe.run import watchdog
watchdog.STOP_GRACE_S = 2.0
sys.exit(cli.main())
"""


def write_model(folder: Path, act: str) -> str:
    (folder / "acting.py").write_text(MODEL.format(act=act))
    return "--model.class=acting:Model"


def on_one_thread() -> dict[str, str]:
    """The environment of one process or of a launcher."""
    kept = {name: value for name, value in os.environ.items() if name not in ("RANK", "WORLD_SIZE")}
    return kept | {"OMP_NUM_THREADS": "1"}


def wait_for(process: Started, path: Path) -> None:
    while process.poll() is None and not path.exists():
        time.sleep(0.02)


def test_hang_of_a_stopped_rank_ends_all_ranks(tiny, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCH_ELASTIC_SHUTDOWN_TIMEOUT", "5")
    stopping = write_model(tmp_path, "os.kill(os.getpid(), signal.SIGSTOP)")
    run = tiny("--train.steps=100000", "--run.step_timeout_minutes=0.1", stopping)
    process = run.start("--nproc", "2", folder=tmp_path)
    try:
        stderr = process.communicate(timeout=CEILING_S)[1]
    finally:
        process.kill()
    assert process.returncode == 1, stderr
    (line,) = [line for line in stderr.splitlines() if line.startswith("titan-moe: rank 0 ")][:1]
    assert "run.step_timeout_minutes = 0.1" in line
    assert "; rank 1 (last seen in " in line and ") gives no sign: its process is stopped or its host is lost" in line
    assert "; rank 0 waits in gloo:" in line, "the flight recorder names the collective"
    assert stderr.strip().splitlines()[-1].startswith("titan-moe: rank 0 failed first: rank 0 "), stderr
    assert "step_runner.py" in (run.folder / "hangs" / "rank-0.txt").read_text(), "the stacks of this rank"


def test_hang_of_a_rank_that_runs_is_named_with_its_place(tiny, tmp_path: Path) -> None:
    sleeping = write_model(tmp_path, "time.sleep(10**6)")
    run = tiny("--train.steps=100000", "--run.step_timeout_minutes=0.1", sleeping)
    process = run.start("--nproc", "2", folder=tmp_path)
    stderr = process.communicate(timeout=CEILING_S)[1]
    assert process.returncode == 1
    # said by rank 0 of rank 1, or by rank 1 of itself, whose limit ends at the same time
    assert re.search(r"rank 1 (is in|has not finished) step 4 ", stderr), stderr
    assert re.search(r"rank 1 is (in step 4 )?at forward \(acting\.py:", stderr), stderr


def test_hang_of_one_process_ends(tiny, tmp_path: Path) -> None:
    run = tiny("--train.micro_batch_sequences=4", "--run.step_timeout_minutes=0.05", write_model(tmp_path, SLEEP_IN_C))
    process = run.start(folder=tmp_path)
    stderr = process.communicate(timeout=CEILING_S)[1]
    assert process.returncode == 1
    last_line = stderr.strip().splitlines()[-1]
    assert "rank 0 has not finished step 4 within run.step_timeout_minutes = 0.05" in last_line
    assert "(acting.py:" in last_line


@pytest.mark.parametrize("is_repeated", [False, True])
def test_hang_ends_by_sigterm(tiny, tmp_path: Path, is_repeated: bool) -> None:
    """After a grace period, or at the second signal; the limit of a step is hours away."""
    run = tiny("--train.micro_batch_sequences=4", "--run.step_timeout_minutes=600", write_model(tmp_path, SLEEP_IN_C))
    process = run.start(folder=tmp_path, script=COMMAND if is_repeated else IMPATIENT)
    wait_for(process, tmp_path / "reached")
    process.terminate()
    if is_repeated:
        time.sleep(5)
        process.terminate()
    stderr = process.communicate(timeout=CEILING_S)[1]
    assert process.returncode == 128 + signal.SIGTERM
    assert "rank 0 ends without a save: SIGTERM came" in stderr.strip().splitlines()[-1]


def test_long_first_steps_and_saves_are_no_hangs(tiny, tmp_path: Path) -> None:
    """They may take six times as long as a step; the suspension of a whole job counts for nothing."""
    (tmp_path / "slow.py").write_text(
        "import time\n"
        "from titan_moe.models.transformer import Transformer\n"
        "from titan_moe.checkpoint.dcp import Checkpointer\n"
        "save = Checkpointer.save\n"
        "def save_slowly(self, *args, **kwargs):\n"
        "    time.sleep(8)\n"
        "    return save(self, *args, **kwargs)\n"
        "Checkpointer.save = save_slowly\n"
        "class Model(Transformer):\n"
        "    num_calls = 0\n"
        "    def forward(self, *args, **kwargs):\n"
        "        self.num_calls += 1\n"
        "        time.sleep(8 if self.num_calls == 1 else 0)\n"
        "        return super().forward(*args, **kwargs)\n"
    )
    words = ("--train.steps=4", "--checkpoint.every_steps=2", "--run.step_timeout_minutes=0.1")
    run = tiny(*words, "--train.micro_batch_sequences=4", "--model.class=slow:Model")
    process = run.start(folder=tmp_path)
    while process.poll() is None and not run.column("loss"):
        time.sleep(0.02)
    process.send_signal(signal.SIGSTOP)
    time.sleep(10)
    process.send_signal(signal.SIGCONT)
    stderr = process.communicate(timeout=CEILING_S)[1]
    assert process.returncode == 0, stderr
    assert run.saved_steps == [2, 4]


def test_lost_terminal_saves(tiny, tmp_path: Path) -> None:
    """SIGHUP and then errors for every line that is printed, as after a lost ssh session."""
    run = tiny("--train.steps=100000")
    master, slave = pty.openpty()

    def take_terminal() -> None:
        fcntl.ioctl(slave, termios.TIOCSCTTY, 0)

    process = subprocess.Popen(
        [sys.executable, "-m", "titan_moe", *run.words],
        stdin=slave, stdout=slave, stderr=slave, start_new_session=True, preexec_fn=take_terminal,
        env=on_one_thread(),
    )  # fmt: skip
    os.close(slave)
    end = time.monotonic() + CEILING_S
    while process.poll() is None and len(run.column("loss")) < 3 and time.monotonic() < end:
        os.read(master, 65536)
    os.close(master)
    assert process.wait(CEILING_S) == 0
    assert run.saved_steps == [run.column("step")[-1]]


@pytest.mark.few()
def test_nohup_goes_on(tiny) -> None:
    run = tiny("--train.steps=20")
    ignore = ctypes.CDLL(None)
    process = subprocess.Popen(
        [sys.executable, "-m", "titan_moe", *run.words, "--nproc", "2"],
        text=True, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, env=on_one_thread(),
        preexec_fn=lambda: ignore.signal(signal.SIGHUP, 1),  # SIG_IGN
    )  # fmt: skip
    while process.poll() is None and len(run.column("loss")) < 3:
        time.sleep(0.02)
    process.send_signal(signal.SIGHUP)
    stderr = process.communicate(timeout=CEILING_S)[1]
    assert process.returncode == 0, stderr
    assert "leaked" not in stderr, "triton 3.9 lists what was excluded from garbage collection"
    assert run.column("step")[-1] == 20
