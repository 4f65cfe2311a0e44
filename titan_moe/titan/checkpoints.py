"""Build torchtitan's CheckpointManager. Its configuration classes are not visible outside this folder."""

from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from titan_moe.titan import (
    CheckpointManager,
    GarbageCollection,
    LRSchedulersContainer,
    ModelWrapper,
    OptimizersContainer,
)
from titan_moe.titan.import_guard import import_torchtitan

MODEL_KEY = "model"  # the manager's key of the weights

Save = Callable[[dict[str, Any], Path, dist.ProcessGroup | None], Future[Any] | None]
"""Write a state dict into a folder: at once, or in the background with the group for its messages."""
Load = Callable[[dict[str, Any], Path], None]
"""Read a folder into a state dict."""


class CurrentModelState(ModelWrapper):
    """Read the model's state dict at each save. The base class keeps the tensors of its construction: a buffer that was
    replaced later (`module.bias = new`) would be saved with its old values."""

    def state_dict(self) -> dict[str, Any]:
        return self._get_state_dict()


class StorageCheckpointManager(CheckpointManager):
    """Write and read files with given functions, instead of DCP's, which run what a checkpoint's files name."""

    save_state: Save
    load_state: Load

    @torch.no_grad()
    def dcp_save(
        self, state_dict: dict[str, Any], checkpoint_id: str, async_mode: Any, *_: Any, **__: Any
    ) -> Future[Any] | None:
        is_async = async_mode == type(async_mode).ASYNC
        saving = self.save_state(state_dict, Path(checkpoint_id), self.pg if is_async else None)
        if not is_async:
            GarbageCollection.collect("after a save")
        return saving

    def dcp_load(self, state_dict: dict[str, Any], checkpoint_id: str, *_: Any, **__: Any) -> None:
        self.load_state(state_dict, Path(checkpoint_id))
        self.states[MODEL_KEY].load_state_dict(state_dict)


def build_checkpoint_manager(
    folder: Path,
    *,
    model_parts: list[nn.Module],
    optimizers: OptimizersContainer,
    schedulers: LRSchedulersContainer,
    loader: Any,
    model_state: CurrentModelState,
    states: dict[str, Any],
    is_async: bool,
    save: Save,
    load: Load,
) -> CheckpointManager:
    """Make a manager that saves a full checkpoint into `folder` at each call and deletes none.

    `keep_latest_k = 0`: torchtitan's purge counts incomplete folders and may delete the last complete checkpoint.
    `last_save_model_only = False`: the default drops the optimizer from the last save, which then cannot be resumed.
    """
    options = import_torchtitan("config").Checkpoint(
        enable=True,
        folder=folder.name,
        interval=1,
        keep_latest_k=0,
        last_save_model_only=False,
        async_mode="async" if is_async else "disabled",
    )
    manager = StorageCheckpointManager(
        dataloader=loader,
        model_parts=model_parts,
        optimizers=optimizers,
        lr_schedulers=schedulers,
        states=dict(states),
        checkpoint_config=options,
        sd_adapter=None,
        base_folder=str(folder.parent),
    )
    manager.states[MODEL_KEY] = model_state
    manager.save_state, manager.load_state = save, load
    return manager
