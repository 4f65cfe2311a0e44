"""Read a checkpoint under any layout: compare its files with their hashes and its weights with the model's first."""

from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.api import CheckpointException

from titan_moe.checkpoint import base, storage
from titan_moe.checkpoint.codes import codes_of, in_another_form, load_numbers, read_numbers
from titan_moe.checkpoint.ema import lacks_averages, reader_of_weights
from titan_moe.checkpoint.find import HUGGING_FACE
from titan_moe.checkpoint.hf import load_hf
from titan_moe.checkpoint.manifest import MANIFEST_FILE, Manifest, find_damage, read_manifest
from titan_moe.checkpoint.masters import MasterState
from titan_moe.checkpoint.merged import factor_names
from titan_moe.checkpoint.rank_zero import run_on_rank_zero
from titan_moe.checkpoint.weights import differences, newly_tied, saved_shapes, shapes_over_ranks
from titan_moe.parameters import SCALES, fused_rows

OTHER_STATES = ("optimizer", "lr_scheduler", "dataloader", "train_state", "rng")
"""What the checkpoint of a run has besides weights: names begin with one of these and a dot."""


class CheckpointMismatch(RuntimeError):
    """A checkpoint of another model or of other states, or a damaged one."""


def load_weights(parts: Sequence[nn.Module], folder: Path, group: dist.ProcessGroup, *, is_ema: bool = False) -> None:
    """Load the weights of a checkpoint into a model, or into this rank's stages of one, or with `is_ema` their averages
    (`optim.ema_decay`); frozen weights that it lacks are those of its base. Collective.

    Raises: CheckpointMismatch if it is damaged, or of another model, or lacks its base or averages; HuggingFaceError if
    that is a base of Hugging Face that does not fit.
    """
    manifest = verified(folder, "restore it from a copy, or take another one", group)
    if is_ema and (problem := run_on_rank_zero(lambda: lacks_averages(folder), group)):
        raise CheckpointMismatch(problem)
    whole = [part for part in parts if part.state_dict()]  # a stage may be empty
    if manifest is None or not base.lacks(manifest.recipe):
        return load_weights_of(whole, folder, group, is_ema=is_ema)
    _check_base(folder, manifest, group)
    origin = str(manifest.recipe["checkpoint.load_from"])
    if origin.startswith(HUGGING_FACE):
        load_hf(list(parts), base.path_of(origin), *base.how_read(manifest.recipe))
    else:
        verified(base.path_of(origin), "restore it from a copy", group)
        load_weights_of(whole, base.path_of(origin), group, frozenset(factor_names(whole)))
    has = run_on_rank_zero(lambda: set(saved_shapes(folder)[0]), group)
    load_weights_of(whole, folder, group, frozenset(MasterState(whole).whole().keys() - has), is_ema=is_ema)


def _check_base(folder: Path, manifest: Manifest, group: dist.ProcessGroup) -> None:
    """Raises: CheckpointMismatch if the base of a checkpoint is not where it was, or has changed. Collective."""
    path = base.path_of(str(manifest.recipe["checkpoint.load_from"]))
    found = run_on_rank_zero(lambda: base.fingerprint(path) if path.is_dir() else "", group)
    if found and (found == manifest.base or not manifest.base):
        return
    problem = f"which was {manifest.base} and is {found}" if found else "which is not here"
    raise CheckpointMismatch(f"checkpoint {folder}: {base.lacks(manifest.recipe)}, {problem}; restore it there")


def load_weights_of(
    parts: Sequence[nn.Module],
    folder: Path,
    group: dist.ProcessGroup,
    left_out: frozenset[str] = frozenset(),
    way_out: str = "take the [model] that it was written with",
    *,
    is_ema: bool = False,
) -> None:
    """Load all weights but those that are left out, unless the checkpoint has them. Weights are rounded into codes, and
    codes become numbers, where the model has others than the checkpoint. With `is_ema`, those that train are averages.
    Collective.

    Raises: CheckpointMismatch if the checkpoint is of another model.
    """
    weights, rows = MasterState(parts), {name: sizes for part in parts for name, sizes in fused_rows(part).items()}
    saved, whole = run_on_rank_zero(lambda: saved_shapes(folder)[0], group), weights.whole()
    changed = in_another_form({name: tuple(value.shape) for name, value in whole.items()}, saved)
    scales = {f"{name}{SCALES}" for name in changed}
    weights.left_out = (left_out - saved.keys()) | changed | scales
    state = weights.state_dict()
    own = state | {name: whole[name] for name in changed} | {name: None for name in scales & saved.keys()}

    def rows_of(name: str) -> tuple[int, ...]:
        return rows.get(name, ())

    def read() -> None:
        reader = reader_of_weights(folder, is_ema=is_ema)
        storage.load(state, reader, rows_of)
        weights.load_state_dict(state)
        problems: list[Any] = [None] * dist.get_world_size(group)
        named = (each for part in parts for each in part.named_parameters(remove_duplicate=False))
        targets = {name: parameter for name, parameter in named if name in changed} | codes_of(parts)
        problem = _problem_of(lambda: load_numbers(targets, changed, read_numbers(reader, saved, rows_of)))
        dist.all_gather_object(problems, problem, group=group)
        if found := sorted({*problems} - {""}):
            raise CheckpointMismatch(f"checkpoint {folder} cannot be read: {'; '.join(found)}; {way_out}")

    read_fitting(folder, own, parts, read, way_out, group)


def _problem_of(read: Callable[[], None]) -> str:
    """What is wrong with files that this rank alone reads; empty if nothing is."""
    try:
        read()
    except (ValueError, OSError) as error:
        return str(error)
    return ""


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
