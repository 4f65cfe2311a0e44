"""Ranks started by `--nproc`: their messages and exit codes are those of the command."""

import os
import signal
import subprocess
import sys
import time

import pytest
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, ProcessFailure

from titan_moe.run import launch
from titan_moe.run.failure import record_failure, recorded_failures

pytestmark = [pytest.mark.slow, pytest.mark.launches]


def test_launch_prints_a_recipe_error_once(tiny) -> None:
    missing = ("--data.source=text", "--data.path=nowhere/*", "--model.vocab_size=256")
    process = tiny().start("--nproc", "2", *missing)
    stderr = process.communicate(timeout=120)[1]
    assert process.returncode == 2
    assert stderr.count("titan-moe: 1 problem\n  data.path = 'nowhere/*' matches no file") == 1
    assert "Traceback" not in stderr and "torch/distributed" not in stderr


def test_launch_refuses_two_levels_on_one_node(tiny) -> None:
    process = tiny().start("--nproc", "4", "--parallel.ep=4", "--parallel.dispatcher=hierarchical")
    stderr = process.communicate(timeout=120)[1]
    assert process.returncode == 2 and "4 ranks on a node hold all of parallel.ep = 4" in stderr


def test_launch_prints_the_first_failure_last(tiny, tmp_path) -> None:
    """Of ranks that torchrun starts: those of other tests are forks."""
    (tmp_path / "failing.py").write_text(
        "import os\n"
        "from titan_moe.models.transformer import Transformer\n"
        "class Model(Transformer):\n"
        "    num_calls = 0\n"
        "    def forward(self, *args, **kwargs):\n"
        "        self.num_calls += 1\n"
        "        if self.num_calls == 3 and os.environ['RANK'] == '1':\n"
        "            raise ArithmeticError('these are the words')\n"
        "        return super().forward(*args, **kwargs)\n"
    )
    process = tiny().start("--nproc", "2", "--model.class=failing:Model", folder=tmp_path, is_fork=False)
    stderr = process.communicate(timeout=120)[1]
    assert process.returncode == 1
    last_line = stderr.strip().splitlines()[-1]
    assert last_line == "titan-moe: rank 1 failed first: ArithmeticError: these are the words"
    assert "torch/distributed/elastic" not in stderr


def test_launch_ranks_end_with_a_killed_launcher(tiny) -> None:
    run = tiny("--train.steps=100000")
    process = run.start("--nproc", "2")
    while process.poll() is None and len(run.column("loss")) < 3:
        time.sleep(0.05)
    ranks = children_of(process.pid)
    assert len(ranks) == 2
    process.kill()
    process.wait()
    end = time.monotonic() + 60
    while any(is_running(rank) for rank in ranks) and time.monotonic() < end:
        time.sleep(0.1)
    left = [rank for rank in ranks if is_running(rank)]
    for rank in left:
        os.kill(rank, signal.SIGKILL)
    assert left == []


def test_launch_kills_a_rank_that_is_stopped_after_the_run(tiny, tmp_path) -> None:
    """Its work is done and it gives no sign any more: no other rank waits for it, but the launcher does. Its random
    numbers were its own."""
    (tmp_path / "stopping.py").write_text(
        "import atexit, os, pathlib, signal, torch\n"
        "from titan_moe.models.transformer import Transformer\n"
        "class Model(Transformer):\n"
        "    def forward(self, *args, **kwargs):\n"
        "        pathlib.Path(os.environ['RANK']).write_text(str(torch.rand(()).item()))\n"
        "        return super().forward(*args, **kwargs)\n"
        "os.environ['RANK'] == '1' and atexit.register(os.kill, os.getpid(), signal.SIGSTOP)\n"
    )
    words = ("--train.steps=3", "--run.step_timeout_minutes=0.2", "--model.class=stopping:Model")
    process = tiny(*words).start("--nproc", "2", folder=tmp_path)
    try:
        stderr = process.communicate(timeout=180)[1]
    finally:
        process.kill()
    assert process.returncode == 128 + 9
    assert "titan-moe: 1 of 2 ranks have not ended 12 seconds after another; killed" in stderr
    assert (tmp_path / "0").read_text() != (tmp_path / "1").read_text()


def test_launch_blames_a_rank_that_exits_by_itself(tmp_path, capsys: pytest.CaptureFixture[str]) -> None:
    """The others lose their connection to it, and say so."""
    (tmp_path / "0").mkdir()
    with pytest.MonkeyPatch.context() as patched:
        patched.setenv("RANK", "0")
        patched.setenv("TORCHELASTIC_ERROR_FILE", str(tmp_path / "0" / "error.json"))
        record_failure(RuntimeError("Connection closed by peer"))
    failures = {rank: ProcessFailure(rank, 100 + rank, code, "") for rank, code in ((0, 1), (1, 5))}
    assert launch._report(ChildFailedError("titan_moe", failures), tmp_path) == 5
    assert capsys.readouterr().err == "titan-moe: rank 1 has ended itself with exit code 5\n"


@pytest.mark.parametrize(("code", "expected"), [("0", 1), ("3", 3), ("'words'", 1)])
def test_launch_names_the_code_that_exits(
    tiny, tmp_path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, code: str, expected: int
) -> None:
    """It ends a run in the middle, so an exit code of 0 would be wrong."""
    (tmp_path / "exiting.py").write_text(
        "import sys\n"
        "from titan_moe.models.transformer import Transformer\n"
        "class Model(Transformer):\n"
        "    def forward(self, *args):\n"
        f"        sys.exit({code}) if self.training else None\n"
        "        return super().forward(*args)\n"
    )
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.delitem(sys.modules, "exiting", raising=False)
    monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(tmp_path / "error.json"))
    with pytest.raises(SystemExit) as ended:
        tiny("--model.class=exiting:Model").train()
    assert ended.value.code == expected
    (failure,) = recorded_failures(tmp_path)
    assert failure.words == f"its code has ended it by SystemExit({code}) at {tmp_path}/exiting.py:5"
    assert failure.exit_code == expected and f"rank 0: {failure.words}" in caplog.text


def test_launch_passes_the_warning_of_slurm_on(monkeypatch: pytest.MonkeyPatch) -> None:
    """The default of SIGUSR1 ends the launcher, and with it the ranks, unsaved."""
    before, codes = signal.getsignal(signal.SIGUSR1), []

    def torchrun(argv: list[str]) -> None:
        saving = "signal.signal(signal.SIGUSR1, lambda *_: sys.exit(7)); print(flush=True); signal.pause()"
        with subprocess.Popen([sys.executable, "-c", f"import signal, sys; {saving}"], stdout=subprocess.PIPE) as rank:
            monkeypatch.setattr(launch, "_pids_of_ranks", lambda: [rank.pid])
            rank.stdout.readline()
            os.kill(os.getpid(), signal.SIGUSR1)
            codes.append(rank.wait(30))

    monkeypatch.setattr(launch, "torchrun", torchrun)
    assert launch.launch(1, []) == 0 and codes == [7]
    assert signal.getsignal(signal.SIGUSR1) == before


def children_of(pid: int) -> list[int]:
    with open(f"/proc/{pid}/task/{pid}/children") as file:
        return [int(word) for word in file.read().split()]


def is_running(pid: int) -> bool:
    try:
        with open(f"/proc/{pid}/stat") as file:
            return file.read().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False
