"""Console output: one line per logged step and, on a terminal, a progress bar."""

import logging
import os
import sys
from typing import Any

from tqdm import tqdm

from titan_moe.config.schema import counted

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
    """Format a record as one line with the largest load of experts and of ranks (`overload`), without numbers that are
    zero or unknown."""
    words = [f"step {record['step']:>{len(str(total_steps))}}/{total_steps}"]
    if "validation_loss" in record:
        return "  ".join([*words, f"validation loss {record['validation_loss']:.4f}"])
    words.append(f"loss {record['loss']:.4f}")
    if record["aux_loss"]:
        words.append(f"aux {record['aux_loss']:.2e}")
    words += [f"norm {record['grad_norm']:.3f}", f"lr {record['lr']:.2e}"]
    words.append(f"{record['tokens_per_second_per_gpu']:,.0f} tokens/s/{unit}")
    if record["tflops_per_gpu"] is not None:
        words.append(f"{record['tflops_per_gpu']:.3g} TFLOP/s")
    if record["mfu"] is not None:
        words.append(f"MFU {record['mfu']:.1%}")
    words += [f"{record['memory_gib']:.2f} GiB", f"{record['step_ms']:.0f} ms"]
    if record["expert_load"]:
        words.append(f"expert load {max(record['expert_load'].values()):.2f}")
        if num_idle := record["idle_experts"]["sum"]:
            words.append(counted(num_idle, "idle expert"))
    if "overload" in record:
        words.append(f"overload {record['overload']['max']:.2f}")
    if record["skipped_steps"]:
        words.append(f"SKIPPED {counted(record['skipped_steps'], 'step')}, where gradients were not finite")
    if record.get("spikes"):
        words.append(f"SKIPPED {counted(record['spikes'], 'spike')}")
    if record.get("bad_rows"):
        words.append(f"SKIPPED {counted(record['bad_rows'], 'bad row')}")
    if record["rerun_steps"]:
        words.append(f"{counted(record['rerun_steps'], 'step')} rerun ({record['rerun_share']:.1%})")
    if "forced_load" in record:
        words.append(f"FORCED LOAD: {record['forced_load'].upper()}")
    return "  ".join(words)


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
