"""Save and resume a run with torch.distributed.checkpoint; once there is a whole checkpoint, there always is one."""

import logging
from collections import defaultdict
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint import FileSystemReader
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.stateful import Stateful

from titan_moe.checkpoint.folders import MARK, CheckpointFolders
from titan_moe.checkpoint.rank_zero import run_on_rank_zero
from titan_moe.checkpoint.rng import RngState
from titan_moe.config.train import CheckpointConfig
from titan_moe.titan import LRSchedulersContainer, OptimizersContainer, build_checkpoint_manager
from titan_moe.titan.checkpoints import MODEL_KEY

SECONDS_TO_RESCUE = 120.0
MOMENTS = "optimizer.state."
"""How names of moments begin; `.exp_avg` and the like follow their parameter's name."""

logger = logging.getLogger(__name__)


class CheckpointMisfit(RuntimeError):
    """A checkpoint that is whole but belongs to another model, or to other states."""


class Checkpointer:
    """All that a run needs to go on exactly: weights, persistent buffers, optimizer, schedule, data, random states.

    torchtitan's CheckpointManager writes and reads; what stands on disk is decided here, by the main rank alone. All
    ranks make a Checkpointer together and call each method together. A save becomes a checkpoint when its mark is
    written, after every rank's data; older ones go only when a newer one has its mark, and a step that is already
    saved is left alone, never overwritten.

    `loader` and `train_state` are Stateful; their state dicts are alike on all ranks and keep their keys over time.
    """

    def __init__(
        self,
        config: CheckpointConfig,
        run_folder: Path,
        model_parts: list[nn.Module],
        optimizers: OptimizersContainer,
        schedulers: LRSchedulersContainer,
        loader: Stateful,
        train_state: Stateful,
    ) -> None:
        self.config, self.model_parts = config, model_parts
        self.folders = CheckpointFolders(Path(run_folder).absolute() / "checkpoints")
        self.group = dist.new_group(backend="gloo")  # decisions travel between hosts, no device waits for them
        self.is_main = dist.get_rank() == 0
        if self.is_main:
            for step in self.folders.remove_incomplete():
                logger.warning("removed %s: its save was interrupted", self.folders.path(step))
        device = next(model_parts[0].parameters()).device
        self.manager = build_checkpoint_manager(
            self.folders.root,
            model_parts=model_parts,
            optimizers=optimizers,
            schedulers=schedulers,
            loader=loader,
            states={"train_state": train_state, "rng": RngState(device, self.group)},
            is_async=config.is_async,
        )

    def load(self) -> bool:
        """Resume from the newest complete checkpoint of the run, or else take the weights of `checkpoint.load_from`.

        Returns: whether anything was loaded. Whether it was a resume, `train_state` knows.
        Raises: ValueError when `checkpoint.load_from` is no checkpoint; CheckpointMisfit when one does not fit.
        """
        steps = run_on_rank_zero(self.folders.complete_steps, self.group)
        if steps:
            earlier = f", or remove it if it is damaged: step-{steps[-2]} is there too" if len(steps) > 1 else ""
            way_out = f"restore the recipe that wrote it, or set another run.folder for a fresh start{earlier}"
            self._read(self.folders.path(steps[-1]), lambda: self.manager.load(step=steps[-1]), way_out)
            return True
        if self.config.load_from:
            folder = Path(self.config.load_from).expanduser().absolute()
            self._require_checkpoint(folder)
            way_out = "correct checkpoint.load_from, or set [model] to what it was written with"
            self._read(folder, lambda: self._load_weights(folder), way_out)
            return True
        return False

    def save(self, step: int, is_last: bool = False) -> None:
        """Save the run as it stands after `step` optimizer steps; the last save of a run waits until it is on disk.

        An earlier asynchronous save is waited for first. Nothing is saved before the first step: there is nothing yet
        that a fresh start would not make again.
        """
        self._finish_save()
        if step == 0 or run_on_rank_zero(lambda: self._is_saved(step), self.group):
            return
        self.manager.save(step, last_step=is_last)
        if is_last or not self.config.is_async:
            self._remove_old()

    def rescue(self) -> None:
        """After a failure of the run: give an asynchronous save that is under way time to become a checkpoint.

        It needs the process group, and the other ranks, who wait for the failed one's next message meanwhile.
        """
        if self.manager.save_future is not None:
            logger.warning("the run has failed; its last checkpoint is still being written")
            with suppress(Exception):  # the run's failure is what matters
                self.manager.save_future.result(SECONDS_TO_RESCUE)

    def close(self) -> None:
        """Wait for an asynchronous save, then end the manager's threads; the process group must still be alive."""
        self._finish_save()
        self.manager.close()
        dist.barrier(self.group)

    def _finish_save(self) -> None:
        """Wait until the save under way is a checkpoint; its failure is raised here."""
        if self.manager.save_future is not None:
            self.manager.save_future.result()
            self.manager.save_future = None
        self._remove_old()

    def _remove_old(self) -> None:
        if self.is_main and self.config.keep_latest > 0:
            self.folders.keep_newest(self.config.keep_latest)

    def _is_saved(self, step: int) -> bool:
        """Say whether a step has its checkpoint; what a failed save of it has left is cleared away."""
        self.folders.remove_incomplete()
        return step in self.folders.complete_steps()

    def _load_weights(self, folder: Path) -> None:
        weights = self.manager.states[MODEL_KEY].state_dict()
        self.manager.dcp_load(weights, checkpoint_id=str(folder), from_hf=False, from_quantized=False)

    def _read(self, folder: Path, read: Callable[[], object], way_out: str) -> None:
        """Load all weights that there are, and turn DCP's bundle of every rank's failures into one sentence."""
        saved, problem = run_on_rank_zero(lambda: _names_in(folder), self.group)
        if problem:
            raise CheckpointMisfit(f"checkpoint {folder} cannot be read: {problem}; {way_out}")
        others = tuple(f"{name}." for name in self.manager.states if name != MODEL_KEY)
        weights = {name for name in saved if not name.startswith(others)}
        lost = sorted((weights - self._weights()) | self._joined(saved))
        if lost:
            raise CheckpointMisfit(
                f"checkpoint {folder} does not fit this run's model, which has no place for {len(lost)} of its "
                f"tensors ({', '.join(lost[:3])}{', ...' if len(lost) > 3 else ''}); {way_out}"
            )
        try:
            read()
        except CheckpointException as error:
            failures = [failure[0] for failure in error.failures.values()]
            reasons = "; ".join(sorted({str(failure) or type(failure).__name__ for failure in failures}))
            raise CheckpointMisfit(
                f"checkpoint {folder} does not fit this run's model or states, or is damaged: {reasons}; {way_out}"
            ) from error

    def _joined(self, saved: set[str]) -> set[str]:
        """Names of weights that were trained apart and are one tensor here: the last to be read would stay."""
        trained = {name.removeprefix(MOMENTS).rpartition(".")[0] for name in saved if name.startswith(MOMENTS)}
        names: defaultdict[int, set[str]] = defaultdict(set)
        for part in self.model_parts:
            for name, parameter in part.named_parameters(remove_duplicate=False):
                names[id(parameter)] |= {name} & trained
        return {name for alike in names.values() if len(alike) > 1 for name in alike}

    def _weights(self) -> set[str]:
        """The names of all weights and buffers of the model, whichever rank has them."""
        names: list[Any] = [None] * dist.get_world_size(self.group)
        dist.all_gather_object(names, list(self.manager.states[MODEL_KEY].state_dict()), group=self.group)
        return {name for of_rank in names for name in of_rank}

    def _require_checkpoint(self, folder: Path) -> None:
        if run_on_rank_zero(lambda: (folder / MARK).is_file(), self.group):
            return
        steps = [step for root in (folder, folder / "checkpoints") for step in CheckpointFolders(root).complete_steps()]
        found = (
            f"complete ones below it: {', '.join(f'step-{step}' for step in steps)}" if steps else "none is below it"
        )
        raise ValueError(
            f"checkpoint.load_from = {self.config.load_from!r} is not a complete checkpoint: it must be a folder "
            f"`step-N` with a {MARK} file ({found})"
        )


def _names_in(folder: Path) -> tuple[set[str], str]:
    """The names of all that a checkpoint holds, or what is wrong with its table of contents."""
    try:
        return set(FileSystemReader(folder).read_metadata().state_dict_metadata), ""
    except Exception as error:  # it is pickled: what is damaged may raise anything
        return set(), f"{MARK}: {error or type(error).__name__}"
