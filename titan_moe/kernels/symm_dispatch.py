"""The memory that ranks of one node share when rows travel without the host, and the rules of its use.

P ranks of the group · T tokens on each of them · S rows a rank can receive, at most P·T · K choices a token · D width

Every rank has an allocation of the same layout, and a table with the address of everyone's: a kernel reads and writes
a peer's arrays as it does its own. The rows take nearly all of it, P·T·D elements: 0.5 GiB for 8 ranks of 16,384
tokens of width 2048 in bf16, whatever the routing. An exchange may lay out fewer rows over it, S; all ranks must agree
on how many, and no two exchanges need to.

Exchanges come in phases. In the *write* phase of an exchange a rank fills arrays, its own or its peers'; in its *read*
phase it reads them. A barrier of the group stands before each phase. So one rule is enough for the arrays to be used
again by the next exchange, of whichever layer, chunk or direction: a rank's writes begin after the first barrier, at
which every rank arrives when its reads of the exchange before are done; its reads begin after the second, at which
every rank arrives when its writes are done. All exchanges over one allocation must be in one order on every rank, on
one stream: each stream takes an allocation of its own.

    exchange    writes                                     reads
    plan        counts, into every peer's table            its own table: where each token's copies lie
    push        rows, ids and scores, into peers' arrays   its own arrays, out of which it copies
    pull        its own arrays                             its tokens' copies, from peers' arrays

What a rank received stays valid until the next exchange writes, so it is copied out: one read and one write of the
rows that came, 0.1 ms for 87,000 rows of width 2048 at 4.2 TB/s (computed), and S·D elements kept for the backward.
Whoever knows that the rows are consumed before the next exchange, or sends them again in the backward, can hand
`arrays.rows.local` to the experts instead; an expert kernel that writes its sums there saves the copy of a pull.
"""

from collections.abc import Sequence
from math import prod
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

ALIGNMENT = 256
"""Arrays begin at multiples of it, in bytes."""


class SymmArray(NamedTuple):
    """One array that every rank has, at the same distance from where its memory begins."""

    local: Tensor
    """This rank's own."""
    memory_at_P: Tensor
    """int64, the addresses of everyone's memory, as this rank sees them."""
    offset_bytes: int


class SymmArrays(NamedTuple):
    """What a rank's memory holds."""

    signals: SymmArray
    """int32 [P]: of the barrier, all 0 between two of them."""
    counts: SymmArray
    """int32 [P, P]: copies from each rank (first) for each rank."""
    ids: SymmArray
    """int32 [S, K]: local experts, -1 for none."""
    scores: SymmArray
    """[S, K]: routing scores, or their gradients on the way home."""
    rows: SymmArray
    """[S, D]: rows, partial results, or their gradients."""


def _layout(
    num_ranks: int, num_rows: int, width: int, num_choices: int, row_dtype: torch.dtype, score_dtype: torch.dtype
) -> tuple[list[tuple[tuple[int, ...], torch.dtype, int]], int]:
    """Shape, dtype and offset of each array, and the bytes of all."""
    layout, end = [], 0
    shapes: Sequence[tuple[tuple[int, ...], torch.dtype]] = (
        ((num_ranks,), torch.int32),
        ((num_ranks, num_ranks), torch.int32),
        ((num_rows, num_choices), torch.int32),
        ((num_rows, num_choices), score_dtype),
        ((num_rows, width), row_dtype),
    )
    for shape, dtype in shapes:
        layout.append((shape, dtype, end))
        end += -(-prod(shape) * dtype.itemsize // ALIGNMENT) * ALIGNMENT
    return layout, end


def symm_bytes(
    num_ranks: int,
    num_tokens: int,
    width: int,
    num_choices: int,
    row_dtype: torch.dtype,
    score_dtype: torch.dtype = torch.float32,
) -> int:
    """Bytes that each rank must allocate for `num_tokens` tokens a rank, whatever the routing."""
    return _layout(num_ranks, num_ranks * num_tokens, width, num_choices, row_dtype, score_dtype)[1]


def symm_arrays(
    memory: Tensor,
    memory_at_P: Tensor,
    num_rows: int,
    width: int,
    num_choices: int,
    row_dtype: torch.dtype,
    score_dtype: torch.dtype = torch.float32,
) -> SymmArrays:
    """Lay arrays with room for `num_rows` rows over this rank's memory; ranks that do so with the same numbers see the
    same arrays.

    Shapes: memory uint8 [at least symm_bytes(...)], aligned to 16 bytes; memory_at_P int64 [P].

    Raises: ValueError if the memory is too small.
    """
    num_ranks = memory_at_P.numel()
    layout, wanted = _layout(num_ranks, num_rows, width, num_choices, row_dtype, score_dtype)
    if memory.numel() < wanted:
        raise ValueError(
            f"{num_rows} rows from {num_ranks} ranks, with {num_choices} choices and {width} wide in {row_dtype}, take "
            f"{wanted} bytes of symmetric memory, and {memory.numel()} were allocated: allocate it for the largest "
            f"microbatch"
        )
    arrays = [
        SymmArray(memory[at : at + prod(shape) * dtype.itemsize].view(dtype).view(shape), memory_at_P, at)
        for shape, dtype, at in layout
    ]
    return SymmArrays(*arrays)


@triton.jit
def peer_array(memory_at_ptr, peer, offset_bytes, like_ptr):
    """Point at a peer's array, of the elements of another pointer."""
    address = tl.load(memory_at_ptr + peer) + offset_bytes
    # arrays are aligned, which the compiler must hear of the pointer: it forgets what it knew of the number
    return tl.multiple_of(address.to(tl.pointer_type(like_ptr.dtype.element_ty)), 16)
