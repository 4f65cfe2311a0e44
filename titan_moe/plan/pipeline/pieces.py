"""The pieces of a model, between which another microbatch may run.

One microbatch alone waits for its communication. Of two, one in forward and one in backward, each hides the
communication of the other (DualPipe's pairs, arXiv:2412.19437 section 3.2.1; Megatron's combined 1F1B). plan/pipeline
says which are a pair.

A block with experts has three pieces: `front` up to the start of the dispatch, `experts` up to the start of the
combine, `back`. A dense block is one piece. The pieces between two exchanges of a microbatch are a stretch: `back` of
one block, dense blocks, `front` of the next. Stretches of attention and of experts alternate, in forward and backward,
and the two microbatches take turns stretch by stretch: attention of one hides a dispatch of the other, experts hide a
combine.
"""

from collections.abc import Sequence
from typing import NamedTuple

ROOT = -1
"""The layer number of embedding, last norm and head, whose parameters are gathered together."""
DENSE = ("block",)
WITH_EXPERTS = ("front", "experts", "back")
START_EXCHANGE = ("front", "experts")
"""Pieces that end by starting an exchange, for which the next piece waits. In backward the next one starts it."""
START_LAYER = ("embed", "block", "front")
"""The first pieces of their layers."""


class Piece(NamedTuple):
    """A part of a microbatch's forward, and of its backward."""

    layer: int
    name: str


def pieces(is_dense: Sequence[bool]) -> list[Piece]:
    """The pieces of a model's forward in order, from the kinds of its blocks."""
    blocks = [Piece(layer, name) for layer, dense in enumerate(is_dense) for name in (DENSE if dense else WITH_EXPERTS)]
    return [Piece(ROOT, "embed"), *blocks, Piece(ROOT, "head")]


def stretches(is_dense: Sequence[bool]) -> list[list[Piece]]:
    """The pieces, split where an exchange of the microbatch is pending."""
    split: list[list[Piece]] = [[]]
    for piece in pieces(is_dense):
        split[-1].append(piece)
        if piece.name in START_EXCHANGE:
            split.append([])
    return split
