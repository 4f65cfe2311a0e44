"""Load experts from the MLPs of a dense Hugging Face checkpoint (sparse upcycling, arXiv:2212.05055, arXiv:2410.07524).

A matrix of an expert is a part of one on disk, of which copies read the same. A rank reads what its experts share once,
and copies it in memory.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import product
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.distributed.checkpoint import FileSystemReader

from titan_moe.checkpoint.codes import load_numbers
from titan_moe.checkpoint.hf_names.dense import DENSE, dense_family
from titan_moe.checkpoint.hf_names.family import Family, different_fields
from titan_moe.checkpoint.hf_names.names import NotOnDisk, Piece, Shape, split_name
from titan_moe.checkpoint.hf_weights import Weights, box_of
from titan_moe.checkpoint.storage import ChunkedTensor, load_slices
from titan_moe.config.model import ModelConfig
from titan_moe.config.upcycle import UpcycleConfig
from titan_moe.parameters import Chunk, seed_of

EXPERTS, SHARED = "feed_forward.experts", "feed_forward.shared_experts"
GATE_UP, DOWN = f"{EXPERTS}.gate_up", f"{EXPERTS}.down"
SHARED_GATE_UP, SHARED_DOWN = f"{SHARED}.gate_up.weight", f"{SHARED}.down.weight"
ROUTER = "feed_forward.router.weight"
NOT_READ = {ROUTER: NotOnDisk(), "feed_forward.router.expert_bias_E": NotOnDisk()}
NOT_READ |= dict.fromkeys((GATE_UP, DOWN, SHARED_GATE_UP, SHARED_DOWN), NotOnDisk())
"""What a dense checkpoint has no tensor of its own for."""


class Part(NamedTuple):
    """A matrix of ours that is a part of one on disk."""

    piece: Piece
    begin: Shape
    """Its place there."""


def is_drawn(name: str) -> bool:
    """Whether a tensor is one that the dense checkpoint does not give: other devices draw other numbers."""
    return split_name(name)[1] == ROUTER


def family_to_upcycle(config: Mapping[str, Any]) -> Family:
    """The dense family of a config.json, with no names for what it lacks.

    Raises: ValueError for another family.
    """
    family = dense_family(config)
    if family is None:
        found = f"model_type = {config.get('model_type')!r} and architectures = {config.get('architectures')}"
        way_out = "checkpoint.upcycle.granularity = 0 loads weights of experts"
        raise ValueError(f"config.json has {found}; dense families are {', '.join(DENSE)}, and {way_out}")
    return replace(family, names=lambda model: family.names(model) | NOT_READ)


def different(model: ModelConfig, dense: ModelConfig, granularity: int) -> list[str]:
    """The fields in which a model differs from a dense one, other than by its experts, in words.

    Raises: ValueError if the units of its experts are not those of the dense MLP.
    """
    moe, width = model.moe, dense.ffn_hidden_size
    if granularity * moe.ffn_hidden_size + moe.shared_ffn_hidden_size != width:
        shared = f", beside model.moe.shared_ffn_hidden_size = {moe.shared_ffn_hidden_size}"
        raise ValueError(
            f"the dense MLP has {width} hidden units, and checkpoint.upcycle.granularity = {granularity} pieces of "
            f"model.moe.ffn_hidden_size = {moe.ffn_hidden_size}{shared if moe.shared_ffn_hidden_size else ''} have "
            f"{granularity * moe.ffn_hidden_size + moe.shared_ffn_hidden_size}; the numbers must be equal"
        )
    kinds = {name: getattr(model, name) for name in ("num_dense_layers", "dense_layers", "moe_every")}
    return different_fields(model, replace(dense, moe=moe, **kinds))


def parts_of(weights: Weights, granularity: int) -> list[Part]:
    """All matrices of experts, routed and shared, of the whole model."""
    return [part for name, shape in weights.shapes.items() for part in _cut(name, shape, weights.config, granularity)]


def _cut(ours: str, shape: Shape, config: ModelConfig, granularity: int) -> Iterator[Part]:
    layer, local = split_name(ours)
    first, piece_width = config.moe.shared_ffn_hidden_size, config.moe.ffn_hidden_size
    width, size = first + granularity * piece_width, config.hidden_size
    names = [f"model.layers.{layer}.mlp.{name}_proj.weight" for name in ("gate", "up", "down")]
    if local == GATE_UP:
        for expert, i in product(range(shape[0]), (0, 1)):
            begin = first + expert % granularity * piece_width
            yield Part(Piece(names[i], ours, (expert, i), (width, size)), (begin, 0))
    elif local == DOWN:
        for expert in range(shape[0]):
            begin = first + expert % granularity * piece_width
            yield Part(Piece(names[2], ours, (expert,), (size, width)), (0, begin))
    elif local == SHARED_GATE_UP:
        for i in (0, 1):
            yield Part(Piece(names[i], ours, (slice(i * first, (i + 1) * first),), (width, size)), (0, 0))
    elif local == SHARED_DOWN:
        yield Part(Piece(names[2], ours, (slice(0, size),), (size, width)), (0, 0))


def on_disk(parts: Iterable[Part]) -> list[Piece]:
    """The tensors on disk of matrices, each once."""
    return list({part.piece.name: part.piece for part in parts}.values())


def load_experts(
    weights: Weights,
    parts: Sequence[Part],
    how: UpcycleConfig,
    seed: int,
    reader: FileSystemReader,
    split: Mapping[str, Tensor],
) -> None:
    """Fill this rank's experts and routers; those in `split` have split masters, and are filled layer by layer in fp32.
    Routers and noise are those of the seed, under any layout."""

    def fill(tensors: dict[str, Tensor]) -> None:
        _fill(
            weights._replace(tensors=tensors), [part for part in parts if part.piece.ours in tensors], how, seed, reader
        )

    fill({name: tensor for name, tensor in weights.tensors.items() if name not in split})
    load_numbers(split, [name for name in split if split_name(name)[1] in NOT_READ], fill)


def _fill(weights: Weights, parts: Iterable[Part], how: UpcycleConfig, seed: int, reader: FileSystemReader) -> None:
    chunks = weights.chunks()
    views: dict[tuple[str, Shape], list[Tensor]] = {}
    shapes: dict[str, Shape] = {}
    for piece, begin in parts:
        for chunk in chunks.get(piece.ours, ()):
            for values, offsets in box_of(chunk, piece):
                place = tuple(first + offset for first, offset in zip(begin, offsets, strict=True))
                views.setdefault((piece.name, place), []).append(values)
                shapes[piece.name] = piece.shape
    boxes: dict[str, list[Chunk]] = {}
    for (name, place), copies in views.items():
        boxes.setdefault(name, []).append(Chunk(copies[0], place))
    load_slices({name: ChunkedTensor(shapes[name], of_name) for name, of_name in boxes.items()}, reader)
    for first, *others in views.values():
        for copy in others:
            copy.copy_(first)
    scale = how.granularity / weights.config.moe.route_scale
    for name, of_name in chunks.items():
        local = split_name(name)[1]
        if local == ROUTER:
            _draw_router(of_name, name, weights, how, seed)
        if local == DOWN and scale != 1:
            for values, _ in of_name:
                values.mul_(scale)
        if local in (GATE_UP, DOWN) and how.noise_std:
            _add_noise(of_name, name, weights.shapes[name], how, seed)


def _draw_router(chunks: Iterable[Chunk], name: str, weights: Weights, how: UpcycleConfig, seed: int) -> None:
    """Normal rows, one for each virtual group."""
    (num_experts, width), std = weights.shapes[name], weights.config.init_std
    for chunk in chunks:
        drawn = _drawn((num_experts // how.granularity, width), f"{seed}/upcycle/{name}", std, chunk.values)
        chunk.values.copy_(_slice(drawn.repeat_interleave(how.granularity, 0), chunk.offsets, chunk.values))


def _add_noise(chunks: Iterable[Chunk], name: str, shape: Shape, how: UpcycleConfig, seed: int) -> None:
    for values, (first, *offsets) in chunks:
        for expert, of_expert in enumerate(values, start=first):
            drawn = _drawn(shape[1:], f"{seed}/upcycle/{name}/{expert}", how.noise_std, values)
            of_expert.add_(_slice(drawn, offsets, of_expert))


def _drawn(shape: Shape, key: str, std: float, like: Tensor) -> Tensor:
    """A whole tensor of normal numbers, clamped at three deviations as initial weights are."""
    wide = torch.promote_types(like.dtype, torch.float32)
    generator = torch.Generator(like.device).manual_seed(seed_of(key))
    drawn = torch.empty(shape, dtype=wide, device=like.device).normal_(0.0, std, generator=generator)
    return drawn.clamp_(-3 * std, 3 * std)


def _slice(whole: Tensor, offsets: Iterable[int], values: Tensor) -> Tensor:
    return whole[tuple(slice(begin, begin + size) for begin, size in zip(offsets, values.shape, strict=True))]
