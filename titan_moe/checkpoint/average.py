"""The mean of the weights of checkpoints (arXiv:1803.05407), slice by slice: no model is held whole."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.metadata import MetadataIndex

from titan_moe.checkpoint import hf_export, storage
from titan_moe.checkpoint.base import lacks
from titan_moe.checkpoint.ema import lacks_averages, reader_of_weights
from titan_moe.checkpoint.find import saved_fields
from titan_moe.checkpoint.hf_convert import planned
from titan_moe.checkpoint.hf_names.names import Shape
from titan_moe.checkpoint.manifest import Manifest, find_damage, read_manifest
from titan_moe.checkpoint.storage import ChunkedTensor, PlainReader, PlainSavePlanner, load_slices
from titan_moe.checkpoint.weights import saved_shapes
from titan_moe.config import RecipeError
from titan_moe.config.parse import recipe_of
from titan_moe.config.resume import compare
from titan_moe.parameters import SCALES, Chunk


def average(checkpoints: Sequence[Path], shapes: Mapping[str, Shape], out: Path, *, is_of_ema: bool = False) -> None:
    """Write a checkpoint whose weights are the means of those of others, computed and saved in fp32. With `is_of_ema`
    those are the averages that runs keep (`optim.ema_decay`); what a run does not train is as it is.

    `shapes` are those of the tensors of their model. Values that are no floating-point numbers are those of the first
    checkpoint, and so are recipe, config.json and tokenizer.

    Raises: RecipeError that names what is damaged or differs. Then nothing is left behind.
    """
    hf_export.refuse_existing(out)
    first = checkpoints[0]
    recipe = recipe_of(saved_fields(first), str(first))
    if problems := [problem for folder in checkpoints for problem in _problems(folder, shapes)]:
        raise RecipeError(problems)
    problems += filter(None, map(lacks_averages, checkpoints if is_of_ema else ()))
    for folder in checkpoints[1:]:
        changes = compare(saved_fields(folder), recipe).refused
        changes = [change for change in changes if change.startswith("model.")]
        problems += [f"{first} has {change} in {folder}: the mean of two models is none" for change in changes]
    if problems:
        raise RecipeError(problems)
    saved, _ = saved_shapes(first)
    scales = {f"{name}{SCALES}": saved.get(f"{name}{SCALES}") for name in shapes}
    shapes = {**shapes, **{name: shape for name, shape in scales.items() if shape is not None}}
    planner = _MeanPlanner([reader_of_weights(folder, is_ema=is_of_ema) for folder in checkpoints])
    origin = hf_export.source_of(first)
    with hf_export.renamed_at_the_end(out) as unfinished:
        state = {
            name: ChunkedTensor(shape, list(planned(shape, planner.dtype(name)))) for name, shape in shapes.items()
        }
        files = {} if origin is None else hf_export.keep_source(origin, unfinished, hf_export.left_out(origin))
        with storage.alone():
            storage.save(state, unfinished, Manifest(saved_fields(first), "", files), planner=planner)


def _problems(folder: Path, shapes: Mapping[str, Shape]) -> list[str]:
    """What is damaged in a checkpoint, and which weights of the model it lacks or has with another shape."""
    try:
        manifest, (saved, unread) = read_manifest(folder), saved_shapes(folder)
    except ValueError as error:
        return [f"{folder} is damaged: {error}"]
    if manifest is not None and (words := lacks(manifest.recipe)):
        return [f"{folder}: {words}, and a mean is of whole weights"]
    damage = find_damage(folder, manifest.files.items()) if manifest is not None else []
    if unread or damage:
        return [f"{folder} is damaged: {problem}" for problem in [unread, *damage] if problem]
    if missing := [name for name in shapes if name not in saved]:
        return [f"{folder} lacks {', '.join(missing[:3])} of the model of the first checkpoint"]
    other = [f"{name} {saved[name]} instead of {shape}" for name, shape in shapes.items() if saved[name] != shape]
    return [f"{folder} has other shapes than the first checkpoint: {', '.join(other[:3])}"] if other else []


class _MeanPlanner(PlainSavePlanner):
    """Reads a slice of all checkpoints when its mean is to be written."""

    def __init__(self, readers: Sequence[PlainReader]) -> None:
        super().__init__(storage.no_rows)
        self.readers = readers

    def dtype(self, name: str) -> torch.dtype:
        """That of a mean: fp32, or what is wider or no floating-point number."""
        saved = _dtype(self.readers[0], name)
        return torch.promote_types(saved, torch.float32) if saved.is_floating_point and saved.itemsize > 1 else saved

    def lookup_object(self, index: MetadataIndex) -> Any:
        """The mean of a slice."""
        meta, size = super().lookup_object(index), self.state_dict[index.fqn].size()
        if not meta.dtype.is_floating_point or meta.dtype.itemsize == 1:  # codes are of frozen weights
            return self._read(self.readers[0], index, meta, size)
        total = torch.zeros_like(meta, device="cpu")
        for reader in self.readers:
            total += self._read(reader, index, meta, size)
        return total / len(self.readers)

    def _read(self, reader: PlainReader, index: MetadataIndex, meta: torch.Tensor, size: torch.Size) -> torch.Tensor:
        values = torch.empty(meta.shape, dtype=_dtype(reader, index.fqn))
        load_slices({index.fqn: ChunkedTensor(size, [Chunk(values, tuple(index.offset or ()))])}, reader)
        return values


def _dtype(reader: PlainReader, name: str) -> torch.dtype:
    return reader.metadata.state_dict_metadata[name].properties.dtype
