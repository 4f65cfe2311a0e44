"""Give the weights of a model under the names of Hugging Face, one by one, without a file: for a rollout engine."""

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor

from titan_moe.checkpoint.hf import agree, exported, messages
from titan_moe.checkpoint.hf_names.names import Piece, Shape, split_name
from titan_moe.checkpoint.hf_weights import Model, box_of
from titan_moe.parameters import Chunk

Place = tuple[Shape, Shape]
"""Offsets and shape of a slice of one of our tensors."""


def hf_weights(
    model: Model, dtype: torch.dtype | None = None, *, source: str | Path | None = None
) -> Iterator[tuple[str, Tensor]]:
    """Iterate over all weights of a model, or of all stages of one: name and whole tensor, as `save_hf` writes them.

    Collective: every rank gets every tensor, in the same order, on the model's device, and must go on to the end.
    Memory holds one tensor of ours at a time, such as the gate and up matrices of one layer's experts, with the slice
    of it that a rank sends, and then one as on disk: where a family has one for all experts, as much again. What is
    given may be kept; it is a copy, but for whole tensors of one rank in their own dtype and layout.
    `dtype` is that of the weights; by default they keep theirs, as buffers always do. `source` is as in `save_hf`.

    Raises: ValueError, before the first tensor, if no family of Hugging Face computes what the model does.

    Example:
        >>> from titan_moe import ModelConfig, MoEConfig, Transformer, hf_weights
        >>> moe = MoEConfig(num_experts=8, top_k=2, ffn_hidden_size=32)
        >>> model = Transformer(ModelConfig(vocab_size=100, hidden_size=32, num_layers=1, moe=moe))
        >>> [name for name, weight in hf_weights(model)][0]
        'model.embed_tokens.weight'
    """
    place, origin = Path("hf_weights"), Path(source).expanduser() if source else None
    with messages() as group, torch.no_grad():
        weights, _, _, own, dtypes = exported(model, dtype, place, origin, group)
        chunks = weights.chunks()
        places = {name: [_place(chunk) for chunk in of_name] for name, of_name in chunks.items()}
        senders: dict[str, dict[Place, int]] = {}
        for rank, of_rank in enumerate(agree(lambda: places, place, group)):
            for name, of_name in of_rank.items():
                for slice_ in of_name:
                    senders.setdefault(name, {}).setdefault(slice_, rank)
    device = next(iter(weights.tensors.values())).device
    by_ours: dict[str, list[Piece]] = {}
    for piece in sorted(own, key=_layer):
        by_ours.setdefault(piece.ours, []).append(piece)
    return _tensors(by_ours, weights.shapes, dtypes, chunks, senders, device)


def _tensors(
    by_ours: Mapping[str, Sequence[Piece]],
    shapes: Mapping[str, Shape],
    dtypes: Mapping[str, torch.dtype],
    chunks: Mapping[str, Sequence[Chunk]],
    senders: Mapping[str, Mapping[Place, int]],
    device: torch.device,
) -> Iterator[tuple[str, Tensor]]:
    for ours, cut in by_ours.items():
        own = {_place(chunk): chunk.values for chunk in chunks.get(ours, ())}
        start = (0,) * len(shapes[ours])
        if (whole := own.get((start, shapes[ours]))) is not None and len(senders[ours]) == 1 and not _has_peers():
            full = whole.to(device, dtypes[ours])
        else:
            full = torch.empty(shapes[ours], dtype=dtypes[ours], device=device)
            _gather(full, own, senders[ours])
        for piece in cut:
            for box in box_of(Chunk(full, start), piece):
                yield piece.name, box.values.reshape(piece.shape).contiguous()


def _gather(full: Tensor, own: Mapping[Place, Tensor], senders: Mapping[Place, int]) -> None:
    """Fill a tensor from the slices of all ranks, each of which is sent by one that has it. Collective."""
    for (offsets, shape), sender in senders.items():
        if 0 in shape:
            continue
        if dist.get_rank() == sender:
            values = own[offsets, shape].to(full).contiguous()  # also of what is parked on the host
        else:
            values = full.new_empty(shape)
        dist.broadcast(values, sender)
        full[tuple(slice(begin, begin + size) for begin, size in zip(offsets, shape, strict=True))] = values


def _has_peers() -> bool:
    return dist.is_initialized() and dist.get_world_size() > 1


def _place(chunk: Chunk) -> Place:
    return tuple(chunk.offsets), tuple(chunk.values.shape)


def _layer(piece: Piece) -> tuple[bool, int]:
    """Sorts the embedding first, then layers, then what follows them, whatever ranks have which."""
    layer, name = split_name(piece.ours)
    return layer is None and not name.startswith("embed."), -1 if layer is None else layer
