"""Save and resume a run with torch.distributed.checkpoint. The last complete checkpoint is never lost."""

import logging
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import suppress
from functools import cached_property, partial
from math import isfinite
from pathlib import Path
from typing import Any, Protocol

import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.stateful import Stateful

from titan_moe.checkpoint import base, storage
from titan_moe.checkpoint.data_change import reason_to_accept, record_bad_data, with_unread
from titan_moe.checkpoint.find import HUGGING_FACE
from titan_moe.checkpoint.folders import METADATA_FILE, SOURCE_FOLDER, CheckpointFolders
from titan_moe.checkpoint.hf import check_exportable, load_adapter, load_hf, save_hf
from titan_moe.checkpoint.hf_describe import cannot_export
from titan_moe.checkpoint.hf_export import dtype_of, keep_source, left_out, source_of
from titan_moe.checkpoint.hf_folder import CONFIG_FILE
from titan_moe.checkpoint.keep import kept_steps
from titan_moe.checkpoint.manifest import Manifest
from titan_moe.checkpoint.masters import MasterState
from titan_moe.checkpoint.merged import factor_names, frozen_names
from titan_moe.checkpoint.rank_zero import run_on_rank_zero
from titan_moe.checkpoint.read import CheckpointMismatch, load_weights_of, read_fitting, verified
from titan_moe.checkpoint.rng import RngState
from titan_moe.checkpoint.upcycle import is_drawn
from titan_moe.checkpoint.weights import weight_of
from titan_moe.config import Recipe, RecipeError
from titan_moe.config.resume import compare, flatten
from titan_moe.parameters import fused_rows
from titan_moe.titan import LRSchedulersContainer, OptimizersContainer, build_checkpoint_manager
from titan_moe.titan.checkpoints import MODEL_KEY

FAILURE_SAVE_TIMEOUT_S = 120.0

logger = logging.getLogger(__name__)


class DataPosition(Protocol):
    """The position of a run in its data."""

    def fingerprint(self) -> str:
        """Describe the content of the data. Called on rank 0."""

    def state_dict(self) -> dict[str, Any]: ...
    def load_state_dict(self, state_dict: dict[str, Any]) -> None: ...


class Checkpointer:
    """Save and load the full state of a run: weights, buffers, optimizer, schedule, data position, random states.

    torchtitan's CheckpointManager writes and reads the files. This class decides on rank 0 which checkpoints exist.
    The constructor and all methods are collective. A save is complete when its metadata file is written, which happens
    after all ranks' data and after the manifest: recipe, fingerprint of the data, and a hash of every file. Older
    checkpoints are removed only after a newer one is complete, and a step that is already saved is not written again.

    A load reads every file once to compare its hash, the files divided over the ranks, and runs nothing that a file
    names. `config.resume` is the table of the fields of the recipe that may differ.

    `loader` and `train_state` are Stateful; their state dicts are equal on all ranks and have constant keys.
    """

    def __init__(
        self,
        recipe: Recipe,
        run_folder: Path,
        model_parts: list[nn.Module],
        optimizers: OptimizersContainer,
        schedulers: LRSchedulersContainer,
        loader: DataPosition,
        train_state: Stateful,
    ) -> None:
        self.recipe, self.config, self.model_parts, self.loader = recipe, recipe.checkpoint, model_parts, loader
        self.run_folder = Path(run_folder).absolute()
        self.folders = CheckpointFolders(self.run_folder / "checkpoints")
        self.data_change: tuple[str, str] | None = None
        """On rank 0, after the load of a checkpoint of other data: the fingerprint of that data, and of this run's."""
        self.last_update: int | None = None
        """The last step that has changed the weights, as of the newest save; None before the first one."""
        self.validation_loss: float | None = None
        """Of the state that is saved next or was saved last, if there was a validation."""
        self.group = dist.new_group(backend="gloo")  # host objects are exchanged without device synchronisation
        self.is_main = dist.get_rank() == 0
        if self.is_main:
            for step in self.folders.remove_incomplete():
                logger.warning("removed %s: its save was interrupted", self.folders.path(step))
        device = next(parameter for part in model_parts for parameter in part.parameters()).device
        parts = [part for part in model_parts if part.state_dict()]  # a stage may be empty
        self.model_state = MasterState(parts)
        if not self.config.saves_frozen:
            frozen, drawn = frozen_names(parts), self.config.upcycle.granularity > 0
            self.model_state.left_out = frozenset(name for name in frozen if not (drawn and is_drawn(name)))
        self.manager = build_checkpoint_manager(
            self.folders.root,
            model_parts=parts,
            model_state=self.model_state,
            optimizers=optimizers,
            schedulers=schedulers,
            loader=loader,
            states={"train_state": train_state, "rng": RngState(device, self.group)},
            is_async=self.config.is_async,
            save=self._write,
            load=partial(storage.load, rows_of=self._rows_of),
        )

    def load(self) -> bool:
        """Resume from the run's newest complete checkpoint. Without one, load the weights of `checkpoint.load_from`.

        Returns: whether anything was loaded. A resume also loads `train_state`.
        Raises: ValueError if `checkpoint.load_from` is not a checkpoint; CheckpointMismatch if one does not fit or is
        damaged; RecipeError if the recipe or the data has changed in a way that a resume does not allow.
        """
        if not self.config.export_hf_at_end:
            return self._load()
        self._check_export()
        is_loaded = self._load()
        if is_loaded:
            self._check_export()  # of biases, too, that the checkpoint has
        return is_loaded

    def _load(self) -> bool:
        run_on_rank_zero(lambda: self._data, self.group)  # of the data as it is now, not as it may be at the first save
        steps = run_on_rank_zero(self.folders.complete_steps, self.group)
        if steps:
            folder = self.folders.path(steps[-1])
            earlier = f"or remove it: step-{steps[-2]} exists too" if len(steps) > 1 else "or set another run.folder"
            manifest = verified(folder, f"restore it from a copy, {earlier}", self.group)
            way_out = f"restore the recipe that wrote it, {earlier}"
            run_on_rank_zero(lambda: self._compare_with(folder, manifest), self.group)
            if not self.config.saves_frozen:
                self._load_origin()
            self._read(folder, lambda: self.manager.load(step=steps[-1]), way_out)
            return True
        self._load_origin()
        if self.config.load_adapter:
            load_adapter(self.model_parts, self.config.load_adapter, self._source)
        return bool(self.config.load_from or self.config.load_adapter)

    def _load_origin(self) -> None:
        """Load the weights of `checkpoint.load_from`."""
        if self.config.load_from.startswith(HUGGING_FACE):
            folder = self._hugging_face_folder()
            wanted = self.config
            skipped = load_hf(self.model_parts, folder, wanted.load_without, wanted.upcycle, self.recipe.run.seed)
            self._keep_source(folder, skipped)
        elif self.config.load_from:
            folder = Path(self.config.load_from).expanduser().absolute()
            self._require_checkpoint(folder)
            manifest = verified(folder, "correct checkpoint.load_from, or restore it from a copy", self.group)
            if manifest is not None and (lack := base.lacks(manifest.recipe)):
                start = "load_from what it began with, with its adapter in checkpoint.load_adapter (export --adapter)"
                raise CheckpointMismatch(f"checkpoint.load_from = {self.config.load_from!r}: {lack}; {start}")
            run_on_rank_zero(lambda: self._compare_model_with(folder, manifest), self.group)
            way_out = "correct checkpoint.load_from, or use the [model] that it was written with"
            factors = frozenset(factor_names(self.model_state.model))
            load_weights_of(self.model_state.model, folder, self.group, factors, way_out)
            if origin := source_of(folder):
                self._keep_source(origin, left_out(origin))

    def save(
        self, step: int, is_last: bool = False, num_skipped: int = 0, validation_loss: float | None = None
    ) -> None:
        """Save the state after `step` optimizer steps. The last save of a run is synchronous. Waits for an earlier
        asynchronous save first. Step 0 is not saved: a fresh start gives the same state.

        The last `num_skipped` steps have changed no weights. Checkpoints from before them are then kept, and what is
        saved since then is counted for itself: up to `keep_latest` of each. `validation_loss` is that after this step,
        if there was a validation; `keep_best` compares them.
        """
        self._finish_save()
        self.last_update, self.validation_loss = step - num_skipped, validation_loss
        if step == 0 or run_on_rank_zero(lambda: self._is_saved(step), self.group):
            return
        self.manager.save(step, last_step=is_last)
        if is_last or not self.config.is_async:
            self._remove_old()

    def export_hf(self, step: int) -> Path:
        """Write the weights as a Hugging Face checkpoint into `hf/step-N` of the run folder, unless it is there."""
        folder, origin = self.run_folder / "hf" / f"step-{step}", self._source
        if not run_on_rank_zero(folder.exists, self.group):
            save_hf(self.model_parts, folder, dtype_of(origin), source=origin, tokenizer=self.recipe.data.tokenizer)
        return folder

    @property
    def _source(self) -> Path | None:
        """The folder with config.json and tokenizer of the checkpoint that the run has begun with, if any."""
        folder = self.run_folder / SOURCE_FOLDER
        return folder if run_on_rank_zero(folder.exists, self.group) else None

    def _keep_source(self, source: Path, skipped: dict[str, list[str]]) -> None:
        run_on_rank_zero(lambda: keep_source(source, self.run_folder / SOURCE_FOLDER, skipped) and None, self.group)

    def _hugging_face_folder(self) -> Path:
        return Path(self.config.load_from.removeprefix(HUGGING_FACE)).expanduser().absolute()

    def _check_export(self) -> None:
        is_of_hf = self.config.load_from.startswith(HUGGING_FACE)
        source = self._source or (self._hugging_face_folder() if is_of_hf else None)
        try:
            check_exportable(self.model_parts, source, self.run_folder)
        except (ValueError, TypeError) as error:
            raise RecipeError([cannot_export(str(error))]) from error

    def record_bad_data(self, problem: str) -> None:
        """Let the run's checkpoints go on with other data, which is repaired. Without a step there is none."""
        if self.is_main:
            record_bad_data(self.run_folder, self._data, problem)

    def finish_save_after_failure(self) -> None:
        """After a failure of the run, wait up to FAILURE_SAVE_TIMEOUT_S for a pending asynchronous save. The save needs
        the process group and the other ranks, which still wait in a collective with the failed one."""
        if self.manager.save_future is not None:
            logger.warning("the run has failed; its last checkpoint is still being written")
            with suppress(Exception):  # the run's own exception is the one to report
                self.manager.save_future.result(FAILURE_SAVE_TIMEOUT_S)

    def close(self) -> None:
        """Wait for a pending asynchronous save, then end the manager's threads. Needs the process group."""
        self._finish_save()
        self.manager.close()
        dist.barrier(self.group)

    def _finish_save(self) -> None:
        """Wait until a pending save is complete. Raises its exception if it failed."""
        if self.manager.save_future is not None:
            self.manager.save_future.result()
            self.manager.save_future = None
        self._remove_old()

    def _remove_old(self) -> None:
        if self.is_main and self.config.keep_latest > 0 and self.last_update is not None:
            kept = kept_steps(self.folders, self.config)
            self.folders.keep_newest(self.config.keep_latest, self.last_update, kept)

    def _is_saved(self, step: int) -> bool:
        """Return whether a step has a complete checkpoint. Removes the remains of failed saves."""
        self.folders.remove_incomplete()
        return step in self.folders.complete_steps()

    @cached_property
    def _data(self) -> str:
        return self.loader.fingerprint()

    @cached_property
    def _base(self) -> str:
        """The fingerprint of `checkpoint.load_from`, which has what checkpoints lack; empty if they lack nothing."""
        if self.config.saves_frozen:
            return ""
        folder = Path(self.config.load_from.removeprefix(HUGGING_FACE)).expanduser()
        return base.fingerprint(folder) if folder.is_dir() else "absent"

    def _write(self, state: dict[str, Any], folder: Path, group: dist.ProcessGroup | None) -> Future[Any] | None:
        data, loss = self._data if self.is_main else "", self.validation_loss
        loss = loss if loss is not None and isfinite(loss) else None
        manifest = Manifest(flatten(self.recipe), data, {}, loss, self._base if self.is_main else "")
        return storage.save(state, folder, manifest, group, self._rows_of)

    @cached_property
    def _fused_rows(self) -> dict[str, tuple[int, ...]]:
        return {name: rows for part in self.model_parts for name, rows in fused_rows(part).items()}

    def _rows_of(self, name: str) -> tuple[int, ...]:
        """The rows of each matrix of a fused weight, or of a moment of one."""
        return self._fused_rows.get(weight_of(name), ())

    def _compare_with(self, folder: Path, manifest: Manifest | None) -> None:
        """Compare recipe and data with those of a run's checkpoint.

        Raises: RecipeError for what may not change. The log names what may.
        """
        if manifest is None:
            logger.warning("%s has no manifest: its files, its recipe and its data cannot be compared", folder)
            return
        changes = compare(manifest.recipe, self.recipe)
        way_out = "or start another run.folder from its weights with checkpoint.load_from"
        refused = [
            f"{change} differs from {folder} and may not change in a run; set it back, {way_out}"
            + (", if they fit this model" if change.startswith("model.") else "")
            for change in changes.refused
        ]
        self._data = with_unread(self._data, manifest.data)
        if with_unread(manifest.data, self._data) != self._data and not refused:
            words = f"the data differs from that of {folder}: it was {manifest.data}, it is {self._data}"
            if reason := reason_to_accept(self.run_folder, manifest.data, self.config.accept_changed_data):
                logger.warning("%s; accepted: %s", words, reason)
                self.data_change = manifest.data, self._data
            else:
                switch = "if the change is meant, set checkpoint.accept_changed_data = true"
                refused = [f"{words}; restore it, {way_out}; {switch}"]
                if in_data := [change for change in changes.logged if change.startswith("data.")]:
                    refused.append(f"it may differ because of {'; '.join(in_data)}: set it back")
        if manifest.base and not self.config.saves_frozen and manifest.base != self._base:
            words = f"was {manifest.base}, and checkpoint.load_from = {self.config.load_from!r} is {self._base}"
            refused.append(f"the base of {folder}, which has its frozen weights, {words}; restore it, {way_out}")
        if refused:
            raise RecipeError(refused)
        if changes.logged:
            logger.warning("the recipe has changed since %s: %s", folder, "; ".join(changes.logged))

    def _compare_model_with(self, folder: Path, manifest: Manifest | None) -> None:
        """Log how `[model]` differs from that of a checkpoint of which only the weights are loaded."""
        if manifest is None:
            logger.warning("%s has no manifest: its files and its [model] cannot be compared", folder)
            return
        changes = [change for change in compare(manifest.recipe, self.recipe).refused if change.startswith("model.")]
        if changes:
            logger.warning("the model differs from that of %s: %s", folder, "; ".join(changes))

    def _read(self, folder: Path, read: Callable[[], object], way_out: str) -> None:
        """Load with `read`, and fail if the checkpoint's weights have other names or shapes than the model's.

        Raises: CheckpointMismatch, with one sentence for the failures that DCP collects from all ranks.
        """
        other_states = tuple(name for name in self.manager.states if name != MODEL_KEY)
        own = self.model_state.state_dict()
        read_fitting(folder, own, self.model_parts, read, way_out, self.group, other_states)

    def _require_checkpoint(self, folder: Path) -> None:
        if run_on_rank_zero(lambda: (folder / METADATA_FILE).is_file(), self.group):
            return
        steps = [
            f"{below}step-{step}"
            for below in ("", "checkpoints/")
            for step in CheckpointFolders(folder / below).complete_steps()
        ]
        found = f"complete ones below it: {', '.join(steps)}" if steps else "none is below it"
        if (folder / CONFIG_FILE).is_file():
            found = f"a folder of Hugging Face is {HUGGING_FACE}{self.config.load_from}"
        raise ValueError(
            f"checkpoint.load_from = {self.config.load_from!r} is not a complete checkpoint: it must be a folder "
            f"`step-N` with a {METADATA_FILE} file ({found})"
        )
