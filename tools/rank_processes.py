"""Run a script on ranks of this host, bring its figures home, and keep its failures away from what runs next.

The script is given `--out FILE`. Alone (`run_ranks`) it writes its figures there, as JSON, once. With jobs (`run_jobs`)
it does one after the other in the same processes, because to start ranks costs far more than a measurement, and adds
a line for each. What goes wrong is a result too: its error stands in the figures' place, or how the processes ended if
they could not say.
"""

import json
import os
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

TORCHRUN = (sys.executable, "-m", "torch.distributed.run", "--standalone")
SECONDS_TO_END = 60
"""torchrun ends its ranks when it is told to end, and kills them after 30 s."""
SECONDS_BETWEEN_LOOKS = 0.1

Result = dict[str, Any]


def run_ranks(words: Sequence[str], num_ranks: int, timeout_s: float, launcher: Sequence[str] = TORCHRUN) -> Result:
    """Run a script with its arguments on each rank; its figures, or `{"error": ...}`."""
    with _started(words, num_ranks, launcher) as (process, out):
        outcome = _wait(process, timeout_s)
        return json.loads(out.read_text()) if out.exists() else {"error": outcome}


def run_jobs(
    words: Sequence[str], jobs: Sequence[str], num_ranks: int, timeout_s: float, launcher: Sequence[str] = TORCHRUN
) -> Iterator[tuple[str, Result]]:
    """Run a script that does the jobs that follow its arguments; each job with its figures or `{"error": ...}`, in
    order, as soon as they are known.

    A job that fails, or takes longer than `timeout_s`, ends its processes; new ones go on with the jobs after it.
    """
    left = list(jobs)
    while left:
        with _started([*words, *left], num_ranks, launcher) as (process, out):
            for told in _told(process, out, timeout_s):
                for job in told.get("jobs", left[:1]):
                    if job in left:  # else another rank failed because the first one had
                        left.remove(job)
                        yield job, told["result"]
                if not left or "error" in told["result"]:
                    break
            if "jobs" in told:  # the ranks' last word: they end by themselves
                _wait(process, SECONDS_TO_END)


@contextmanager
def telling(out: Path, jobs: Sequence[str] = ()) -> Iterator[None]:
    """Around what a rank does: its error goes where the figures (of these jobs) would have gone, and ends the rank at
    once."""
    try:
        yield
    except Exception as error:
        traceback.print_exc()
        first_line = str(error).strip().partition("\n")[0]
        result = {"error": f"{type(error).__name__}: {first_line[:200]}"}
        add_line(out, jobs, result) if jobs else write_once(out, result)
        sys.stdout.flush()
        os._exit(1)  # the other ranks may wait in a collective, and a clean shutdown would wait for them


def write_once(path: Path, result: Result) -> None:
    """Write the result unless another rank has: of several failing ranks the first one knows the cause."""
    path.parent.mkdir(parents=True, exist_ok=True)
    try:
        with path.open("x") as file:
            json.dump(result, file, indent=1)
    except FileExistsError:
        pass


def add_line(path: Path, jobs: Sequence[str], result: Result) -> None:
    """Tell the result of these jobs; of several failing ranks the first one is heard."""
    with path.open("a") as file:
        file.write(json.dumps({"jobs": jobs, "result": result}) + "\n")


@contextmanager
def _started(
    words: Sequence[str], num_ranks: int, launcher: Sequence[str]
) -> Iterator[tuple[subprocess.Popen[bytes], Path]]:
    """A script on its ranks, and where it writes; what still runs in the end is ended."""
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "result.json"
        environment = {"PYTORCH_ALLOC_CONF": "expandable_segments:True"} | os.environ
        command = [*launcher, f"--nproc-per-node={num_ranks}", *words, f"--out={out}"]
        process = subprocess.Popen(command, env=environment)
        try:
            yield process, out
        finally:
            _end(process)


def _told(process: subprocess.Popen[bytes], out: Path, timeout_s: float) -> Iterator[Result]:
    """The lines that ranks add, as they come; after them, how the ranks ended, or that they were silent too long."""
    out.touch()
    since, line = time.monotonic(), ""
    with out.open() as file:
        while True:
            code = process.poll()  # before the look: what was written before the end is seen
            line += file.readline()
            if line.endswith("\n"):
                yield json.loads(line)
                since, line = time.monotonic(), ""
            elif code is not None:
                yield {"result": {"error": f"exit code {code}"}}
            elif time.monotonic() - since > timeout_s:
                yield {"result": {"error": f"stopped after {timeout_s:g} s"}}
            else:
                time.sleep(SECONDS_BETWEEN_LOOKS)


def _wait(process: subprocess.Popen[bytes], timeout_s: float) -> str:
    """How a process ended, by itself or because it was told to."""
    try:
        return f"exit code {process.wait(timeout_s)}"
    except subprocess.TimeoutExpired:
        _end(process)
        return f"stopped after {timeout_s:g} s"


def _end(process: subprocess.Popen[bytes]) -> None:
    """Let a process that still runs end, with what it has started, or kill it."""
    if process.poll() is None:
        process.terminate()
        try:
            process.wait(SECONDS_TO_END)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
