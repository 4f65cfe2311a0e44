"""What a rank has of each tensor of a Hugging Face checkpoint, as views of its part of a model."""

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple, TypeAlias

import torch.distributed as dist
from torch import Tensor, nn

from titan_moe.checkpoint.codes import codes_of, is_scale
from titan_moe.checkpoint.hf_folder import named
from titan_moe.checkpoint.hf_names.family import Family
from titan_moe.checkpoint.hf_names.names import NotOnDisk, Piece, Shape, pieces, split_name
from titan_moe.checkpoint.merged import factor_names, merged_chunks
from titan_moe.checkpoint.storage import ChunkedTensor
from titan_moe.checkpoint.weights import shapes_over_ranks
from titan_moe.config.model import ModelConfig
from titan_moe.parameters import Chunk, fused_rows, local, local_chunks

Model: TypeAlias = nn.Module | Sequence[nn.Module]
"""A model, or this rank's stages of one."""


class Weights(NamedTuple):
    """This rank's part of the weights of a model."""

    config: ModelConfig
    tensors: dict[str, Tensor]
    rows: dict[str, tuple[int, ...]]  # of fused weights
    parameters: set[str]  # names of those that are no buffers
    shapes: dict[str, Shape]  # of the whole model
    merged: dict[str, list[Chunk]]  # this rank's slices of weights to which adapters are added, and of codes
    codes: dict[str, Tensor] = {}  # of `tensors`, those that are codes, with their scales

    def chunks(self) -> dict[str, list[Chunk]]:
        """This rank's slices of all tensors, adapters added."""
        own = {name: local_chunks(tensor.detach(), self.rows.get(name, ())) for name, tensor in self.tensors.items()}
        return own | self.merged

    def boxes(self, own: Iterable[Piece]) -> dict[str, ChunkedTensor]:
        """What this rank has of the tensors on disk; nothing for those that it has nothing of."""
        result = {}
        chunks = self.chunks()
        for piece in own:
            if shared := [box for chunk in chunks.get(piece.ours, ()) for box in box_of(chunk, piece)]:
                result[piece.name] = ChunkedTensor(piece.view, shared)
        return result

    def not_on_disk(self, family: Family) -> dict[str, Tensor]:
        """This rank's part of the tensors that the family lacks."""
        rows = family.names(self.config)
        lacking = {name for name in self.tensors if isinstance(rows.get(split_name(name)[1]), NotOnDisk)}
        return {name: local(self.tensors[name]) for name in lacking}


def weights_of(model: Model, group: dist.ProcessGroup | None, *, merges: bool = False) -> Weights:
    """The weights without adapters or, with `merges`, with adapters added. Collective over the group of all ranks, if
    there is one.

    Raises: TypeError for a model without a `config`.
    """
    parts = [model] if isinstance(model, nn.Module) else list(model)
    config = next((part.config for part in parts if isinstance(getattr(part, "config", None), ModelConfig)), None)
    if config is None:
        raise TypeError(f"{type(parts[0]).__name__} has no `config`, a ModelConfig; keep the one that it is built from")
    factors, codes = factor_names(parts), codes_of(parts)
    tensors = {
        name: tensor
        for part in parts
        for name, tensor in part.state_dict().items()
        if isinstance(tensor, Tensor) and name not in factors and not is_scale(name, codes)
    }
    rows = {name: sizes for part in parts for name, sizes in fused_rows(part).items()}
    parameters = {name for part in parts for name, _ in part.named_parameters(remove_duplicate=False)}
    shapes = {name: tuple(tensor.shape) for name, tensor in tensors.items()}
    if group is not None:
        shapes = {name: shape for name, shape in shapes_over_ranks(tensors, group).items() if shape is not None}
    merged = {name: chunks for part in parts for name, chunks in merged_chunks(part).items()} if merges else {}
    parameters -= factors | {name for name in parameters if is_scale(name, codes)}
    return Weights(config, tensors, rows, parameters, shapes, merged, codes)


def pieces_of(family: Family, config: ModelConfig, shapes: Mapping[str, Shape]) -> list[Piece]:
    """The tensors on disk of a model.

    Raises: ValueError that names the tensors of the model that the family has no name for.
    """
    names = family.names(config)
    if unnamed := [name for name in shapes if split_name(name)[1] not in names]:
        raise ValueError(f"{family.model_type} has no names for {named(unnamed)}")
    return list(pieces(names, config, shapes))


def box_of(chunk: Chunk, piece: Piece) -> Iterator[Chunk]:
    """What a slice of ours shares with a tensor on disk, as a view, at its place in `piece.view`; or nothing."""
    index: list[int | slice] = []
    place: list[int] = []
    for dim, (size, offset) in enumerate(zip(chunk.values.shape, chunk.offsets, strict=True)):
        wanted = piece.box[dim] if dim < len(piece.box) else slice(0, offset + size)
        begin, end = (wanted, wanted + 1) if isinstance(wanted, int) else (wanted.start, wanted.stop)
        first, last = max(begin, offset), min(end, offset + size)
        if first >= last:
            return
        if isinstance(wanted, int):
            index.append(first - offset)
        else:
            index.append(slice(first - offset, last - offset))
            place.append(first - begin)
    values, order = chunk.values[tuple(index)], range(len(place)) if piece.layout is None else piece.layout.order
    yield Chunk(values.permute(*order), tuple(place[dim] for dim in order))


def not_zero(tensors: Mapping[str, Tensor]) -> Collection[str]:
    """Names of those that have values other than zero."""
    return [name for name, tensor in tensors.items() if tensor.any()]
