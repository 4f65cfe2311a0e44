"""Console output: one line per logged step and, on a terminal, a progress bar."""

import logging
import os
import sys
from typing import Any

from tqdm import tqdm

from titan_moe.metrics.table import words_of

logger = logging.getLogger("titan_moe")


class Console:
    """Print lines to standard output. The progress bar goes to standard error, and only if that is a terminal.

    A run goes on without its console: a lost terminal, a closed pipe or a full disk must not keep it from saving.
    """

    def __init__(self, total_steps: int, first_step: int, unit: str, *, has_bar: bool) -> None:
        self.total_steps = total_steps
        self.unit = unit
        is_shown = has_bar and sys.stderr.isatty()
        self.bar = tqdm(total=total_steps, initial=first_step, unit="step", file=sys.stderr) if is_shown else None

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
        line = format_line(record, self.total_steps, self.unit)
        if self.bar is None:
            print(line, flush=True)
        else:
            tqdm.write(line, file=sys.stdout)
            sys.stdout.flush()
            if "loss" in record:
                self.bar.set_postfix_str(format_postfix(record, self.unit))


def format_line(record: dict[str, Any], total_steps: int, unit: str) -> str:
    """Format a record as one line, without numbers that are zero or unknown."""
    return "  ".join([f"step {record['step']:>{len(str(total_steps))}}/{total_steps}", *words_of(record, unit)])


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
