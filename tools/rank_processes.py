"""Run a script on ranks of this host and read its results. A failure does not affect later runs.

The script gets `--out FILE`. With `run_ranks` it writes one JSON result into the file. With `run_jobs` it runs several
jobs in the same processes, because launching ranks takes far longer than a measurement, and appends one line per job.
The result of a failure is its error, or the exit code of the processes if they did not write one.
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
SHUTDOWN_TIMEOUT_S = 60
"""After SIGTERM torchrun terminates its ranks, and kills them after 30 s."""
POLL_INTERVAL_S = 0.1

Result = dict[str, Any]


def run_ranks(command: Sequence[str], num_ranks: int, timeout_s: float, launcher: Sequence[str] = TORCHRUN) -> Result:
    """Run a script with its arguments on each rank. Returns its result, or `{"error": ...}`."""
    with _launch(command, num_ranks, launcher) as (process, out):
        outcome = _wait(process, timeout_s)
        return json.loads(out.read_text()) if out.exists() else {"error": outcome}


def run_jobs(
    command: Sequence[str], jobs: Sequence[str], num_ranks: int, timeout_s: float, launcher: Sequence[str] = TORCHRUN
) -> Iterator[tuple[str, Result]]:
    """Run a script with its arguments and jobs. Yields (job, result or `{"error": ...}`) in order, when available.

    A job that fails, or takes longer than `timeout_s`, ends its processes. The remaining jobs run in new ones.
    """
    remaining = list(jobs)
    while remaining:
        with _launch([*command, *remaining], num_ranks, launcher) as (process, out):
            for line in _read_results(process, out, timeout_s):
                for job in line.get("jobs", remaining[:1]):
                    if job in remaining:  # otherwise another rank fails as a consequence of the first failure
                        remaining.remove(job)
                        yield job, line["result"]
                if not remaining or "error" in line["result"]:
                    break
            if "jobs" in line:  # written by the ranks, which end by themselves
                _wait(process, SHUTDOWN_TIMEOUT_S)


@contextmanager
def reporting_errors(out: Path, jobs: Sequence[str] = ()) -> Iterator[None]:
    """Write an error of the enclosed code as the result (of these jobs), and end the rank at once."""
    try:
        yield
    except Exception as error:
        traceback.print_exc()
        first_line = str(error).strip().partition("\n")[0]
        result = {"error": f"{type(error).__name__}: {first_line[:200]}"}
        append_result(out, jobs, result) if jobs else write_once(out, result)
        sys.stdout.flush()
        os._exit(1)  # the other ranks may wait in a collective, and a clean shutdown would wait for them


def write_once(path: Path, result: Result) -> None:
    """Write the result unless another rank has written one. Of several failing ranks the first has the cause."""
    path.parent.mkdir(parents=True, exist_ok=True)
    try:
        with path.open("x") as file:
            json.dump(result, file, indent=1)
    except FileExistsError:
        pass


def append_result(path: Path, jobs: Sequence[str], result: Result) -> None:
    """Append the result of these jobs. If several ranks fail, the first line counts."""
    with path.open("a") as file:
        file.write(json.dumps({"jobs": jobs, "result": result}) + "\n")


@contextmanager
def _launch(
    script: Sequence[str], num_ranks: int, launcher: Sequence[str]
) -> Iterator[tuple[subprocess.Popen[bytes], Path]]:
    """Launch a script on ranks. Yields the process and its output file. Terminates the process on exit."""
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "result.json"
        environment = {"PYTORCH_ALLOC_CONF": "expandable_segments:True"} | os.environ
        command = [*launcher, f"--nproc-per-node={num_ranks}", *script, f"--out={out}"]
        process = subprocess.Popen(command, env=environment)
        try:
            yield process, out
        finally:
            _end(process)


def _read_results(process: subprocess.Popen[bytes], out: Path, timeout_s: float) -> Iterator[Result]:
    """Yield the lines of the ranks when they are written, then the exit code, or an error after a timeout."""
    out.touch()
    last_s, line = time.monotonic(), ""
    with out.open() as file:
        while True:
            code = process.poll()  # before the read, so that lines written before the exit are read
            line += file.readline()
            if line.endswith("\n"):
                yield json.loads(line)
                last_s, line = time.monotonic(), ""
            elif code is not None:
                yield {"result": {"error": f"exit code {code}"}}
            elif time.monotonic() - last_s > timeout_s:
                yield {"result": {"error": f"stopped after {timeout_s:g} s"}}
            else:
                time.sleep(POLL_INTERVAL_S)


def _wait(process: subprocess.Popen[bytes], timeout_s: float) -> str:
    """Wait for a process, and terminate it after a timeout. Returns how it ended."""
    try:
        return f"exit code {process.wait(timeout_s)}"
    except subprocess.TimeoutExpired:
        _end(process)
        return f"stopped after {timeout_s:g} s"


def _end(process: subprocess.Popen[bytes]) -> None:
    """Terminate a running process with its ranks, or kill it after a timeout."""
    if process.poll() is None:
        process.terminate()
        try:
            process.wait(SHUTDOWN_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
