"""Console output: one line per logged step and, on a terminal, a progress bar."""

import logging
import os
import stat
import sys
import time
from datetime import timedelta
from typing import Any, TextIO

from tqdm import tqdm

from titan_moe.metrics.table import words_of
from titan_moe.run.terminal import is_terminal, painted

logger = logging.getLogger("titan_moe")


COLOURS = {"loss ": "bold", "validation loss ": "green", "SKIPPED ": "yellow", "FORCED LOAD": "yellow"}
"""The start of what a line says -> its colour on a terminal."""


class Console:
    """Print lines to standard output. The progress bar goes to standard error, and only if that is a terminal.

    A run goes on without its console: a lost terminal, a closed pipe or a full disk must not keep it from saving.
    """

    def __init__(self, total_steps: int, first_step: int, unit: str, *, has_bar: bool) -> None:
        self.total_steps = total_steps
        self.unit = unit
        self.time_left = TimeLeft(total_steps)
        is_shown = has_bar and is_terminal(sys.stderr) and not _is_pipe(sys.stdout)  # `| tee` would write into the bar
        options: dict[str, Any] = {"total": total_steps, "initial": first_step, "unit": "step", "dynamic_ncols": True}
        self.bar = tqdm(file=sys.stderr, **options) if is_shown else None

    def advance(self) -> None:
        """Advance the bar by one step."""
        if self.bar is not None:
            self.bar.update()

    def write(self, record: dict[str, Any]) -> None:
        """Print a record as a line, above the bar if there is one."""
        try:
            self._print(record)
        except OSError as error:
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            self.bar = None
            logger.warning("standard output is lost (%s); the run goes on, its records are in metrics.jsonl", error)

    def close(self) -> None:
        """Close the bar. It stays visible."""
        if self.bar is not None:
            self.bar.close()

    def _print(self, record: dict[str, Any]) -> None:
        left = self.time_left.after(record["step"], time.monotonic()) if "loss" in record else ""
        line = "  ".join(map(_painted, line_words(record, self.total_steps, self.unit, left)))
        if self.bar is None:
            print(line, flush=True)
        else:
            tqdm.write(line, file=sys.stdout)
            sys.stdout.flush()
            if "loss" in record:
                self.bar.set_postfix_str(format_postfix(record, self.unit))


class TimeLeft:
    """Estimate how long a run goes on, with its validations and saves, from its speed since the first logged step of
    this process. The first steps compile."""

    def __init__(self, total_steps: int) -> None:
        self.total_steps = total_steps
        self.first: tuple[int, float] | None = None

    def after(self, step: int, now_s: float) -> str:
        """Take the time of a logged step. Returns words, empty while nothing is known and at the end."""
        if self.first is None:
            self.first = step, now_s
        first_step, start_s = self.first
        if step == first_step or step >= self.total_steps:
            return ""
        left = timedelta(seconds=round((now_s - start_s) / (step - first_step) * (self.total_steps - step)))
        return f"{left} left"


def line_words(record: dict[str, Any], total_steps: int, unit: str, left: str = "") -> list[str]:
    """What a line says: the step, the share that is done and the time that is `left`, then the numbers of a record,
    without those that are zero or unknown."""
    step = record["step"]
    done = f"{100 * step // total_steps:>3}%" + (f", {left}" if left else "")
    return [f"step {step:>{len(str(total_steps))}}/{total_steps}  {done}", *words_of(record, unit)]


def _painted(words: str) -> str:
    colour = next((colour for start, colour in COLOURS.items() if words.startswith(start)), "")
    return painted(words, colour, sys.stdout) if colour else words


def _is_pipe(stream: TextIO) -> bool:
    """Whether a stream goes to another process; not where it is a stand-in for a file."""
    try:
        return stat.S_ISFIFO(os.fstat(stream.fileno()).st_mode)
    except (OSError, ValueError):
        return False


def format_start(record: dict[str, Any], num_experts: int) -> str:
    """Describe the routing of a run's first step; `num_experts` are those of all layers."""
    layer, load = max(record["expert_load"].items(), key=lambda item: item[1])
    words = [
        f"routing at the start: busiest expert {load:.2f} times the mean ({layer})",
        f"{record['idle_experts']['sum']:,} of {num_experts:,} experts idle",
    ]
    if "overload" in record:
        factors = ", ".join(f"{name} {factor:.2f}" for name, factor in record["overload"].items())
        words.append(f"overload of ranks {factors}, busiest rank {record['busiest_rank']}")
    return "; ".join(words)


def format_postfix(record: dict[str, Any], unit: str) -> str:
    """Format the most important numbers of a record for the progress bar."""
    words = [f"loss {record['loss']:.3f}", f"{record['tokens_per_second_per_gpu']:,.0f} tokens/s/{unit}"]
    if record["mfu"] is not None:
        words.append(f"MFU {record['mfu']:.1%}")
    return ", ".join([*words, f"{record['memory_gib']:.1f} GiB"])
