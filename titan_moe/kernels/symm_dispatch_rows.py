"""Push rows into the memories of peers, pull their results back, and copy what lies in one's own.

P ranks of the group · T tokens on each of them · S rows a rank has room for · D width

Physics: bound by the links. A row goes once to each rank that wants it, D elements each: with 8 of 128 experts over 8
ranks 4.67 of a token's 5.34 copies leave the device, 313 MB of 16,384 tokens of width 2048, 0.9 ms at 350 GB/s; a pull
brings as much home. Few programs are enough for that, and leave the others' multiprocessors alone; how many is an
argument. Not measured yet.

A push reads a row once and stores it to all its places; the order of peers begins with the rank's own number, so that
ranks do not all write to the same one at a time. A pull reads a token's copies and sums them in at least fp32 in the
order of ranks: the same result every time. They are each other's transpose: the gradient of what was pushed is pulled,
that of what was pulled is pushed, to the same places. Copies move rows between a rank's own array and memory of its
own, as many as the device-side count says; what lies past it is neither read nor written.
"""

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from titan_moe.kernels.symm_dispatch import SymmArray, peer_array

PUSH_PROGRAMS, PULL_PROGRAMS, COPY_PROGRAMS = 24, 64, 264
TILE_ELEMENTS = 8192
"""Elements that a program has in hand at a time: of 8 warps, four accesses of 16 bytes a thread in bf16."""
SIZES = ["rank", "num_tokens"]


def push_rows_reference(x_TD: Tensor, places_TP: Tensor, rows_PSD: Sequence[Tensor]) -> None:
    """Write each token's row to its places."""
    for rows_SD, places_T in zip(rows_PSD, places_TP.unbind(1), strict=True):
        rows_SD[places_T[places_T >= 0].long()] = x_TD[places_T >= 0]


def pull_rows_reference(rows_PSD: Sequence[Tensor], places_TP: Tensor) -> Tensor:
    """Sum what lies in each token's places, in at least fp32 in the order of ranks."""
    dtype, width = rows_PSD[0].dtype, rows_PSD[0].shape[1]
    total_TD = torch.zeros(len(places_TP), width, dtype=torch.promote_types(dtype, torch.float32))
    total_TD = total_TD.to(places_TP.device)
    for rows_SD, places_T in zip(rows_PSD, places_TP.unbind(1), strict=True):
        total_TD[places_T >= 0] += rows_SD[places_T[places_T >= 0].long()]
    return total_TD.to(dtype)


@triton.jit(do_not_specialize=SIZES)
def _push_kernel(
    x_ptr, places_ptr, memory_at_ptr, offset_bytes, rank, num_tokens, D,
    P: tl.constexpr, ROWS: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    for first in range(tl.program_id(0) * ROWS, num_tokens, tl.num_programs(0) * ROWS):
        token = first + tl.arange(0, ROWS)
        for first_column in range(0, D, BLOCK_D):
            column = (first_column + tl.arange(0, BLOCK_D))[None, :]
            keep = (token < num_tokens)[:, None] & (column < D)
            x = tl.load(x_ptr + token[:, None].to(tl.int64) * D + column, mask=keep, other=0.0)
            for step in tl.static_range(P):
                peer = (rank + step) % P
                place = tl.load(places_ptr + token * P + peer, mask=token < num_tokens, other=-1)[:, None]
                rows_ptr = peer_array(memory_at_ptr, peer, offset_bytes, x_ptr)
                tl.store(rows_ptr + place.to(tl.int64) * D + column, x, mask=keep & (place >= 0))


@triton.jit(do_not_specialize=SIZES)
def _pull_kernel(
    out_ptr, places_ptr, memory_at_ptr, offset_bytes, num_tokens, D,
    P: tl.constexpr, ROWS: tl.constexpr, BLOCK_D: tl.constexpr, TOTAL: tl.constexpr,
):  # fmt: skip
    for first in range(tl.program_id(0) * ROWS, num_tokens, tl.num_programs(0) * ROWS):
        token = first + tl.arange(0, ROWS)
        for first_column in range(0, D, BLOCK_D):
            column = (first_column + tl.arange(0, BLOCK_D))[None, :]
            keep = (token < num_tokens)[:, None] & (column < D)
            total = tl.zeros((ROWS, BLOCK_D), dtype=TOTAL)
            for peer in tl.static_range(P):
                place = tl.load(places_ptr + token * P + peer, mask=token < num_tokens, other=-1)[:, None]
                rows_ptr = peer_array(memory_at_ptr, peer, offset_bytes, out_ptr)
                copy = tl.load(rows_ptr + place.to(tl.int64) * D + column, mask=keep & (place >= 0), other=0.0)
                total += copy.to(TOTAL)
            out = total.to(out_ptr.dtype.element_ty)
            tl.store(out_ptr + token[:, None].to(tl.int64) * D + column, out, mask=keep)


@triton.jit
def _copy_kernel(source_ptr, target_ptr, num_rows_ptr, D, ROWS: tl.constexpr, BLOCK_D: tl.constexpr):
    num_rows = tl.load(num_rows_ptr)
    for first in range(tl.program_id(0) * ROWS, num_rows, tl.num_programs(0) * ROWS):
        row = first + tl.arange(0, ROWS)
        for first_column in range(0, D, BLOCK_D):
            column = (first_column + tl.arange(0, BLOCK_D))[None, :]
            keep = (row < num_rows)[:, None] & (column < D)
            at = row[:, None].to(tl.int64) * D + column
            tl.store(target_ptr + at, tl.load(source_ptr + at, mask=keep, other=0.0), mask=keep)


def _tile(width: int) -> tuple[int, int]:
    """Rows and columns that a program takes at a time."""
    columns = min(triton.next_power_of_2(max(width, 1)), 2048)
    return min(TILE_ELEMENTS // columns, 64), columns


def push_rows(x_TD: Tensor, places_TP: Tensor, rows: SymmArray, rank: int, num_programs: int = PUSH_PROGRAMS) -> None:
    """Store each token's row to its places in its peers' arrays: of the write phase of a push."""
    num_tokens, width = x_TD.shape
    num_rows, columns = _tile(width)
    if num_tokens:
        _push_kernel[(min(num_programs, triton.cdiv(num_tokens, num_rows)),)](
            x_TD, places_TP, rows.memory_at_P, rows.offset_bytes, rank, num_tokens, width,
            P=places_TP.shape[1], ROWS=num_rows, BLOCK_D=columns, num_warps=8,
        )  # fmt: skip


def pull_rows(places_TP: Tensor, rows: SymmArray, num_programs: int = PULL_PROGRAMS) -> Tensor:
    """Sum each token's copies from its peers' arrays, zero for a token without one: of the read phase of a pull."""
    num_tokens, num_ranks = places_TP.shape
    width, dtype = rows.local.shape[1], rows.local.dtype
    num_rows, columns = _tile(width)
    out_TD = rows.local.new_empty(num_tokens, width)
    if num_tokens:
        _pull_kernel[(min(num_programs, triton.cdiv(num_tokens, num_rows)),)](
            out_TD, places_TP, rows.memory_at_P, rows.offset_bytes, num_tokens, width,
            P=num_ranks, ROWS=num_rows, BLOCK_D=columns,
            TOTAL=tl.float64 if dtype == torch.float64 else tl.float32, num_warps=8,
        )  # fmt: skip
    return out_TD


def copy_rows(source_SD: Tensor, target_SD: Tensor, num_rows: Tensor, num_programs: int = COPY_PROGRAMS) -> None:
    """Copy the first `num_rows` rows, an int32 scalar of the device, in or out of a rank's own array."""
    capacity, width = source_SD.shape
    block_rows, columns = _tile(width)
    if capacity:
        _copy_kernel[(min(num_programs, triton.cdiv(capacity, block_rows)),)](
            source_SD, target_SD, num_rows, width, ROWS=block_rows, BLOCK_D=columns, num_warps=8
        )
