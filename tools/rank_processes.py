"""Run a script on ranks of this host, bring its figures home, and keep its failures away from the next script's.

The script is given `--out FILE` and writes its figures there, as JSON, once. What goes wrong is a result too: its error
stands in their place, or how the processes ended if they could not say.
"""

import json
import os
import subprocess
import sys
import tempfile
import traceback
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

TORCHRUN = (sys.executable, "-m", "torch.distributed.run", "--standalone")
SECONDS_TO_END = 60
"""torchrun ends its ranks when it is told to end, and kills them after 30 s."""


def run_ranks(
    words: Sequence[str], num_ranks: int, timeout_s: float, launcher: Sequence[str] = TORCHRUN
) -> dict[str, Any]:
    """Run a script with its arguments on each rank; its figures, or `{"error": ...}`."""
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "result.json"
        environment = {"PYTORCH_ALLOC_CONF": "expandable_segments:True"} | os.environ
        command = [*launcher, f"--nproc-per-node={num_ranks}", *words, f"--out={out}"]
        process = subprocess.Popen(command, env=environment)
        try:
            outcome = f"exit code {process.wait(timeout_s)}"
        except subprocess.TimeoutExpired:
            outcome = f"stopped after {timeout_s:g} s"
        finally:
            _end(process)
        return json.loads(out.read_text()) if out.exists() else {"error": outcome}


def _end(process: subprocess.Popen[bytes]) -> None:
    """Let a process that still runs end, with what it has started, or kill it."""
    if process.poll() is None:
        process.terminate()
        try:
            process.wait(SECONDS_TO_END)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


@contextmanager
def telling(out: Path) -> Iterator[None]:
    """Around what a rank does: its error goes where the figures would have gone, and ends the rank at once."""
    try:
        yield
    except Exception as error:
        traceback.print_exc()
        first_line = str(error).strip().partition("\n")[0]
        write_once(out, {"error": f"{type(error).__name__}: {first_line[:200]}"})
        sys.stdout.flush()
        os._exit(1)  # the other ranks may wait in a collective, and a clean shutdown would wait for them


def write_once(path: Path, result: dict[str, Any]) -> None:
    """Write the result unless another rank has: of several failing ranks the first one knows the cause."""
    path.parent.mkdir(parents=True, exist_ok=True)
    try:
        with path.open("x") as file:
            json.dump(result, file, indent=1)
    except FileExistsError:
        pass
