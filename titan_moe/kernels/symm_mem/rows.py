"""Fetch rows from the memories of peers, and deliver results into theirs.

P ranks of the group · T tokens on each of them · S rows a rank has room for · D width

Physics: bound by the links. A row crosses once to each rank that wants it, D elements each: with 8 of 128 experts over
8 ranks 4.67 of a token's 5.34 copies leave the device, 313 MB of 16,384 tokens of width 2048, 0.9 ms at 350 GB/s; as
much comes home. Measured on 8 H200s: fetched at 324 GB/s with 64 programs and 309 with 24, delivered at 340 with 132
and 309 with 24.

A fetch reads each row that a rank wants where its token lies and stores it where it stays; turns go round the sources,
beginning with the rank's own number, so that ranks do not all read from the same one at a time and none waits for
rows of another. A delivery takes the same turns and stores each row in the place that its token keeps for this rank,
whose rank then sums its token's places in at least fp32 in the order of ranks: the same result every time. They are
each other's transpose: the gradient of what was fetched is delivered, that of what was delivered is fetched. Rows past
the last that came are neither read nor written.
"""

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from titan_moe.kernels.symm_mem.arrays import SymmArray, peer_array
from titan_moe.kernels.symm_mem.row_plan import RowPlan

GET_BLOCKS, PUT_BLOCKS = 64, 132
GET_ELEMENTS, PUT_ELEMENTS, SUM_ELEMENTS = 16_384, 8192, 2048
"""Elements that a program has in hand at a time."""
SIZES = ["rank", "num_tokens", "num_blocks"]


def get_rows_reference(x_PTD: Sequence[Tensor], plan: RowPlan, max_rows: int) -> Tensor:
    """Take each row from its token: [S, D], zero past the last."""
    x_SD = x_PTD[0].new_zeros(max_rows, x_PTD[0].shape[1])
    ends = plan.recv_offsets_Q.tolist()
    for source, x_TD in enumerate(x_PTD):
        tokens = plan.recv_tokens_PT[source, : ends[source + 1] - ends[source]].long()
        x_SD[ends[source] : ends[source + 1]] = x_TD[tokens]
    return x_SD


def sum_partial_results_reference(y_PSD: Sequence[Tensor], plans: Sequence[RowPlan], num_tokens: int) -> list[Tensor]:
    """Sum what ranks have for each rank's tokens, in at least fp32 in the order of ranks."""
    dtype, width = y_PSD[0].dtype, y_PSD[0].shape[1]
    totals = [
        torch.zeros(num_tokens, width, dtype=torch.promote_types(dtype, torch.float32), device=y_PSD[0].device)
        for _ in plans
    ]
    for y_SD, plan in zip(y_PSD, plans, strict=True):
        ends = plan.recv_offsets_Q.tolist()
        for source, total_TD in enumerate(totals):
            tokens = plan.recv_tokens_PT[source, : ends[source + 1] - ends[source]].long()
            total_TD[tokens] += y_SD[ends[source] : ends[source + 1]]
    return [total_TD.to(dtype) for total_TD in totals]


@triton.jit
def _find_rows(tokens_ptr, ends_ptr, rank, turn, num_tokens, P: tl.constexpr, ROWS: tl.constexpr):
    """The source whose turn it is, its block of rows, their tokens, and where its rows end."""
    source = (rank + turn) % P
    begin = tl.load(ends_ptr + source)
    end = tl.load(ends_ptr + source + 1)
    row = begin + turn // P * ROWS + tl.arange(0, ROWS)
    token = tl.load(tokens_ptr + source.to(tl.int64) * num_tokens + row - begin, mask=row < end, other=0)
    return source, row, token, end


@triton.jit(do_not_specialize=SIZES)
def _get_kernel(
    out_ptr, tokens_ptr, ends_ptr, peer_ptrs_ptr, offset_bytes, rank, num_tokens, num_blocks, D,
    P: tl.constexpr, ROWS: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    for turn in range(tl.program_id(0), P * num_blocks, tl.num_programs(0)):
        source, row, token, end = _find_rows(tokens_ptr, ends_ptr, rank, turn, num_tokens, P, ROWS)
        if tl.min(row, axis=0) < end:
            rows_ptr = peer_array(peer_ptrs_ptr, source, offset_bytes, out_ptr)
            for first_column in range(0, D, BLOCK_D):
                column = (first_column + tl.arange(0, BLOCK_D))[None, :]
                keep = (row < end)[:, None] & (column < D)
                x = tl.load(rows_ptr + token[:, None].to(tl.int64) * D + column, mask=keep, other=0.0)
                tl.store(out_ptr + row[:, None].to(tl.int64) * D + column, x, mask=keep)


@triton.jit(do_not_specialize=SIZES)
def _put_kernel(
    y_ptr, tokens_ptr, ends_ptr, peer_ptrs_ptr, offset_bytes, rank, num_tokens, num_blocks, D,
    P: tl.constexpr, ROWS: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    for turn in range(tl.program_id(0), P * num_blocks, tl.num_programs(0)):
        source, row, token, end = _find_rows(tokens_ptr, ends_ptr, rank, turn, num_tokens, P, ROWS)
        if tl.min(row, axis=0) < end:
            rows_ptr = peer_array(peer_ptrs_ptr, source, offset_bytes, y_ptr)
            place = token[:, None].to(tl.int64) * P + rank
            for first_column in range(0, D, BLOCK_D):
                column = (first_column + tl.arange(0, BLOCK_D))[None, :]
                keep = (row < end)[:, None] & (column < D)
                y = tl.load(y_ptr + row[:, None].to(tl.int64) * D + column, mask=keep, other=0.0)
                tl.store(rows_ptr + place * D + column, y, mask=keep)


@triton.jit(do_not_specialize=SIZES)
def _sum_kernel(
    out_ptr, rows_ptr, sent_mask_ptr, num_tokens, D,
    P: tl.constexpr, ROWS: tl.constexpr, BLOCK_D: tl.constexpr, TOTAL: tl.constexpr,
):  # fmt: skip
    token = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    for first_column in range(0, D, BLOCK_D):
        column = (first_column + tl.arange(0, BLOCK_D))[None, :]
        keep = (token < num_tokens)[:, None] & (column < D)
        total = tl.zeros((ROWS, BLOCK_D), dtype=TOTAL)
        for peer in tl.static_range(P):
            sent_mask = tl.load(sent_mask_ptr + token * P + peer, mask=token < num_tokens, other=0)[:, None]
            there = (token * P + peer)[:, None] * D + column
            total += tl.load(rows_ptr + there, mask=keep & (sent_mask != 0), other=0.0).to(TOTAL)
        tl.store(out_ptr + token[:, None] * D + column, total.to(out_ptr.dtype.element_ty), mask=keep)


def _tile(width: int, num_elements: int) -> dict[str, int]:
    """Rows and columns that a program takes at a time."""
    columns = min(triton.next_power_of_2(max(width, 1)), 2048)
    return {"ROWS": min(num_elements // columns, 64), "BLOCK_D": columns}


def own_rows(rows: SymmArray) -> Tensor:
    """Where the rank's tokens lie to be fetched: [T, D]."""
    return rows.local.flatten(0, 1)[: len(rows.local)]


def get_rows(plan: RowPlan, rows: SymmArray, rank: int, max_rows: int) -> Tensor:
    """Load the rows that come to this rank from their tokens, [S, D] of which those past the last are not written: of
    the read phase of a fetch."""
    num_tokens, num_ranks, width = rows.local.shape
    x_SD = rows.local.new_empty(max_rows, width)
    if num_tokens and max_rows:
        tile = _tile(width, GET_ELEMENTS)
        num_blocks = triton.cdiv(num_tokens, tile["ROWS"])
        _get_kernel[(min(GET_BLOCKS, num_ranks * num_blocks),)](
            x_SD, plan.recv_tokens_PT, plan.recv_offsets_Q, rows.peer_ptrs_P, rows.offset_bytes, rank, num_tokens, num_blocks,
            width, P=num_ranks, **tile, num_warps=8,
        )  # fmt: skip
    return x_SD


def put_rows(y_SD: Tensor, plan: RowPlan, rows: SymmArray, rank: int) -> None:
    """Store each row in its token's place for this rank: of the write phase of a delivery."""
    num_tokens, num_ranks, width = rows.local.shape
    if num_tokens and len(y_SD):
        tile = _tile(width, PUT_ELEMENTS)
        num_blocks = triton.cdiv(num_tokens, tile["ROWS"])
        _put_kernel[(min(PUT_BLOCKS, num_ranks * num_blocks),)](
            y_SD, plan.recv_tokens_PT, plan.recv_offsets_Q, rows.peer_ptrs_P, rows.offset_bytes, rank, num_tokens, num_blocks,
            width, P=num_ranks, **tile, num_warps=8,
        )  # fmt: skip


def sum_partial_results(sent_mask_TP: Tensor, rows: SymmArray) -> Tensor:
    """Sum the places of each of this rank's tokens that have something, zero for a token without: of the read phase of
    a delivery."""
    num_tokens, num_ranks, width = rows.local.shape
    out_TD = rows.local.new_empty(num_tokens, width)
    if num_tokens:
        tile = _tile(width, SUM_ELEMENTS)
        _sum_kernel[(triton.cdiv(num_tokens, tile["ROWS"]),)](
            out_TD, rows.local, sent_mask_TP.view(torch.int8), num_tokens, width, P=num_ranks, **tile,
            TOTAL=tl.float64 if rows.local.dtype == torch.float64 else tl.float32, num_warps=4,
        )  # fmt: skip
    return out_TD
