"""Read a checkpoint under any layout: compare its files with their hashes and its weights with the model's first."""

from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.api import CheckpointException

from titan_moe.checkpoint import storage
from titan_moe.checkpoint.manifest import MANIFEST_FILE, Manifest, find_damage, read_manifest
from titan_moe.checkpoint.masters import MasterState
from titan_moe.checkpoint.rank_zero import run_on_rank_zero
from titan_moe.checkpoint.weights import differences, newly_tied, saved_shapes, shapes_over_ranks
from titan_moe.parameters import fused_rows

OTHER_STATES = ("optimizer", "lr_scheduler", "dataloader", "train_state", "rng")
"""What the checkpoint of a run has besides weights: names begin with one of these and a dot."""


class CheckpointMismatch(RuntimeError):
    """A checkpoint of another model or of other states, or a damaged one."""


def load_weights(parts: Sequence[nn.Module], folder: Path, group: dist.ProcessGroup) -> None:
    """Load the weights of a checkpoint into a model, or into this rank's stages of one. Collective.

    Raises: CheckpointMismatch if it is damaged, or of another model.
    """
    verified(folder, "restore it from a copy, or take another one", group)
    parts = [part for part in parts if part.state_dict()]  # a stage may be empty
    weights, rows = MasterState(parts), {name: sizes for part in parts for name, sizes in fused_rows(part).items()}
    state = weights.state_dict()

    def read() -> None:
        storage.load(state, folder, lambda name: rows.get(name, ()))
        weights.load_state_dict(state)

    read_fitting(folder, state, parts, read, "take the [model] that it was written with", group)


def verified(folder: Path, way_out: str, group: dist.ProcessGroup) -> Manifest | None:
    """Read the manifest, and every file to compare its hash. Collective.

    Raises: CheckpointMismatch, which names the damaged files.
    """
    manifest, problem = run_on_rank_zero(lambda: _try_read_manifest(folder), group)
    problems: list[Any] = [[problem]] if problem else []
    if manifest is not None:
        rank, num_ranks = dist.get_rank(group), dist.get_world_size(group)
        problems = [None] * num_ranks
        mine = sorted(manifest.files.items(), key=lambda file: -file[1].num_bytes)[rank::num_ranks]
        dist.all_gather_object(problems, find_damage(folder, mine), group=group)
    if damage := [name for rank_problems in problems for name in rank_problems]:
        raise CheckpointMismatch(f"checkpoint {folder} is damaged: {'; '.join(sorted(damage))}; {way_out}")
    return manifest


def read_fitting(
    folder: Path,
    own: Mapping[str, Any],
    parts: Sequence[nn.Module],
    read: Callable[[], object],
    way_out: str,
    group: dist.ProcessGroup,
    other_states: Collection[str] = OTHER_STATES,
) -> None:
    """Load with `read`, and fail if the checkpoint's weights have other names or shapes than the model's, `own`.

    Raises: CheckpointMismatch, with one sentence for the failures that DCP collects from all ranks.
    """
    saved, problem = run_on_rank_zero(lambda: saved_shapes(folder), group)
    if problem:
        raise CheckpointMismatch(f"checkpoint {folder} cannot be read: {problem}; {way_out}")
    prefixes = tuple(f"{name}." for name in other_states)
    weights = {name: shape for name, shape in saved.items() if not name.startswith(prefixes)}
    if found := differences(weights, shapes_over_ranks(dict(own), group), newly_tied(parts, saved)):
        raise CheckpointMismatch(f"checkpoint {folder} does not fit this run's model: {'; '.join(found)}; {way_out}")
    try:
        read()
    except CheckpointException as error:
        reasons = storage.reasons_of(error)
        raise CheckpointMismatch(
            f"checkpoint {folder} does not fit this run's model or states, or is damaged: {reasons}; {way_out}"
        ) from error


def _try_read_manifest(folder: Path) -> tuple[Manifest | None, str]:
    """The manifest of a checkpoint, or an error message for it."""
    try:
        return read_manifest(folder), ""
    except OSError as error:
        return None, f"{MANIFEST_FILE} cannot be read: {error.strerror}"
    except ValueError as error:
        return None, str(error)
