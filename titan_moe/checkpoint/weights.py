"""The weights of a checkpoint beside those of a model: names, shapes, ties."""

from collections import defaultdict
from collections.abc import Collection, Iterable
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch import Tensor, nn

from titan_moe.checkpoint.folders import METADATA_FILE
from titan_moe.checkpoint.metadata import read_metadata

MOMENTS = "optimizer.state."
"""Prefix of optimizer moments. The parameter's name and a suffix such as `.exp_avg` follow."""

Shape = tuple[int, ...] | None
"""Of an unsharded tensor; None for another value."""


def weight_of(name: str) -> str:
    """The name of the weight that a moment belongs to; any other name as it is."""
    return name.removeprefix(MOMENTS).rpartition(".")[0] if name.startswith(MOMENTS) else name


def saved_shapes(folder: Path) -> tuple[dict[str, Shape], str]:
    """The names of all tensors and values in a checkpoint, with the shapes of the tensors, or an error message for its
    metadata file."""
    try:
        entries = read_metadata(folder / METADATA_FILE).state_dict_metadata
    except ValueError as error:
        return {}, str(error)
    sizes = {name: getattr(entry, "size", None) for name, entry in entries.items()}
    return {name: None if size is None else tuple(size) for name, size in sizes.items()}, ""


def shapes_over_ranks(state: dict[str, Any], group: dist.ProcessGroup) -> dict[str, Shape]:
    """The names and unsharded shapes of a model's weights and buffers, whose ranks may have parts of it. Collective."""
    shapes: list[Any] = [None] * dist.get_world_size(group)
    own = {name: tuple(value.shape) if isinstance(value, Tensor) else None for name, value in state.items()}
    dist.all_gather_object(shapes, own, group=group)
    return {name: shape for rank_shapes in shapes for name, shape in rank_shapes.items()}


def newly_tied(model_parts: Iterable[nn.Module], saved: Iterable[str]) -> set[str]:
    """Names of weights that were trained separately but share one tensor here. Such a checkpoint does not fit: only the
    last weight read would stay."""
    trained = {weight_of(name) for name in saved if name.startswith(MOMENTS)}
    names: defaultdict[int, set[str]] = defaultdict(set)
    for part in model_parts:
        for name, parameter in part.named_parameters(remove_duplicate=False):
            names[id(parameter)] |= {name} & trained
    return {name for tied in names.values() if len(tied) > 1 for name in tied}


def differences(saved: dict[str, Shape], own: dict[str, Shape], tied: set[str]) -> list[str]:
    """How the weights of a checkpoint differ from the model's, in words. `tied` are those of `newly_tied`."""
    other_shapes = [
        f"{name} {shape} (checkpoint {saved[name]})"
        for name, shape in sorted(own.items())
        if shape is not None and saved.get(name) not in (None, shape)
    ]
    groups = {
        "only in the checkpoint": saved.keys() - own.keys(),
        "only in the model": own.keys() - saved.keys(),
        "tied only in the model": tied,
        "other shapes": other_shapes,
    }
    return [f"{words}: {_first_three(names)}" for words, names in groups.items() if names]


def _first_three(names: Collection[str]) -> str:
    """The first three in alphabetical order, and how many there are besides."""
    return ", ".join(sorted(names)[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")
