"""The memory that ranks of one node share when rows travel without the host, and the rules of its use.

P ranks of the group · T tokens on each of them · S rows a rank receives, at most P·T · K choices a token · D width

Every rank has an allocation of the same layout, and a table with the address of everyone's: a kernel reads and writes
a peer's arrays as it does its own. The layout depends on T, K and D alone, and an exchange may lay out fewer tokens
over it if all ranks do; how many rows a rank receives, and how much room it makes for them, is its own affair. The rows
take nearly all of it, P·T·D elements: 0.5 GiB for 8 ranks of 16,384 tokens of width 2048 in bf16, whatever the routing.

Exchanges come in phases. In the *write* phase of an exchange a rank fills arrays, its own or its peers'; in its *read*
phase it reads them. A barrier of the group stands before each phase. So one rule is enough for the arrays to be used
again by the next exchange, of whichever layer, chunk or direction: a rank's writes begin after the first barrier, at
which every rank arrives when its reads of the exchange before are done; its reads begin after the second, at which
every rank arrives when its writes are done. All exchanges over one allocation must be in one order on every rank, on
one stream: each stream takes an allocation of its own.

    exchange    writes                                      reads
    plan        counts and lists of tokens, to every peer   its own: who sends it what
    fetch       its tokens' rows and choices, its own       the rows that it wants, from peers
    deliver     partial results, into their tokens' places  its own tokens' places, which it sums

Both ways a row crosses the link once, between memory that exchanges own and memory that they do not: what a rank
fetches lies at once where it stays for the backward, and what it delivers is read where the experts have left it. Only
T rows are copied to be fetched from, 0.03 ms for 16,384 of width 2048, and P·T read to be summed, 0.11 ms. (Rows that
are pushed and copied out, and copied in and pulled, were 0.17 ms slower each way.)
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
HEADER_WORDS = 4
"""int32 words before the signals. Word 0 is 0 until a barrier of any rank gives a rank up, then that rank + 1. Words 2
and 3 are the address of an int32 of this rank's host, which is told the same; or 0."""


class SymmArray(NamedTuple):
    """One array that every rank has, at the same distance from where its memory begins."""

    local: Tensor
    """This rank's own."""
    peer_ptrs_P: Tensor
    """int64, the addresses of everyone's memory, as this rank sees them."""
    offset_bytes: int


class SymmArrays(NamedTuple):
    """What a rank's memory holds."""

    signals: SymmArray
    """int32 [HEADER_WORDS + P]: the header, then the signals of the barrier, all 0 between two of them."""
    counts: SymmArray
    """int32 [P, P]: rows from each rank (first) for each rank."""
    tokens: SymmArray
    """int32 [P, T]: from each rank, the tokens whose rows they are, in ascending order."""
    ids: SymmArray
    """int32 [T, K]: experts of this rank's tokens, -1 for none."""
    scores: SymmArray
    """[T, P, K]: a place for the gradients that each rank delivers for each token; or, in the first T·K elements, the
    tokens' routing scores."""
    rows: SymmArray
    """[T, P, D]: a place for the row that each rank delivers for each token; or, in the first T·D elements, the
    tokens' rows."""


def _layout(
    num_ranks: int, num_tokens: int, width: int, num_choices: int, row_dtype: torch.dtype, score_dtype: torch.dtype
) -> tuple[list[tuple[tuple[int, ...], torch.dtype, int]], int]:
    """Shape, dtype and offset of each array, and the bytes of all."""
    layout, end = [], 0
    shapes: Sequence[tuple[tuple[int, ...], torch.dtype]] = (
        ((HEADER_WORDS + num_ranks,), torch.int32),
        ((num_ranks, num_ranks), torch.int32),
        ((num_ranks, num_tokens), torch.int32),
        ((num_tokens, num_choices), torch.int32),
        ((num_tokens, num_ranks, num_choices), score_dtype),
        ((num_tokens, num_ranks, width), row_dtype),
    )
    for shape, dtype in shapes:
        layout.append((shape, dtype, end))
        end += -(-prod(shape) * dtype.itemsize // ALIGNMENT) * ALIGNMENT
    return layout, end


def signal_bytes(num_ranks: int) -> int:
    """Bytes before everything else: the header and the signals, aligned."""
    return -(-(HEADER_WORDS + num_ranks) * 4 // ALIGNMENT) * ALIGNMENT


def symm_bytes(
    num_ranks: int,
    num_tokens: int,
    width: int,
    num_choices: int,
    row_dtype: torch.dtype,
    score_dtype: torch.dtype = torch.float32,
) -> int:
    """Bytes that each rank must allocate for `num_tokens` tokens a rank, whatever the routing."""
    return _layout(num_ranks, num_tokens, width, num_choices, row_dtype, score_dtype)[1]


def symm_arrays(
    memory: Tensor,
    peer_ptrs_P: Tensor,
    num_tokens: int,
    width: int,
    num_choices: int,
    row_dtype: torch.dtype,
    score_dtype: torch.dtype = torch.float32,
) -> SymmArrays:
    """Lay the arrays of `num_tokens` tokens over this rank's memory; ranks that do so with the same numbers see the
    same arrays.

    Shapes: memory uint8 [at least symm_bytes(...)], aligned to 16 bytes; peer_ptrs_P int64 [P].

    Raises: ValueError if the memory is too small.
    """
    num_ranks = peer_ptrs_P.numel()
    layout, wanted = _layout(num_ranks, num_tokens, width, num_choices, row_dtype, score_dtype)
    if memory.numel() < wanted:
        raise ValueError(
            f"{num_tokens} tokens on each of {num_ranks} ranks, with {num_choices} choices and {width} wide in "
            f"{row_dtype}, take {wanted} bytes of symmetric memory, and {memory.numel()} were allocated: allocate it "
            f"for the largest microbatch"
        )
    scratch = memory.data  # nobody reads what an exchange has left: autograd must not count its writes as changes
    arrays = [
        SymmArray(scratch[at : at + prod(shape) * dtype.itemsize].view(dtype).view(shape), peer_ptrs_P, at)
        for shape, dtype, at in layout
    ]
    return SymmArrays(*arrays)


@triton.jit
def peer_array(peer_ptrs_ptr, peer, offset_bytes, like_ptr):
    """Point at a peer's array, of the elements of another pointer."""
    address = tl.load(peer_ptrs_ptr + peer) + offset_bytes
    # arrays are aligned, which the compiler must hear of the pointer: it forgets what it knew of the number
    return tl.multiple_of(address.to(tl.pointer_type(like_ptr.dtype.element_ty)), 16)
