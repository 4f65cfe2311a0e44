"""Write one record per logged step to the outputs of `[metrics]`: console, JSON lines, TensorBoard."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from titan_moe.config.recipe import Recipe
from titan_moe.metrics.console import Console
from titan_moe.metrics.experts import expert_loads, read_scalars
from titan_moe.metrics.jsonl import JsonLines
from titan_moe.metrics.tensorboard import TensorBoard
from titan_moe.metrics.throughput import Throughput, peak_memory_gib


class Meter:
    """Count every step. Log the first one after a start, every `metrics.every_steps`-th, and the last of the run.

    On other steps it reads nothing from the device, so the host can run ahead. All ranks make the same calls, but only
    rank 0 writes. `loss`, `grad_norm` and the counts must already be reduced over ranks: no collective is called here.
    """

    def __init__(
        self,
        recipe: Recipe,
        run_folder: Path,
        *,
        flops_per_token: float,
        device: torch.device,
        num_ranks: int,
        is_main: bool,
    ) -> None:
        self.recipe = recipe
        self.run_folder = Path(run_folder)
        self.device = device
        self.is_main = is_main
        self.throughput = Throughput(flops_per_token, device, num_ranks)
        self.tokens_seen = 0
        self.next_is_first = True
        self.jsonl: JsonLines | None = None
        self.tensorboard: TensorBoard | None = None
        self.console: Console | None = None

    def start(self, step: int, tokens_seen: int) -> None:
        """Start the clock after `step` steps: 0 for a new run, the checkpoint's step for a resumed one. Records of
        later steps, written before an interruption, are removed, so the file keeps one line per step."""
        self.tokens_seen = tokens_seen
        self.next_is_first = True
        if self.is_main:
            self._open_outputs(step)
        self.throughput.start()

    def log(
        self,
        step: int,
        *,
        loss: Tensor | float,
        aux_loss: Tensor | float,
        grad_norm: Tensor | float,
        lr: float,
        num_tokens: int,
        tokens_per_expert: dict[str, Tensor],
        num_skipped: Tensor | int,
        num_reruns: int,
    ) -> dict[str, Any] | None:
        """Count step `step` (the first is 1). If it is logged, write and return its record.

        Shapes: `loss`, `aux_loss`, `grad_norm`, `num_skipped` 0-dim; `tokens_per_expert` layer name -> [E].
        Units: `num_tokens` are the tokens of this step on all ranks; `num_skipped` and `num_reruns` are steps since the
        start of this process.
        """
        self.tokens_seen += num_tokens
        self.throughput.count(num_tokens)
        if self.console is not None:
            self.console.advance()
        is_first, self.next_is_first = self.next_is_first, False
        if not (is_first or step % self.recipe.metrics.every_steps == 0 or step == self.recipe.train.steps):
            return None
        loads = expert_loads(tokens_per_expert)
        scalars = read_scalars([loss, aux_loss, grad_norm, num_skipped, *loads.values()])
        measured = self.throughput.measure()  # after the read: the device has finished the step
        record: dict[str, Any] = {
            "step": step,
            **dict(zip(("loss", "aux_loss", "grad_norm"), scalars[:3], strict=True)),
            "lr": lr,
            "tokens_seen": self.tokens_seen,
            **measured,
            "memory_gib": peak_memory_gib(self.device),
            "expert_load": dict(zip(loads, scalars[4:], strict=True)),
            "skipped_steps": int(scalars[3]),
            "rerun_steps": num_reruns,
        }
        if forced := self.recipe.train.forced_routing:
            record["forced_routing"] = forced
        self._write(record)
        return record

    def log_validation(self, step: int, loss: Tensor | float) -> dict[str, Any]:
        """Write the loss on held-out sequences after `step` steps."""
        record = {"step": step, "validation_loss": read_scalars([loss])[0]}
        self._write(record)
        return record

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Stop the clock during a validation or a save, so that throughput covers only training steps. Synchronises
        with the device first: pending steps count as training time."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        with self.throughput.paused():
            yield

    def close(self) -> None:
        """Flush and close every output."""
        for output in (self.tensorboard, self.console):
            if output is not None:
                output.close()
        self.tensorboard = self.console = None

    def _open_outputs(self, step: int) -> None:
        self.close()
        self.run_folder.mkdir(parents=True, exist_ok=True)
        self.jsonl = JsonLines(self.run_folder / "metrics.jsonl")
        self.jsonl.drop_after(step)
        if self.recipe.metrics.tensorboard:
            self.tensorboard = TensorBoard(self.run_folder / "tensorboard", step)
        unit = "GPU" if self.device.type == "cuda" else "process"
        self.console = Console(self.recipe.train.steps, step, unit, has_bar=self.recipe.metrics.progress_bar)

    def _write(self, record: dict[str, Any]) -> None:
        for output in (self.jsonl, self.tensorboard, self.console):
            if output is not None:
                output.write(record)
