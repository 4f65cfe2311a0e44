"""Layout of the symmetric memory that the ranks of one node share, and the rules of its use.

P ranks of the group · T tokens on each rank · S rows a rank receives, at most P·T · K experts a token · D width

Every rank has an allocation of the same layout and a table of all ranks' addresses. A kernel reads and writes a peer's
arrays like its own. The layout depends on T, K and D alone. An exchange may use fewer tokens than were allocated for,
if all ranks do. How many rows a rank receives, and how many it allocates room for, does not affect the layout. The rows
take nearly all of the memory, P·T·D elements: 0.5 GiB for 8 ranks of 16,384 tokens of width 2048 in bf16, whatever the
routing.

An exchange has two phases. In the *write* phase a rank writes arrays, its own or its peers'. In the *read* phase it
reads them. A barrier of the group precedes each phase. This makes the arrays free for the next exchange, of any layer,
microbatch or direction: a rank's writes begin after the first barrier, where every rank arrives after its reads of the
previous exchange; its reads begin after the second, where every rank arrives after its writes. All exchanges over one
allocation must run in the same order on every rank, on one stream. Each stream needs its own allocation.

    exchange    write phase                                   read phase
    plan        counts and token lists, to every peer         its own counts and lists: what each rank sends it
    get         rows, ids and scores of its tokens, locally   the rows that are routed to it, from peers
    put         partial results, into the peers' arrays       the partial results of its own tokens, which it sums

In both directions a row crosses the link once, between symmetric and ordinary memory: `get` writes rows where backward
keeps them, `put` reads results where experts wrote them. Beyond that, T rows are copied into symmetric memory for
`get`, and the sum after `put` reads P·T. Pushing rows for dispatch and pulling them for combine copies more and is
slower in both directions.
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
HEADER_WORDS = 6
"""int32 words before the signals. Word 0 is 0 until a barrier on any rank gives up on a rank, then that rank + 1. Words
2 and 3 are the address of an int32 in this rank's host memory that gets the same value, or 0. Words 4 and 5 are the
limit of a barrier in nanoseconds, or 0 for the default."""


class SymmArray(NamedTuple):
    """One array that every rank has, at the same offset in its memory."""

    local: Tensor
    """This rank's own."""
    peer_ptrs_P: Tensor
    """int64, the addresses of all ranks' memory in this rank's address space."""
    offset_bytes: int


class SymmArrays(NamedTuple):
    """The arrays of a rank's memory."""

    signals: SymmArray
    """int32 [HEADER_WORDS + P]: the header, then the signals of the barrier, all 0 between two barriers."""
    counts: SymmArray
    """int32 [P, P]: number of rows from each rank (first dim) to each rank (second)."""
    tokens: SymmArray
    """int32 [P, T]: for each source rank, the tokens whose rows it sends, in ascending order."""
    ids: SymmArray
    """int32 [T, K]: experts of this rank's tokens, -1 for none."""
    scores: SymmArray
    """[T, P, K]: score gradients that each rank puts for each token; or, in the first T·K elements, the tokens' routing
    scores for `get`."""
    rows: SymmArray
    """[T, P, D]: the row that each rank puts for each token; or, in the first T·D elements, the tokens' rows for
    `get`."""


def _layout(
    num_ranks: int, num_tokens: int, width: int, top_k: int, row_dtype: torch.dtype, score_dtype: torch.dtype
) -> tuple[list[tuple[tuple[int, ...], torch.dtype, int]], int]:
    """Shape, dtype and byte offset of each array, and the total bytes."""
    layout, end = [], 0
    shapes: Sequence[tuple[tuple[int, ...], torch.dtype]] = (
        ((HEADER_WORDS + num_ranks,), torch.int32),
        ((num_ranks, num_ranks), torch.int32),
        ((num_ranks, num_tokens), torch.int32),
        ((num_tokens, top_k), torch.int32),
        ((num_tokens, num_ranks, top_k), score_dtype),
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
    top_k: int,
    row_dtype: torch.dtype,
    score_dtype: torch.dtype = torch.float32,
) -> int:
    """Bytes that each rank must allocate for `num_tokens` tokens a rank, for any routing."""
    return _layout(num_ranks, num_tokens, width, top_k, row_dtype, score_dtype)[1]


def symm_arrays(
    memory: Tensor,
    peer_ptrs_P: Tensor,
    num_tokens: int,
    width: int,
    top_k: int,
    row_dtype: torch.dtype,
    score_dtype: torch.dtype = torch.float32,
) -> SymmArrays:
    """View this rank's memory as the arrays of `num_tokens` tokens; ranks that pass the same numbers get the same
    layout.

    Shapes: memory uint8 [at least symm_bytes(...)], aligned to 16 bytes; peer_ptrs_P int64 [P].

    Raises: ValueError if the memory is too small.
    """
    num_ranks = peer_ptrs_P.numel()
    layout, needed = _layout(num_ranks, num_tokens, width, top_k, row_dtype, score_dtype)
    if memory.numel() < needed:
        raise ValueError(
            f"{num_tokens} tokens on each of {num_ranks} ranks, top_k = {top_k} and width {width} in {row_dtype}, need "
            f"{needed} bytes of symmetric memory, but {memory.numel()} are allocated; allocate it for the largest "
            f"microbatch"
        )
    scratch = memory.data  # contents are not read after an exchange, so autograd must not count writes as versions
    arrays = [
        SymmArray(scratch[at : at + prod(shape) * dtype.itemsize].view(dtype).view(shape), peer_ptrs_P, at)
        for shape, dtype, at in layout
    ]
    return SymmArrays(*arrays)


def narrower(rows: SymmArray, width: int) -> SymmArray:
    """The same memory as an array [T, P, width] of narrower rows."""
    num_tokens, num_ranks, _ = rows.local.shape
    local = rows.local.flatten()[: num_tokens * num_ranks * width].view(num_tokens, num_ranks, width)
    return rows._replace(local=local)


@triton.jit
def peer_array(peer_ptrs_ptr, peer, offset_bytes, like_ptr):
    """Pointer to a peer's array, with the element type of `like_ptr`."""
    address = tl.load(peer_ptrs_ptr + peer) + offset_bytes
    # arrays are aligned; the compiler must be told after the cast, which drops what it knew of the integer
    return tl.multiple_of(address.to(tl.pointer_type(like_ptr.dtype.element_ty)), 16)
