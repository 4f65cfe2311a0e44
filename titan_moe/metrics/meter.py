"""Write one record per logged step to the outputs of `[metrics]`: console, JSON lines, TensorBoard, W&B."""

import logging
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from titan_moe.config.recipe import Recipe
from titan_moe.metrics.collapse import CollapseWarning
from titan_moe.metrics.console import Console, format_start
from titan_moe.metrics.experts import expert_loads, idle_experts, load_map, overload_factors, read_scalars, read_values
from titan_moe.metrics.explosion import ExplosionWarning
from titan_moe.metrics.jsonl import JsonLines
from titan_moe.metrics.load_image import draw_loads
from titan_moe.metrics.settings import important_settings
from titan_moe.metrics.table import record_of
from titan_moe.metrics.tensorboard import TensorBoard
from titan_moe.metrics.throughput import Throughput
from titan_moe.metrics.weights_and_biases import WeightsAndBiases

logger = logging.getLogger("titan_moe")

LOGGED_STEPS_PER_IMAGE = 10
"""Logged steps for each image of the loads; the first one has one."""


class Meter:
    """Count every step. Log the first one after a start, every `metrics.every_steps`-th, and the last of the run.

    On other steps it reads nothing from the device, so the host can run ahead. A logged step takes one copy from the
    device: scalars and token counts. All ranks make the same calls, but only rank 0 writes. What is on the device must
    already be reduced over ranks: no collective is called here.
    """

    def __init__(
        self,
        recipe: Recipe,
        run_folder: Path,
        *,
        flops_per_token: float | None,
        device: torch.device,
        num_ranks: int,
        is_main: bool,
        peak_memory_gib: Callable[[], float],
    ) -> None:
        """`flops_per_token` are those of training; None: unknown. `peak_memory_gib` reads the peak of memory so far, at
        logged steps."""
        self.recipe = recipe
        self.run_folder = Path(run_folder)
        self.device = device
        self.is_main = is_main
        self.throughput = Throughput(flops_per_token, device, num_ranks)
        self.peak_memory_gib = peak_memory_gib
        self.tokens_seen = 0
        self.next_is_first = True
        self.num_logged = 0  # of this process
        self.is_new_run = True
        self.last_losses: dict[str, float] = {}
        """The newest training and validation loss."""
        self.collapse = CollapseWarning(recipe.model.moe)
        self.explosion = ExplosionWarning(recipe.model.vocab_size)
        self.jsonl: JsonLines | None = None
        self.charts: list[TensorBoard | WeightsAndBiases] = []
        self.console: Console | None = None

    def start(self, step: int, tokens_seen: int) -> None:
        """Start the clock after `step` steps: 0 for a new run, the checkpoint's step for a resumed one. Records of
        later steps, written before an interruption, move to another file, so that one line per step is left."""
        self.tokens_seen = tokens_seen
        self.next_is_first = True
        self.is_new_run = step == 0
        if self.is_main:
            self._open_outputs(step)
        self.throughput.start()

    def log(
        self,
        step: int,
        *,
        metrics: Mapping[str, Tensor],
        tokens_per_expert: Mapping[str, Tensor],
        num_tokens: int,
        **known: Any,
    ) -> dict[str, Any] | None:
        """Count step `step` (the first is 1). If it is logged, write and return its record.

        `metrics` are scalars on the device, `tokens_per_expert` [E] by layer. `num_tokens` are the tokens of this step
        on all ranks. `known` are metrics of the host.
        """
        self.tokens_seen += num_tokens
        self.throughput.count(num_tokens)
        if self.console is not None:
            self.console.advance()
        is_first, self.next_is_first = self.next_is_first, False
        if not (is_first or step % self.recipe.metrics.every_steps == 0 or step == self.recipe.train.steps):
            return None
        values = read_values([*metrics.values(), *tokens_per_expert.values()])
        counts = dict(zip(tokens_per_expert, values[len(metrics) :], strict=True))
        read = {
            name: value.item() if metrics[name].is_floating_point() else int(value)
            for name, value in zip(metrics, values, strict=False)
        }
        known |= read | self.throughput.measure()  # after the read: the device has finished the step
        known |= {"tokens_seen": self.tokens_seen, "memory_gib": self.peak_memory_gib()}
        known |= routing_record(counts, self.recipe.parallel.ep) | {"forced_load": self.recipe.train.forced_load}
        record = record_of(step, known, self.recipe)
        self._write(record)
        self.last_losses["loss"] = record["loss"]
        if self.is_main:
            self._warn_and_draw(record, counts, is_start=is_first and self.is_new_run)
        self.num_logged += 1
        return record

    def log_validation(
        self, step: int, loss: Tensor | float, sets: Mapping[str, Tensor | float] | None = None
    ) -> dict[str, Any]:
        """Write the loss on held-out sequences after `step` steps, and on those of each set of `validation.sets`."""
        losses = {"validation_loss": loss} | {f"validation_loss/{name}": value for name, value in (sets or {}).items()}
        record = record_of(step, dict(zip(losses, read_scalars(list(losses.values())), strict=True)), self.recipe)
        self._write(record)
        self.last_losses["validation loss"] = record["validation_loss"]
        return record

    def log_data_change(self, step: int, before: str, now: str) -> None:
        """Record that the run goes on with other data after `step` steps: the fingerprints of both."""
        if self.jsonl is not None:
            self.jsonl.write({"step": step, "data_before": before, "data": now})

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
        for output in (*self.charts, self.console):
            if output is not None:
                output.close()
        self.charts, self.console = [], None

    def _open_outputs(self, step: int) -> None:
        self.close()
        self.run_folder.mkdir(parents=True, exist_ok=True)
        self.jsonl = JsonLines(self.run_folder / "metrics.jsonl")
        self.jsonl.drop_after(step)
        if self.recipe.metrics.tensorboard:
            self.charts.append(TensorBoard(self.run_folder / "tensorboard", step, important_settings(self.recipe)))
        if self.recipe.metrics.wandb:
            self.charts.append(WeightsAndBiases(self.recipe, self.run_folder))
        unit = "GPU" if self.device.type == "cuda" else "process"
        self.console = Console(self.recipe.train.steps, step, unit, has_bar=self.recipe.metrics.progress_bar)

    def _warn_and_draw(self, record: dict[str, Any], counts: dict[str, Tensor], *, is_start: bool) -> None:
        """Describe the routing of a new run once, warn of an explosion or a collapse, and draw the loads now and then;
        `is_start` if the record is that of a run's first step."""
        self.explosion.see(record["step"], record["loss"], is_start=is_start)
        if not counts:
            return
        if is_start:
            logger.info("%s", format_start(record, sum(map(len, counts.values()))))
            for layer in (layer for layer, count_E in counts.items() if not count_E.any()):
                logger.warning("%s counts no tokens: its router does not pass its routing to `self.balance`", layer)
        self.collapse.see(record["step"], record["expert_load"])
        has_one_width = len({len(count_E) for count_E in counts.values()}) == 1
        if self.charts and has_one_width and self.num_logged % LOGGED_STEPS_PER_IMAGE == 0:
            image_HW = draw_loads(load_map(counts), [_layer_of(name) for name in counts])
            for output in self.charts:
                output.write_loads(image_HW, record["step"])

    def _write(self, record: dict[str, Any]) -> None:
        for output in (self.jsonl, *self.charts, self.console):
            if output is not None:
                output.write(record)


def _layer_of(name: str) -> str:
    """The number of a layer, from the name of its MoE module, such as `layers.1.feed_forward`."""
    return next((word for word in name.split(".") if word.isdecimal()), name)


def routing_record(tokens_per_expert: dict[str, Tensor], ep: int) -> dict[str, Any]:
    """The fields of a record about routing, from counts on the host.

    `expert_load` is the busiest expert over the mean, by layer. `idle_experts` had no token: their number in all layers
    and in the worst one. With several ep ranks, `overload` has Megatron Core's overload factors and `busiest_rank` the
    ep rank with the most tokens.
    """
    idle = [int(number) for number in idle_experts(tokens_per_expert).values()]
    record: dict[str, Any] = {
        "expert_load": {layer: load.item() for layer, load in expert_loads(tokens_per_expert).items()},
        "idle_experts": {"sum": sum(idle), "max": max(idle)} if idle else {},
    }
    if ep > 1 and tokens_per_expert:
        overload = overload_factors(tokens_per_expert, ep)
        record["overload"] = {name: getattr(overload, name).item() for name in ("avg", "max", "cum")}
        record["busiest_rank"] = int(overload.busiest_rank)
    return record
