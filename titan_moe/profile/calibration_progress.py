"""What a calibration has measured so far: told as it is made, written anew after each, within a number of seconds.

A run that is killed leaves a table of what it has. A shape that fails, or for which no time is left, is told and left
out; rates that a table lacks are the shipped ones.
"""

import sys
import time
from collections.abc import Callable, Sequence
from datetime import date
from typing import NamedTuple

import torch
import torch.distributed as dist

from titan_moe.kernels.device import device_name
from titan_moe.plan.cost.rates_file import BYTES, Measurement, written

USUAL_MS, SHORT_MS = 100.0, 25.0
"""How long a kernel is timed, and where less than half of the time is left."""

Save = Callable[[str], None]
"""Takes the table so far."""


class Task(NamedTuple):
    """Something to measure."""

    words: str
    cold_s: float
    """What it may take on a machine that has not compiled its kernels."""
    measure: Callable[[float], Sequence[Measurement]]
    """Takes the ms for which a kernel is timed."""
    kind: str
    """Tasks of one kind take about as long as each other."""


class Progress:
    """The table of a calibration on its way. The first rank alone tells and saves; all keep the same clock."""

    def __init__(self, device: torch.device, seconds: float, began: float, save: Save) -> None:
        self.device, self.seconds, self.began, self.save = device, seconds, began, save
        self.num_ranks = dist.get_world_size() if dist.is_initialized() else 1
        self.is_first = not dist.is_initialized() or dist.get_rank() == 0
        self.measured: list[Measurement] = []
        self.left_out: list[str] = []
        self.took: dict[str, float] = {}

    @property
    def seconds_left(self) -> float:
        """Of those that the calibration may take."""
        return self.seconds - (time.monotonic() - self.began)

    @property
    def timed_ms(self) -> float:
        """How long a kernel is timed now."""
        return USUAL_MS if self.seconds_left > self.seconds / 2 else SHORT_MS

    def lacks_time(self, kind: str, cold_s: float) -> str:
        """Why there is no time for a task, by what the last one of its kind took, or cold; empty where there is."""
        needs, left = self.took.get(kind, cold_s), self.seconds_left
        if left >= needs:
            return ""
        return f"it may take {needs:.0f} s, and {max(left, 0):.0f} of {self.seconds:.0f} are left"

    def run(self, task: Task) -> None:
        """Measure on this rank alone, if there is time."""
        if why := self.lacks_time(task.kind, task.cold_s):
            self.leave_out(task.words, why)
            return
        start = time.monotonic()
        try:
            found = task.measure(self.timed_ms)
        except Exception as error:  # of a kernel that does not compile or fit here; the others are worth as much
            self.leave_out(task.words, in_words(error))
            return
        self.took[task.kind] = time.monotonic() - start
        self.add(found, self.took[task.kind])

    def add(self, found: Sequence[Measurement], seconds: float) -> None:
        """Tell what was measured, and write the table anew."""
        self.measured += found
        for it in found:
            self.tell(f"{seconds:6.1f} s  {it.rate:<18} {_rate_in_words(it):>13}  {_shape_in_words(it)}")
        if self.is_first:
            self.save(self.table(is_complete=False))

    def leave_out(self, words: str, why: str) -> None:
        """Tell what is left out, and why."""
        self.left_out.append(f"{words}: {why}")
        self.tell(f"left out: {self.left_out[-1]}")

    def tell(self, words: str) -> None:
        """Print a line at once, beside a table on stdout."""
        if self.is_first:
            print(words, file=sys.stderr, flush=True)

    def table(self, *, is_complete: bool) -> str:
        """What was measured, as TOML."""
        took = time.monotonic() - self.began
        heading = [
            f"titan-moe calibrate, {date.today().isoformat()}, torch {torch.__version__}, {self.num_ranks} rank(s), "
            f"{took:.0f} s: titan-moe plan RECIPE.toml --rates FILE",
            "FLOP/s and bytes a second; rates that are not here are those of a shipped table or a data sheet",
            *([] if is_complete else ["INCOMPLETE: what was measured until the run was stopped"]),
            *(f"left out: {words}" for words in self.left_out),
        ]
        return written(device_name(self.device), self.measured, "\n".join(heading))


def in_words(error: Exception) -> str:
    """The first line of an error."""
    return f"{type(error).__name__}: {next(iter(str(error).splitlines()), '')[:160]}"


def _rate_in_words(it: Measurement) -> str:
    return f"{it.value / 1e9:,.0f} GB/s" if it.rate in BYTES else f"{it.value / 1e12:,.0f} TFLOP/s"


def _shape_in_words(it: Measurement) -> str:
    return ", ".join(f"{name} {size:,}" for name, size in it.shape.items())
