"""The order of a step that interleaves the forward of a microbatch with the backward of the one before, as data.

A microbatch alone waits for its communication: its next piece needs the rows. Of two microbatches, one in forward and
one in backward, each hides the communication of the other (DualPipe's pairs, arXiv:2412.19437 section 3.2.1; Megatron's
combined 1F1B), here without pipeline stages.

A block with experts is three pieces, `front` up to the start of the dispatch, `experts` up to the start of the combine,
`back`; a dense block is one. Pieces between two exchanges of a microbatch make a stretch: `back` of one block, dense
blocks, `front` of the next. In forward and in backward, stretches of attention and of experts alternate, so the two
microbatches take turns stretch by stretch. A whole stretch of one hides an exchange of the other: attention hides a
dispatch, experts hide a combine, and so in backward.

Backwards follow each other as in the plain order, so gradients add up in the same order too.
"""

from collections.abc import Iterator, Sequence
from typing import Literal, NamedTuple

ROOT = -1
"""The layer of what is in no block: embedding, last norm, head. Their parameters are gathered together."""
DENSE = ("block",)
WITH_EXPERTS = ("front", "experts", "back")
SENDERS = ("front", "experts")
"""Pieces that end with the start of an exchange; the piece that follows waits for it. In backward, the piece that
follows starts the exchange and these wait."""
OPENERS = ("embed", "block", "front")
"""The first pieces of their layers."""


class Piece(NamedTuple):
    """A part of a microbatch's forward, and of its backward."""

    layer: int
    name: str


class Action(NamedTuple):
    """What to do next."""

    kind: Literal["gather", "await", "forward", "backward", "reduce_grads"]
    """`gather` starts to gather a layer's parameters, once a step; `await` waits for it; `forward` and `backward` run a
    piece; `reduce_grads` adds up a layer's gradients of a microbatch, and after the last reduces them over ranks."""
    microbatch: int
    layer: int
    piece: str = ""


def pieces(is_dense: Sequence[bool]) -> list[Piece]:
    """The pieces of a model's forward in order, from the kinds of its blocks."""
    blocks = [Piece(layer, name) for layer, dense in enumerate(is_dense) for name in (DENSE if dense else WITH_EXPERTS)]
    return [Piece(ROOT, "embed"), *blocks, Piece(ROOT, "head")]


def stretches(is_dense: Sequence[bool]) -> list[list[Piece]]:
    """The same, cut where an exchange of the microbatch is pending."""
    cut: list[list[Piece]] = [[]]
    for piece in pieces(is_dense):
        cut[-1].append(piece)
        if piece.name in SENDERS:
            cut.append([])
    return cut


def interleaved(num_microbatches: int, is_dense: Sequence[bool]) -> list[Action]:
    """All of a step's forwards and backwards: the first forward alone, pairs of microbatches, the last backward alone.

    A pair begins with the backward, which frees what the forward will keep.
    """
    there = stretches(is_dense)
    home = [stretch[::-1] for stretch in reversed(there)]
    last = num_microbatches - 1
    actions = [Action("gather", 0, ROOT)]
    for stretch in there:
        actions += _first_forward(stretch, len(is_dense))
    for microbatch in range(last):
        for behind, ahead in zip(home, there, strict=True):
            actions += _backward(microbatch, behind)
            actions += [Action("forward", microbatch + 1, *piece) for piece in ahead]
    for stretch in home:
        actions += _backward(last, stretch)
    return actions


def _first_forward(stretch: list[Piece], num_layers: int) -> Iterator[Action]:
    """Parameters of a layer are gathered under the layer before it."""
    for piece in stretch:
        if piece.name in OPENERS:
            yield Action("await", 0, piece.layer)
            if piece.layer + 1 < num_layers:
                yield Action("gather", 0, piece.layer + 1)
        yield Action("forward", 0, *piece)


def _backward(microbatch: int, stretch: list[Piece]) -> Iterator[Action]:
    for piece in stretch:
        yield Action("backward", microbatch, *piece)
        if piece.name in OPENERS:
            yield Action("reduce_grads", microbatch, piece.layer)
