"""Which checkpoints of a run are kept beside its newest ones."""

from collections.abc import Iterator
from math import inf, isfinite

from titan_moe.checkpoint.folders import CheckpointFolders
from titan_moe.checkpoint.manifest import read_manifest
from titan_moe.config.train import CheckpointConfig


def kept_steps(folders: CheckpointFolders, config: CheckpointConfig) -> set[int]:
    """The steps whose checkpoints `keep_every_steps` and `keep_best` protect."""
    steps = folders.complete_steps()
    kept = {step for step in steps if config.keep_every_steps and step % config.keep_every_steps == 0}
    return kept | set(_best(folders, steps)) if config.keep_best else kept


def _best(folders: CheckpointFolders, steps: list[int]) -> Iterator[int]:
    """The step with the lowest validation loss, the first of equal ones, and those whose loss cannot be read now."""
    lowest, best = inf, None
    for step in steps:
        try:
            manifest = read_manifest(folders.path(step))
        except (OSError, ValueError):  # it may be the best one
            yield step
            continue
        loss = None if manifest is None else manifest.validation_loss
        if loss is not None and isfinite(loss) and loss < lowest:
            lowest, best = loss, step
    if best is not None:
        yield best
