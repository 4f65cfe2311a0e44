"""The order in which copy blocks get and put rows beside the GEMMs that use and make them.

P ranks of the group · S rows that a rank has room for · R expert slots · K experts a row · M tiles · D width

A GEMM computes the tiles of its experts' slots in order. So rows are got in the order of their first slots, and a tile
can start when all rows up to that of its last slot have been received. Rows are put in the order of their last slots,
each when the tile of that slot is done, because then all its slots are done. (A row's slots belong to different
experts.) Both orders are computed before the GEMM, with the addresses of the rows' sources and destinations. Forward
and backward share them: backward gets the gradients of results as forward gets rows, and puts the gradients of rows as
forward puts results.

Physics: latency-bound, two launches, each reads K integers a slot. 28 bytes a row and 4 an assignment are written.
Thread blocks past the last tile return at once.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from titan_moe.kernels.experts.copy_blocks import TileSchedule
from titan_moe.kernels.experts.tiles import Tiles
from titan_moe.kernels.symm_mem.arrays import SymmArray, peer_array
from titan_moe.kernels.symm_mem.assignments import find_tokens
from titan_moe.kernels.symm_mem.row_plan import RowPlan

BLOCK, CHUNK = 64, 1024
SIZES = ["rank", "num_tokens", "max_tiles"]


def schedule_tiles_reference(rows_R: Tensor, slots_SK: Tensor, tiles: Tiles) -> tuple[list[int], list[int], list[int]]:
    """Rows in the order of get, rows in the order of put, and the number of rows that each tile requires."""
    row_of_slot, slots_of_row = rows_R.tolist(), slots_SK.tolist()
    get_order: dict[int, None] = {}
    put_order: dict[int, None] = {}
    required = []
    for expert, begin, end in zip(*(tiles_M.tolist() for tiles_M in tiles[:3]), strict=True):
        for slot in range(begin, min(begin + tiles.rows, end)) if expert >= 0 else ():
            row = row_of_slot[slot]
            get_order.setdefault(row)
            if slot == max(slots_of_row[row]):
                put_order[row] = None
        required.append(len(get_order))
    return list(get_order), list(put_order), required


@triton.jit
def _read_tile(tile, rows_ptr, slots_ptr, begins_ptr, ends_ptr, K: tl.constexpr, K2: tl.constexpr, ROWS: tl.constexpr):
    """The rows of a tile's slots, all slots of these rows, and masks (0 or 1) of slots that are their row's first and
    last."""
    slot = tl.load(begins_ptr + tile) + tl.arange(0, ROWS)
    is_slot = slot < tl.load(ends_ptr + tile)
    row = tl.load(rows_ptr + slot, mask=is_slot, other=0)
    k = tl.arange(0, K2)[None, :]
    slots = tl.load(slots_ptr + row[:, None].to(tl.int64) * K + k, mask=is_slot[:, None] & (k < K), other=-1)
    is_first = is_slot & (tl.min(tl.where(slots < 0, 2147483647, slots), axis=1) == slot)
    is_last = is_slot & (tl.max(slots, axis=1) == slot)
    return row, slots, is_first.to(tl.int32), is_last.to(tl.int32)


@triton.jit(do_not_specialize=SIZES)
def _count_kernel(
    counts_ptr, rows_ptr, slots_ptr, begins_ptr, ends_ptr, num_tiles_ptr, max_tiles,
    K: tl.constexpr, K2: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    tile = tl.program_id(0)
    if tile >= tl.load(num_tiles_ptr):
        return
    _, _, is_first, is_last = _read_tile(tile, rows_ptr, slots_ptr, begins_ptr, ends_ptr, K, K2, ROWS)
    tl.store(counts_ptr + tile, tl.sum(is_first, axis=0))
    tl.store(counts_ptr + max_tiles + tile, tl.sum(is_last, axis=0))


@triton.jit(do_not_specialize=SIZES)
def _schedule_kernel(
    counts_ptr, rows_ptr, slots_ptr, begins_ptr, ends_ptr, num_tiles_ptr, tokens_ptr, row_ends_ptr, peer_ptrs_ptr,
    offset_bytes, count_ptr, get_rows_ptr, get_addresses_ptr, required_rows_ptr,
    put_slots_ptr, put_num_slots_ptr, put_addresses_ptr, put_tiles_ptr,
    rank, num_tokens, max_tiles, get_bytes, put_bytes,
    P: tl.constexpr, K: tl.constexpr, K2: tl.constexpr, ROWS: tl.constexpr, CHUNK: tl.constexpr,
):  # fmt: skip
    tile = tl.program_id(0)
    num_tiles = tl.load(num_tiles_ptr)
    tl.store(count_ptr, 0, mask=(num_tiles == 0) & (tile == 0))
    if tile >= num_tiles:
        return
    num_first = tl.zeros((), dtype=tl.int32)
    num_last = tl.zeros((), dtype=tl.int32)
    for begin in range(0, tile, CHUNK):
        earlier = begin + tl.arange(0, CHUNK)
        num_first += tl.sum(tl.load(counts_ptr + earlier, mask=earlier < tile, other=0), axis=0)
        num_last += tl.sum(tl.load(counts_ptr + max_tiles + earlier, mask=earlier < tile, other=0), axis=0)
    row, slots, is_first, is_last = _read_tile(tile, rows_ptr, slots_ptr, begins_ptr, ends_ptr, K, K2, ROWS)
    source, token, _ = find_tokens(row, tokens_ptr, row_ends_ptr, num_tokens, P)
    row_ptrs = tl.load(peer_ptrs_ptr + source) + offset_bytes
    index = num_first + tl.cumsum(is_first, axis=0) - 1
    tl.store(get_rows_ptr + index, row, mask=is_first > 0)
    tl.store(get_addresses_ptr + index, row_ptrs + token * get_bytes, mask=is_first > 0)
    tl.store(required_rows_ptr + tile, num_first + tl.sum(is_first, axis=0))
    index = num_last + tl.cumsum(is_last, axis=0) - 1
    num_slots = tl.sum((slots >= 0).to(tl.int32), axis=1)
    offset = index[:, None] * K + tl.cumsum((slots >= 0).to(tl.int32), axis=1) - 1
    tl.store(put_slots_ptr + offset, slots, mask=(is_last > 0)[:, None] & (slots >= 0))
    tl.store(put_num_slots_ptr + index, num_slots, mask=is_last > 0)
    tl.store(put_addresses_ptr + index, row_ptrs + (token * P + rank) * put_bytes, mask=is_last > 0)
    tl.store(put_tiles_ptr + index, tl.zeros_like(row) + tile, mask=is_last > 0)
    tl.store(count_ptr, num_first + tl.sum(is_first, axis=0), mask=tile == num_tiles - 1)


@triton.jit(do_not_specialize=["rank", "num_tokens", "num_rows"])
def _clear_kernel(
    like_ptr, slots_ptr, tokens_ptr, row_ends_ptr, peer_ptrs_ptr, offset_bytes, rank, num_tokens, num_rows, D,
    P: tl.constexpr, K: tl.constexpr, K2: tl.constexpr, BLOCK: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    k = tl.arange(0, K2)[None, :]
    is_assignment = (row < num_rows)[:, None] & (k < K)
    slots = tl.load(slots_ptr + row[:, None].to(tl.int64) * K + k, mask=is_assignment, other=-1)
    source, token, is_received = find_tokens(row, tokens_ptr, row_ends_ptr, num_tokens, P)
    has_no_slot = is_received & (row < num_rows) & (tl.max(slots, axis=1) < 0)
    if tl.max(has_no_slot.to(tl.int32), axis=0) > 0:
        out_ptrs = peer_array(peer_ptrs_ptr, source, offset_bytes, like_ptr) + (token * P + rank) * D
        for first_column in range(0, D, BLOCK_D):
            column = (first_column + tl.arange(0, BLOCK_D))[None, :]
            zeros = tl.zeros((BLOCK, BLOCK_D), dtype=like_ptr.dtype.element_ty)
            tl.store(out_ptrs[:, None] + column, zeros, mask=has_no_slot[:, None] & (column < D))


def clear_rows_without_slots(slots_SK: Tensor, plan: RowPlan, rows: SymmArray, rank: int) -> None:
    """Put zeros for received rows without a slot, which are in neither order; the write phase of a put."""
    (num_rows, top_k), (num_tokens, num_ranks, width) = slots_SK.shape, rows.local.shape
    if num_rows:
        _clear_kernel[(triton.cdiv(num_rows, BLOCK),)](
            rows.local, slots_SK, plan.recv_tokens_PT, plan.recv_offsets_Q, rows.peer_ptrs_P, rows.offset_bytes, rank,
            num_tokens, num_rows, width, P=num_ranks, K=top_k, K2=triton.next_power_of_2(top_k), BLOCK=BLOCK,
            BLOCK_D=min(triton.next_power_of_2(width), 256),
        )  # fmt: skip


def schedule_tiles(
    rows_R: Tensor, slots_SK: Tensor, tiles: Tiles, plan: RowPlan, sent: SymmArray, rows: SymmArray, rank: int
) -> TileSchedule:
    """Compute the schedule of all rows that have slots, which are got from `sent` and whose sums are put to `rows`, the
    same memory."""
    num_rows, top_k = slots_SK.shape
    (num_tokens, num_ranks, _), max_tiles = rows.local.shape, tiles.experts_M.numel()
    get_bytes, put_bytes = (array.local.shape[2] * array.local.dtype.itemsize for array in (sent, rows))
    counts_2M, count = rows_R.new_empty(2, max_tiles), rows_R.new_empty(1)
    get_rows_S, put_num_slots_S, put_tiles_S = (rows_R.new_empty(num_rows) for _ in range(3))
    put_slots_SK = rows_R.new_empty(num_rows, top_k)
    get_addresses_S, put_addresses_S = (rows_R.new_empty(num_rows, dtype=torch.int64) for _ in range(2))
    required_rows_M = rows_R.new_empty(max_tiles)
    sizes = {"K": top_k, "K2": triton.next_power_of_2(top_k), "ROWS": tiles.rows}
    tile_args = (rows_R, slots_SK, tiles.begins_M, tiles.ends_M, tiles.count)
    _count_kernel[(max_tiles,)](counts_2M, *tile_args, max_tiles, **sizes)
    _schedule_kernel[(max_tiles,)](
        counts_2M, *tile_args, plan.recv_tokens_PT, plan.recv_offsets_Q, rows.peer_ptrs_P, rows.offset_bytes,
        count, get_rows_S, get_addresses_S, required_rows_M,
        put_slots_SK, put_num_slots_S, put_addresses_S, put_tiles_S,
        rank, num_tokens, max_tiles, get_bytes, put_bytes, P=num_ranks, CHUNK=CHUNK, **sizes,
    )  # fmt: skip
    return TileSchedule(
        count, get_rows_S, get_addresses_S, required_rows_M, put_slots_SK, put_num_slots_S, put_addresses_S, put_tiles_S
    )
