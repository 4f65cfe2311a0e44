"""Get rows from the symmetric memory of peers, and put partial results into it.

P ranks of the group · T tokens on each rank · S rows a rank has room for · D width

Physics: bound by the links. A row of D elements crosses once to each rank that has one of its experts: with 8 of 128
experts over 8 ranks 4.67 of a token's 5.34 copies leave the device, 313 MB for 16,384 tokens of width 2048 in bf16, 0.9
ms at 350 GB/s. As many bytes return. Aim: these 350 GB/s.

`get_rows` reads each row from its token's rank and writes it where it stays. Programs alternate between the sources,
starting with this rank, so that ranks do not all read from the same peer at a time. `put_rows` has the same order and
writes each row to its token's rank, at the index of this rank. There `sum_partial_results` sums a token's P entries in
at least fp32 in rank order, so the result is deterministic. `get` and `put` with the sum are transposes: the gradient
of `get` is a `put`, and that of `put` a `get`. Rows past the last received one are neither read nor written.
"""

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from titan_moe.kernels.experts.copy_blocks import columns_at_a_time
from titan_moe.kernels.symm_mem.arrays import SymmArray, peer_array
from titan_moe.kernels.symm_mem.row_plan import RowPlan

GET_BLOCKS, PUT_BLOCKS = 64, 132
"""Thread blocks of a launch: on an H200 more than 64 hardly read faster, and 132 write faster than 64."""
GET_ELEMENTS, PUT_ELEMENTS, SUM_ELEMENTS = 16_384, 8192, 2048
"""Elements that a program moves at a time."""
SIZES = ["rank", "num_tokens", "num_blocks"]


def get_rows_reference(x_PTD: Sequence[Tensor], plan: RowPlan, max_rows: int) -> Tensor:
    """Copy each row from its token: [S, D], zero past the last."""
    x_SD = x_PTD[0].new_zeros(max_rows, x_PTD[0].shape[1])
    ends = plan.recv_offsets_Q.tolist()
    for source, x_TD in enumerate(x_PTD):
        tokens = plan.recv_tokens_PT[source, : ends[source + 1] - ends[source]].long()
        x_SD[ends[source] : ends[source + 1]] = x_TD[tokens]
    return x_SD


def sum_partial_results_reference(y_PSD: Sequence[Tensor], plans: Sequence[RowPlan], num_tokens: int) -> list[Tensor]:
    """Sum the partial results of all ranks for each rank's tokens, in at least fp32 in rank order."""
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
def _find_rows(tokens_ptr, recv_offsets_ptr, rank, item, num_tokens, P: tl.constexpr, ROWS: tl.constexpr):
    """Source rank, rows and tokens of a work item (a source and a block of its rows), and the end of its rows."""
    source = (rank + item) % P
    begin = tl.load(recv_offsets_ptr + source)
    end = tl.load(recv_offsets_ptr + source + 1)
    row = begin + item // P * ROWS + tl.arange(0, ROWS)
    token = tl.load(tokens_ptr + source.to(tl.int64) * num_tokens + row - begin, mask=row < end, other=0)
    return source, row, token, end


@triton.jit(do_not_specialize=SIZES)
def _get_kernel(
    out_ptr, tokens_ptr, recv_offsets_ptr, peer_ptrs_ptr, base_ptr, offset_bytes, rank, num_tokens, num_blocks, D,
    P: tl.constexpr, ROWS: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    if base_ptr is not None:  # a product with the width keeps its alignment
        out_ptr += tl.load(base_ptr) * D
    for item in range(tl.program_id(0), P * num_blocks, tl.num_programs(0)):
        source, row, token, end = _find_rows(tokens_ptr, recv_offsets_ptr, rank, item, num_tokens, P, ROWS)
        if tl.min(row, axis=0) < end:
            rows_ptr = peer_array(peer_ptrs_ptr, source, offset_bytes, out_ptr)
            for first_column in range(0, D, BLOCK_D):
                column = (first_column + tl.arange(0, BLOCK_D))[None, :]
                keep = (row < end)[:, None] & (column < D)
                x = tl.load(rows_ptr + token[:, None].to(tl.int64) * D + column, mask=keep, other=0.0)
                tl.store(out_ptr + row[:, None].to(tl.int64) * D + column, x, mask=keep)


@triton.jit(do_not_specialize=SIZES)
def _put_kernel(
    y_ptr, tokens_ptr, recv_offsets_ptr, peer_ptrs_ptr, offset_bytes, rank, num_tokens, num_blocks, D,
    P: tl.constexpr, ROWS: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    for item in range(tl.program_id(0), P * num_blocks, tl.num_programs(0)):
        source, row, token, end = _find_rows(tokens_ptr, recv_offsets_ptr, rank, item, num_tokens, P, ROWS)
        if tl.min(row, axis=0) < end:
            rows_ptr = peer_array(peer_ptrs_ptr, source, offset_bytes, y_ptr)
            entry = token[:, None].to(tl.int64) * P + rank
            for first_column in range(0, D, BLOCK_D):
                column = (first_column + tl.arange(0, BLOCK_D))[None, :]
                keep = (row < end)[:, None] & (column < D)
                y = tl.load(y_ptr + row[:, None].to(tl.int64) * D + column, mask=keep, other=0.0)
                tl.store(rows_ptr + entry * D + column, y, mask=keep)


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
            is_sent = tl.load(sent_mask_ptr + token * P + peer, mask=token < num_tokens, other=0)[:, None]
            offset = (token * P + peer)[:, None] * D + column
            total += tl.load(rows_ptr + offset, mask=keep & (is_sent != 0), other=0.0).to(TOTAL)
        tl.store(out_ptr + token[:, None] * D + column, total.to(out_ptr.dtype.element_ty), mask=keep)


def _tile(width: int, num_elements: int) -> dict[str, int]:
    """Rows and columns that a program moves at a time."""
    columns = columns_at_a_time(width)
    return {"ROWS": min(num_elements // columns, 64), "BLOCK_D": columns}


def own_rows(rows: SymmArray) -> Tensor:
    """The part of `rows` that holds this rank's tokens for `get_rows`: [T, D]."""
    return rows.local.flatten(0, 1)[: len(rows.local)]


def get_rows(
    plan: RowPlan,
    rows: SymmArray,
    rank: int,
    max_rows: int,
    *,
    out: Tensor | None = None,
    base: Tensor | None = None,
) -> Tensor:
    """Get the rows routed to this rank: [S, D]; the read phase of a get. Rows past the last are not written.

    Args:
        out: where they are written, a new tensor if None.
        base: int64 [2] on the device. `out` is that of several layers; this layer's rows begin at row base[0].
    """
    num_tokens, num_ranks, width = rows.local.shape
    if out is None:
        if base is not None:
            raise ValueError("base is a place in out, which is not given")
        out = rows.local.new_empty(max_rows, width)
    if num_tokens and max_rows:
        tile = _tile(width, GET_ELEMENTS)
        num_blocks = triton.cdiv(num_tokens, tile["ROWS"])
        _get_kernel[(min(GET_BLOCKS, num_ranks * num_blocks),)](
            out, plan.recv_tokens_PT, plan.recv_offsets_Q, rows.peer_ptrs_P, base, rows.offset_bytes, rank, num_tokens,
            num_blocks, width, P=num_ranks, **tile, num_warps=8,
        )  # fmt: skip
    return out


def put_rows(y_SD: Tensor, plan: RowPlan, rows: SymmArray, rank: int) -> None:
    """Put each row into its token's entry for this rank; the write phase of a put."""
    num_tokens, num_ranks, width = rows.local.shape
    if num_tokens and len(y_SD):
        tile = _tile(width, PUT_ELEMENTS)
        num_blocks = triton.cdiv(num_tokens, tile["ROWS"])
        _put_kernel[(min(PUT_BLOCKS, num_ranks * num_blocks),)](
            y_SD, plan.recv_tokens_PT, plan.recv_offsets_Q, rows.peer_ptrs_P, rows.offset_bytes, rank, num_tokens,
            num_blocks, width, P=num_ranks, **tile, num_warps=8,
        )  # fmt: skip


def sum_partial_results(sent_mask_TP: Tensor, rows: SymmArray) -> Tensor:
    """Sum the entries that peers have put for each of this rank's tokens, zero for a token without any: [T, D]; the
    read phase of a put."""
    num_tokens, num_ranks, width = rows.local.shape
    out_TD = rows.local.new_empty(num_tokens, width)
    if num_tokens:
        tile = _tile(width, SUM_ELEMENTS)
        _sum_kernel[(triton.cdiv(num_tokens, tile["ROWS"]),)](
            out_TD, rows.local, sent_mask_TP.view(torch.int8), num_tokens, width, P=num_ranks, **tile,
            TOTAL=tl.float64 if rows.local.dtype == torch.float64 else tl.float32, num_warps=4,
        )  # fmt: skip
    return out_TD
