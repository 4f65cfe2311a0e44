"""Which checkpoints of a run are kept beside its newest ones."""

import json
from collections.abc import Iterator
from math import inf, isfinite

from titan_moe.checkpoint.folders import CheckpointFolders
from titan_moe.checkpoint.manifest import Manifest, read_manifest
from titan_moe.config import Recipe
from titan_moe.config.resume import flatten
from titan_moe.config.train import CheckpointConfig

VALIDATED = {
    key: value
    for key, value in flatten(Recipe()).items()
    if key.startswith("validation.") and key != "validation.every_steps"
}
"""Fields that say on what a run is validated, and their defaults."""


def kept_steps(folders: CheckpointFolders, config: CheckpointConfig) -> set[int]:
    """The steps whose checkpoints `keep_every_steps` and `keep_best` protect."""
    steps = folders.complete_steps()
    kept = {step for step in steps if config.keep_every_steps and step % config.keep_every_steps == 0}
    return kept | set(_best(folders, steps)) if config.keep_best else kept


def _best(folders: CheckpointFolders, steps: list[int]) -> Iterator[int]:
    """The step with the lowest validation loss, the first of equal ones, and those whose loss cannot be read now.

    Losses on other data say nothing of each other: where a run has gone on with changed data, or with other data of
    validation, each data has its best.
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
        data = _validated(manifest)
        if loss < lowest.get(data, inf):
            lowest[data], best[data] = loss, step
    yield from best.values()


def _validated(manifest: Manifest) -> str:
    """What data a checkpoint was validated on. A field that its recipe lacks is newer, and had its default."""
    fields = {key: manifest.recipe.get(key, value) for key, value in VALIDATED.items()}
    return json.dumps([manifest.data, fields], default=dict, sort_keys=True)
