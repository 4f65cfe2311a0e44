"""Build torchtitan's CheckpointManager without its configuration classes leaving this room."""

from pathlib import Path
from typing import Any

from torch import nn

from titan_moe.titan import CheckpointManager, LRSchedulersContainer, ModelWrapper, OptimizersContainer
from titan_moe.titan.import_guard import import_torchtitan

MODEL_KEY = "model"  # where the manager looks for the weights among its states


class CurrentModelState(ModelWrapper):
    """Read the model's state at each save; its parent keeps the tensors that it saw when it was made.

    A buffer that was replaced since (`module.bias = new`) would be saved with its old values.
    """

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
    """Make a manager that saves full checkpoints into `folder` whenever it is told to, and deletes none.

    `keep_latest_k = 0`: its purge counts half-written folders as kept ones and may so delete the last good one.
    `last_save_model_only = False`: its default drops the optimizer from the last save, which then cannot be resumed.
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
