"""The loop: from a recipe to a trained model in a run folder."""

import gc
import logging
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from datetime import timedelta
from functools import partial
from pathlib import Path
from signal import SIGINT, Signals

import torch
import torch.distributed as dist

from titan_moe.checkpoint.dcp import Checkpointer
from titan_moe.checkpoint.hf_describe import export_problems
from titan_moe.checkpoint.rank_zero import run_on_rank_zero
from titan_moe.checkpoint.read import CheckpointMismatch
from titan_moe.config import Recipe, RecipeError, refusals
from titan_moe.config.absolute_paths import with_absolute_paths
from titan_moe.config.context import sequence_shard
from titan_moe.config.kernels import DEFAULT_KERNELS
from titan_moe.config.model import ModelConfig
from titan_moe.config.parallel import resolve
from titan_moe.config.run_length import with_steps
from titan_moe.data.loader import Loader, check_batch, open_data
from titan_moe.data.packing import Batch
from titan_moe.layers.attention import attention_backend
from titan_moe.layers.hash_router import loaded_otherwise
from titan_moe.metrics.meter import Meter
from titan_moe.metrics.table import EPOCH_OF_SOURCE
from titan_moe.metrics.weights_and_biases import require_wandb
from titan_moe.profile.trace import StepTracer, Tracer
from titan_moe.run.device import is_first_of_node
from titan_moe.run.failure import EXIT_FAILED, record_failure
from titan_moe.run.process import EXIT_BY_SIGNAL, StopSignal, process_group, wait_for_all_ranks
from titan_moe.run.run_lock import run_lock
from titan_moe.run.unsaved import UnsavedWarning
from titan_moe.run.watchdog import Watchdog
from titan_moe.titan import GarbageCollection
from titan_moe.training.adapter_files import export_adapter
from titan_moe.training.build import assemble, build_unchecked
from titan_moe.training.count_class import count_model
from titan_moe.training.evaluate import evaluating, mean_of, validation_loss
from titan_moe.training.messages import describe_divergence, log_data, log_end, log_start
from titan_moe.training.model_class import check_loss
from titan_moe.training.progress import Progress
from titan_moe.training.read_ahead import ReadAhead, UnreadableDataError
from titan_moe.training.resolve_auto import resolve_auto
from titan_moe.training.run_folder import command_to_go_on, open_run_folder
from titan_moe.training.sample import sample
from titan_moe.training.writable import writable_folders

logger = logging.getLogger("titan_moe")


def run(recipe: Recipe, tracer: Tracer | None = None) -> None:
    """Train a recipe to its last step, resuming if its run folder has a checkpoint.

    A `tracer` takes the place of that of `[profile]`; once it is done, the run ends.

    Raises: RecipeError if the recipe cannot run here: a rule broken on this number of ranks, missing data, a checkpoint
    that does not fit, a run folder in use; or, once the run is saved, if its data cannot be read on. SystemExit after
    Ctrl-C, once the run is saved, and if it has diverged: its last step is then not saved. After SIGTERM it returns.
    """
    with process_group(recipe.run) as device, Watchdog(recipe.run) as watchdog:
        recipe = replace(recipe, run=replace(recipe.run, device=device.type))
        if problems := [*refusals(recipe, dist.get_world_size()), *export_problems(recipe)]:
            raise RecipeError(problems)
        with ExitStack() as lock, attention_backend(recipe.perf.attention):
            run_on_rank_zero(lambda: lock.enter_context(run_lock(Path(recipe.run.folder))))
            lock.enter_context(writable_folders(recipe))
            if recipe.metrics.wandb:
                run_on_rank_zero(require_wandb)
            exit_code = Trainer(recipe, device, watchdog, tracer).train()
            wait_for_all_ranks(device)
    if exit_code:
        raise SystemExit(exit_code)


class Trainer:
    """One run on this rank: model, data, optimizer, checkpoints, metrics."""

    def __init__(self, recipe: Recipe, device: torch.device, watchdog: Watchdog, tracer: Tracer | None = None) -> None:
        self.recipe, self.device, self.watchdog = recipe, device, watchdog
        self.run_folder = Path(recipe.run.folder)
        self.tracer = tracer or StepTracer(recipe.profile, self.run_folder, dist.get_rank())
        self.is_main = dist.get_rank() == 0
        counts = run_on_rank_zero(lambda: count_model(recipe, partial(build_unchecked, recipe, DEFAULT_KERNELS)))
        if self.is_main:
            log_start(recipe, counts, device)
        recipe = resolve_auto(recipe, device)
        # a timeout of days: tokenising a large corpus takes longer than the default one
        tokenising = dist.new_group(backend="gloo", timeout=timedelta(days=2))
        with _as_recipe_errors(ValueError, FileNotFoundError, ImportError):
            check_batch(recipe, resolve(recipe.parallel, dist.get_world_size()).dp)
            barrier, builds_cache = partial(dist.barrier, tokenising), is_first_of_node()
            data = open_data(recipe, self.run_folder, barrier, builds_cache=builds_cache)
            given, recipe = recipe, with_steps(recipe, data.source.training.samples_per_epoch)
        if self.is_main:
            log_data(recipe, data.source.size, data.source.training.samples_per_epoch, counts)
        if given.train.epochs and (problems := refusals(recipe, dist.get_world_size())):  # of its steps, known now
            raise RecipeError(problems)
        self.recipe = recipe = with_absolute_paths(recipe)
        torch.manual_seed(recipe.run.seed)
        self.meshes, self.model, self.parts, optimizers, self.schedule, self.runner = assemble(recipe, device)
        if recipe.metrics.sample_tokens and not hasattr(self.model, "generate"):
            problem = f'model.class = "{recipe.model.class_}" has no `generate`'
            raise RecipeError([f"{problem}; add it, or set metrics.sample_tokens = 0"])
        where = self.meshes.data_rank, self.meshes.sizes.dp
        shard = sequence_shard(recipe.parallel, self.meshes.context_rank)
        self.average = optimizers.average
        self.loader = Loader(recipe, *where, data.tokenizer, data.source, shard, partial(_gather, tokenising))
        if recipe.model.class_ != ModelConfig.class_:
            capacity = self.runner.step.capacity
            with capacity.unbounded():
                check_loss(self.model, self.parts, recipe, self.loader.tokenizer.vocab_size, device, capacity.check)
        torch.manual_seed(recipe.run.seed + self.meshes.data_rank)  # dropout differs between ranks with other data
        self.progress = Progress([*self.runner.step.controllers, *self.runner.controllers])
        self.validated: tuple[int, float] | None = None  # the step and the loss of the last validation
        self.num_skipped_in_row = 0  # steps since the last one with an update, as far as read from the device
        self.stop = StopSignal()
        self.unsaved = UnsavedWarning(recipe.checkpoint.every_steps, recipe.train.steps)
        self.checkpointer = Checkpointer(
            recipe, self.run_folder, self.parts, optimizers, self.schedule, self.loader, self.progress
        )
        self.meter = Meter(
            recipe,
            self.run_folder,
            flops_per_token=counts.flops_per_token,
            device=device,
            num_ranks=dist.get_world_size(),
            is_main=self.is_main,
            peak_memory_gib=lambda: self.runner.memory.gib,
        )

    @property
    def is_finished(self) -> bool:
        """Whether all steps of the recipe are done (or more, if the recipe was shortened since), or a trace is."""
        return self.tracer.is_done or self._has_all_steps

    @property
    def _has_all_steps(self) -> bool:
        return self.progress.step >= self.recipe.train.steps

    @property
    def has_diverged(self) -> bool:
        """Whether so many steps were skipped in a row that the run stops."""
        return 0 < self.recipe.train.max_skipped_in_row <= self.num_skipped_in_row

    def train(self) -> int:
        """Run the remaining steps, save, print a sample, and say how the run ended. Returns the exit code."""
        with _as_recipe_errors(ValueError, CheckpointMismatch):
            self.checkpointer.load()
            self._check_tables()
        if self.average is not None and self.progress.step == 0:  # of weights that were loaded
            self.average.restart()
        self._read_skipped()
        stopped_by, step, start = 0, self.progress.step, time.monotonic()
        if self.is_finished:
            ways_on = "a larger train.steps goes on, another run.folder starts anew"
            logger.info("%s is finished after step %d; %s", self.run_folder, step, ways_on)
        else:
            try:
                stopped_by = self._train_remaining_steps()
            except Exception as error:
                record_failure(error, self.recipe.run.folder)  # before others fail because of it
                self.watchdog.begin("the save before its failure")
                self.checkpointer.finish_save_after_failure()
                raise
        self.checkpointer.close()
        if self.has_diverged and step < self.progress.step:
            saved_steps = self.checkpointer.folders.complete_steps()
            problem = describe_divergence(self.run_folder, self.progress.step, self.num_skipped_in_row, saved_steps)
            record_failure(problem)
            if self.is_main:
                logger.error("%s", problem)
        elif self.is_finished and step < self.progress.step:
            steps, folders = (step + 1, self.progress.step), self.checkpointer.folders
            log_end(steps, time.monotonic() - start, self.meter.last_losses, folders)
        if stopped_by == SIGINT:
            return EXIT_BY_SIGNAL + stopped_by
        return EXIT_FAILED if self.has_diverged else 0

    def _check_tables(self) -> None:
        """Raises: ValueError if a checkpoint has other tables of hash layers than the recipe. Collective."""
        moe = self.recipe.model.moe
        if not moe.hash_table:
            return
        problem = loaded_otherwise(self.parts, moe.hash_layers, moe.hash_table)
        if found := [text for text in _gather(self.checkpointer.group, problem) if text]:
            raise ValueError(found[0])

    def _train_remaining_steps(self) -> int:
        if self.is_main:  # only now: a refused recipe leaves the one in the run folder as it was
            open_run_folder(self.recipe, is_new=self.progress.step == 0)
        if self.progress.step > 0:
            logger.info("continuing after step %d", self.progress.step)
        self.runner.resume(self.progress.step)
        self.data = ReadAhead(self.loader, self.recipe.train.steps - self.progress.step)
        with self.stop:
            self._run_steps()
            self.watchdog.begin("the end of the run")
            self._read_skipped()
            if self.recipe.checkpoint.save_last_step or self.stop.has_unreadable_data or not self.is_finished:
                self._save(is_last=True)
            if self._has_all_steps and not self.has_diverged:
                self._export()
        self.meter.close()
        if self.stop.has_unreadable_data:
            self._end_with_unreadable_data()
        for summary in filter(None, (controller.summary for controller in self.runner.controllers)):
            logger.info("%s", summary)
        if self.has_diverged:
            return 0
        if not self.is_finished:
            name = Signals(self.stop.number).name
            logger.info(
                "stopped by %s after step %d; to go on: %s", name, self.progress.step, command_to_go_on(self.run_folder)
            )
            return self.stop.number
        if self.recipe.metrics.sample_tokens and self.num_skipped_in_row == 0:
            self._write_sample()
        return 0

    def _export(self) -> None:
        """Write what the recipe wants of the last step."""
        wanted = self.recipe.checkpoint
        with self.watchdog.during("an export"):
            folders = [self.checkpointer.export_hf(self.progress.step)] if wanted.export_hf_at_end else []
            if wanted.export_adapter_at_end:
                folders.append(self.run_folder / "adapter" / f"step-{self.progress.step}")
                checkpoint = self.run_folder / "checkpoints" / f"step-{self.progress.step}"
                export = partial(export_adapter, checkpoint, folders[-1])
                run_on_rank_zero(lambda: None if folders[-1].exists() else export(), self.checkpointer.group)
        for folder in folders:
            logger.info("exported to %s", folder)

    def _run_steps(self) -> None:
        garbage = GarbageCollection(100)  # every 100 steps, at the same ones on all ranks
        self.tracer.start(self.runner, self.progress.step + 1)
        self.meter.start(self.progress.step, self.progress.tokens_seen)
        if self.checkpointer.data_change is not None:
            self.meter.log_data_change(self.progress.step, *self.checkpointer.data_change)
        try:
            self.stop.poll(self.data.read(), self._num_bad_rows)
            while not self.is_finished and not self.has_diverged:
                self.watchdog.begin_step(self.progress.step + 1)
                if self.stop.poll(self.data.read(), self._num_bad_rows):
                    break
                self._take_step()
                self.tracer.step()
                garbage.run(self.progress.step)
        except UnreadableDataError:
            self.stop.has_unreadable_data = True
        finally:
            self.runner.release()  # NCCL does not shut down while a CUDA graph holds collectives, after an error too
            gc.enable()
        self.tracer.close()

    @property
    def _num_bad_rows(self) -> int:
        """The bad rows that this rank counts for all: of a slice of the data its first rank, of a stream rank 0."""
        is_counted = self.is_main or (self.meshes.is_first_of_slice and not self.recipe.data.reads_whole_stream)
        return len(self.loader.bad_rows) if is_counted else 0

    def _end_with_unreadable_data(self) -> None:
        """End the run. After a bad row, let the next start accept other data, in which it is repaired. Collective.

        Raises: the errors of `ReadAhead.fail`.
        """
        step, (problem, is_bad_row) = self.progress.step, self.data.describe(self.checkpointer.group)
        if is_bad_row:
            self.checkpointer.record_bad_data(problem)
        saved = run_on_rank_zero(lambda: step in self.checkpointer.folders.complete_steps(), self.checkpointer.group)
        done = f"the run is saved after step {step}" if saved else f"nothing was saved after step {step}"
        self.data.fail(f"{problem} ({done}; to go on after the repair: {command_to_go_on(self.run_folder)})")

    def _take_step(self) -> None:
        recipe, progress = self.recipe, self.progress
        lr = self.schedule.lr
        batch = self.loader.next_step().to(self.device)
        result = self.runner(batch)
        progress.step += 1
        num_tokens = batch.num_sequences * self.meshes.sizes.dp * recipe.train.seq_len_tokens
        progress.tokens_seen += num_tokens
        known = self.runner.numbers | {"lr": lr, "bad_rows": self.stop.num_bad_rows, "epoch": self.loader.epoch}
        known |= {f"{EPOCH_OF_SOURCE}{name}": epoch for name, epoch in self.loader.epochs.items()}
        record = self.meter.log(
            progress.step,
            metrics=result.metrics,
            tokens_per_expert=result.tokens_per_expert,
            num_tokens=num_tokens,
            **known,
        )
        if self._is_due(recipe.validation.every_steps) or (recipe.validation.every_steps and self.is_finished):
            with self.watchdog.during("a validation"), self.meter.paused():
                self._validate()
        if record and self.is_main:
            self.unsaved.see(progress.step, record["step_ms"])
        is_saved = self._is_due(recipe.checkpoint.every_steps)
        if record or is_saved or self._is_due(recipe.train.max_skipped_in_row):
            self._read_skipped()
        if is_saved:
            with self.watchdog.during("a save"), self.meter.paused():
                self._save()

    def _validate(self) -> None:
        """Log the loss on each set of held-out data."""
        losses = {}
        for name in self.loader.validation_names:
            batches = self.data.read_together(partial(self._read_validation, name))
            with self.runner.step.capacity.unbounded():
                losses[name] = validation_loss(self.model, self.parts, batches, self.device, self.meshes)
        sets = {name: loss for name, loss in losses.items() if name}
        record = self.meter.log_validation(self.progress.step, mean_of(losses), sets)
        self.validated = self.progress.step, record["validation_loss"]
        self.runner.step.capacity.check()  # validation has exchanges too

    def _read_validation(self, name: str) -> list[Batch]:
        return list(self.loader.validation_batches(name))

    def _read_skipped(self) -> None:
        """Read the steps skipped in a row, which are equal on all ranks. Waits for the device."""
        self.num_skipped_in_row = int(self.runner.step.counts["skipped_in_row"])

    def _save(self, is_last: bool = False) -> None:
        """Save, unless the run has diverged, and say if the weights are those of an earlier step."""
        if self.has_diverged:
            return
        step, num_skipped = self.progress.step, self.num_skipped_in_row
        loss = self.validated[1] if self.validated is not None and self.validated[0] == step else None
        self.checkpointer.save(step, is_last=is_last, num_skipped=num_skipped, validation_loss=loss)
        if num_skipped and self.is_main:
            which = "its gradients" if num_skipped == 1 else f"the gradients of the last {num_skipped} steps"
            weights = f"step {step} is saved with the weights of step {step - num_skipped}"
            logger.warning("%s: %s were not finite; older checkpoints are kept", weights, which)

    def _is_due(self, every_steps: int) -> bool:
        return every_steps > 0 and self.progress.step % every_steps == 0

    def _write_sample(self) -> None:
        """Continue a held-out prompt, on all ranks; rank 0 prints it."""
        with evaluating(self.parts), self.runner.step.capacity.unbounded():
            text = sample(self.model, self.loader, self.recipe, self.device)
        if self.is_main:
            print(text, flush=True)


@contextmanager
def _as_recipe_errors(*errors: type[Exception]) -> Iterator[None]:
    """Raise errors about fields of the recipe as RecipeErrors, which the command line prints without a traceback."""
    try:
        yield
    except errors as error:
        logger.debug("refused because of this:", exc_info=error)
        raise RecipeError([str(error)]) from error


def _gather(group: dist.ProcessGroup, text: str) -> list[str]:
    """The texts of all ranks. Collective."""
    texts = [""] * dist.get_world_size(group)
    dist.all_gather_object(texts, text, group=group)
    return texts
