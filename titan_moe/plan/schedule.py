"""The schedule of a step that interleaves the forward of a microbatch with the backward of the one before, as data.

One microbatch alone waits for its communication. Of two, one in forward and one in backward, each hides the
communication of the other (DualPipe's pairs, arXiv:2412.19437 section 3.2.1; Megatron's combined 1F1B). `interleaved`
is the schedule without pipeline stages; the pairs of a pipeline (plan/pipeline) take turns by the same stretches.

A block with experts has three pieces: `front` up to the start of the dispatch, `experts` up to the start of the
combine, `back`. A dense block is one piece. The pieces between two exchanges of a microbatch are a stretch: `back` of
one block, dense blocks, `front` of the next. Stretches of attention and of experts alternate, in forward and backward,
and the two microbatches take turns stretch by stretch: attention of one hides a dispatch of the other, experts hide a
combine.

Backwards run in the plain order, so gradients are summed in the same order too.
"""

from collections.abc import Iterator, Sequence
from typing import Literal, NamedTuple

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


class Action(NamedTuple):
    """One action of the schedule."""

    kind: Literal["gather", "await", "forward", "backward", "reduce_grads"]
    """`gather` starts the all-gather of a layer's parameters, once a step, and `await` waits for it; `forward` and
    `backward` run a piece; `reduce_grads` accumulates a layer's gradients, after the last microbatch reduces them."""
    microbatch: int
    layer: int
    piece: str = ""


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


def interleaved(num_microbatches: int, is_dense: Sequence[bool]) -> list[Action]:
    """The schedule of a step: the first forward alone, pairs of microbatches, the last backward alone.

    In a pair the backward is first: it frees memory for the forward.
    """
    forward = stretches(is_dense)
    backward = [stretch[::-1] for stretch in reversed(forward)]
    actions = [Action("gather", 0, ROOT)]
    for stretch in forward:
        actions += _first_forward(stretch, len(is_dense))
    for microbatch in range(num_microbatches - 1):
        for one, other in zip(backward, forward, strict=True):
            actions += _backward(microbatch, one)
            actions += [Action("forward", microbatch + 1, *piece) for piece in other]
    for stretch in backward:
        actions += _backward(num_microbatches - 1, stretch)
    return actions


def _first_forward(stretch: list[Piece], num_layers: int) -> Iterator[Action]:
    """Parameters of a layer are gathered during the layer before it."""
    for piece in stretch:
        if piece.name in START_LAYER:
            yield Action("await", 0, piece.layer)
            if piece.layer + 1 < num_layers:
                yield Action("gather", 0, piece.layer + 1)
        yield Action("forward", 0, *piece)


def _backward(microbatch: int, stretch: list[Piece]) -> Iterator[Action]:
    for piece in stretch:
        yield Action("backward", microbatch, *piece)
        if piece.name in START_LAYER:
            yield Action("reduce_grads", microbatch, piece.layer)
