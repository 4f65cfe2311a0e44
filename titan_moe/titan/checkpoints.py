"""Build torchtitan's CheckpointManager. Its configuration classes are not visible outside this folder."""

from pathlib import Path
from typing import Any

from torch import nn

from titan_moe.titan import CheckpointManager, LRSchedulersContainer, ModelWrapper, OptimizersContainer
from titan_moe.titan.import_guard import import_torchtitan

MODEL_KEY = "model"  # the manager's key of the weights


class CurrentModelState(ModelWrapper):
    """Read the model's state dict at each save. The base class keeps the tensors of its construction: a buffer that was
    replaced later (`module.bias = new`) would be saved with its old values."""

    def state_dict(self) -> dict[str, Any]:
        return self._get_state_dict()


def build_checkpoint_manager(
    folder: Path,
    *,
    model_parts: list[nn.Module],
    optimizers: OptimizersContainer,
    schedulers: LRSchedulersContainer,
    loader: Any,
    states: dict[str, Any],
    is_async: bool,
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
    manager = CheckpointManager(
        dataloader=loader,
        model_parts=model_parts,
        optimizers=optimizers,
        lr_schedulers=schedulers,
        states=dict(states),
        checkpoint_config=options,
        sd_adapter=None,
        base_folder=str(folder.parent),
    )
    manager.states[MODEL_KEY] = CurrentModelState(model_parts)
    return manager
