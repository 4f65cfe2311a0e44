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
    """The step with the lowest validation loss, the first of equal ones, and those whose loss cannot be read now.

    Losses on other data say nothing of each other: where a run has gone on with changed data, each data has its best.
    """
    lowest: dict[str, float] = {}
    best: dict[str, int] = {}
    for step in steps:
        try:
            manifest = read_manifest(folders.path(step))
        except (OSError, ValueError):  # it may be the best one
            yield step
            continue
        if manifest is None or (loss := manifest.validation_loss) is None or not isfinite(loss):
            continue
        if loss < lowest.get(manifest.data, inf):
            lowest[manifest.data], best[manifest.data] = loss, step
    yield from best.values()
