"""The order of a step in which the forward of a microbatch is interleaved with the backward of the one before, as data.

A microbatch alone waits for its messages: its next piece needs the rows. Two microbatches, one on its way through the
model and one on its way back, can wait for each other's (DualPipe's pairs, arXiv:2412.19437 section 3.2.1; Megatron's
combined 1F1B), here without pipeline stages.

A block with experts is three pieces, `front` up to the start of the dispatch, `experts` up to the start of the combine,
`back`; a dense block is one. Pieces between two messages of a microbatch make a stretch: `back` of one block, dense
blocks, `front` of the next. On both ways stretches of attention and of experts take turns, so the two microbatches take
turns stretch by stretch, and each message travels under a whole stretch of the other: one with attention under experts'
rows on their way there, one with experts under results on their way home, and the same for gradients.

Backwards follow each other as in the plain order, so gradients add up in the same order too.
"""

from collections.abc import Iterator, Sequence
from typing import Literal, NamedTuple

ROOT = -1
"""The layer of what lies in no block: embedding, last norm, head. Their parameters are gathered together."""
DENSE = ("block",)
WITH_EXPERTS = ("front", "experts", "back")
SENDERS = ("front", "experts")
"""Pieces that end with the start of a message; the piece that follows waits for it. On the way back, the piece that
follows starts the message home and these wait."""
OPENERS = ("embed", "block", "front")
"""The first pieces of their layers."""


class Piece(NamedTuple):
    """A part of a microbatch's forward, and of its backward."""

    layer: int
    name: str


class Action(NamedTuple):
    """What to do next."""

    kind: Literal["gather", "await", "forward", "backward", "reduce_grads"]
    """`gather` starts the gathering of a layer's parameters, once a step; `await` waits for it; `forward` and
    `backward` run a piece; `reduce_grads` books a layer's gradients of a microbatch, and reduces those of the last."""
    microbatch: int
    layer: int
    piece: str = ""


def pieces(is_dense: Sequence[bool]) -> list[Piece]:
    """The pieces of a model's forward in order, from the kinds of its blocks."""
    blocks = [Piece(layer, name) for layer, dense in enumerate(is_dense) for name in (DENSE if dense else WITH_EXPERTS)]
    return [Piece(ROOT, "embed"), *blocks, Piece(ROOT, "head")]


def stretches(is_dense: Sequence[bool]) -> list[list[Piece]]:
    """The same, cut where a microbatch has a message on its way."""
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
