"""Turn what a step leaves on the device into one record a logged step, for every reader that the recipe asks for."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from titan_moe.config.recipe import Recipe
from titan_moe.metrics.experts import expert_loads, read
from titan_moe.metrics.jsonl import JsonLines
from titan_moe.metrics.progress import Progress
from titan_moe.metrics.tensorboard import TensorBoard
from titan_moe.metrics.throughput import Throughput, peak_memory_gib


class Meter:
    """Count every step and report some: the first after a start, each `metrics.every_steps`, and the last of the run.

    Between those nothing is read from the device, so the host may run ahead of it. All ranks make the same calls; the
    main rank alone writes. `loss`, `grad_norm` and the counts must be whole already: no collective happens here.
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
        total_steps: int,
    ) -> None:
        self.recipe = recipe
        self.run_folder = Path(run_folder)
        self.device = device
        self.is_main = is_main
        self.total_steps = total_steps
        self.throughput = Throughput(flops_per_token, device, num_ranks)
        self.tokens_seen = 0
        self.next_is_first = True
        self.lines: JsonLines | None = None
        self.curves: TensorBoard | None = None
        self.progress: Progress | None = None

    def start(self, step: int, tokens_seen: int) -> None:
        """Start the clock after `step` steps are done: 0 for a new run, the checkpoint's for a resumed one.

        Records of later steps, which a run left before it was stopped, are dropped: the file stays one line a step.
        """
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
        """Count step number `step` (the first is 1) and, if it is a logged one, write and return its record.

        Shapes: `loss`, `aux_loss`, `grad_norm` 0-dim; `tokens_per_expert` [E] a layer, by the layer's name.
        Units: `num_tokens` are the tokens of this step on all ranks; `num_skipped` (0-dim) and `num_reruns` are steps
        since the start of this process.
        """
        self.tokens_seen += num_tokens
        self.throughput.count(num_tokens)
        if self.progress is not None:
            self.progress.advance()
        if not self._is_logged(step):
            return None
        loads = expert_loads(tokens_per_expert)
        scalars = read([loss, aux_loss, grad_norm, num_skipped, *loads.values()])
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
        if self.recipe.train.forced_routing:
            record["forced_routing"] = self.recipe.train.forced_routing
        self._write(record)
        return record

    def log_validation(self, step: int, loss: Tensor | float) -> dict[str, Any]:
        """Write the loss on held-out sequences after `step` steps."""
        record = {"step": step, "validation_loss": read([loss])[0]}
        self._write(record)
        return record

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Stop the clock for a validation or a save, so that throughput speaks of training steps.

        Waits for the device first: the steps that it has still to do belong on the clock.
        """
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        with self.throughput.paused():
            yield

    def close(self) -> None:
        """Flush and close every output."""
        if self.curves is not None:
            self.curves.close()
        if self.progress is not None:
            self.progress.close()
        self.curves = self.progress = None

    def _is_logged(self, step: int) -> bool:
        is_first, self.next_is_first = self.next_is_first, False
        return is_first or step % self.recipe.metrics.every_steps == 0 or step == self.total_steps

    def _open_outputs(self, step: int) -> None:
        self.close()
        self.run_folder.mkdir(parents=True, exist_ok=True)
        self.lines = JsonLines(self.run_folder / "metrics.jsonl")
        self.lines.drop_after(step)
        if self.recipe.metrics.tensorboard:
            self.curves = TensorBoard(self.run_folder / "tensorboard", step)
        unit = "GPU" if self.device.type == "cuda" else "process"
        self.progress = Progress(self.total_steps, step, unit, has_bar=self.recipe.metrics.progress_bar)

    def _write(self, record: dict[str, Any]) -> None:
        if self.lines is not None:
            self.lines.write(record)
        if self.curves is not None:
            self.curves.write(record)
        if self.progress is not None:
            self.progress.tell(record)
