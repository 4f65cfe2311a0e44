"""Copy blocks: thread blocks of a GEMM's launch that copy rows, and the signals between them and the tiles.

S rows · R expert slots · K experts a row · M tiles · D width

Thread blocks start in index order. Copy blocks have the lowest indices, so they are resident before any tile waits for
them. They are as many as saturate the links, but at most one for two multiprocessors (and at
least one), and leave the others to tiles.

Copy blocks take blocks of rows in turn. *Get*: each counts the blocks that it has copied, and a tile waits for all rows
that it reads. *Put*: each waits for the tiles of a block's last slots; tiles signal completion by group. The
interpreter runs thread blocks one by one, so copy blocks that wait come last there.

No wait is endless. A launch gets or puts, never both. Where it gets, tiles wait for copy blocks, which are resident and
wait for nothing in the launch. Where it puts, copy blocks wait for tiles, which wait for nothing. This holds whichever
thread block computes a tile, and however many it computes in turn (tiles.py). Thread blocks that loop take tiles in
ascending order, in which rows are got and put, so a wait delays no tile whose rows have been received. Such thread
blocks compute and signal no tile past the last one, and put waits for none.

Memory order: a sender's threads pass a barrier before the release, a receiver's after the acquire.

kernels/symm_mem/tile_schedule.py computes the lists of rows. Rows are aligned to 16 bytes, as the GEMMs need them.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from titan_moe.kernels.device import num_multiprocessors


class TileSchedule(NamedTuple):
    """The orders in which rows that have slots are got and put; entries past `count` are undefined."""

    count: Tensor
    """int32 [1], number of rows."""
    get_rows_S: Tensor
    """int32, rows ordered by their first slots."""
    get_addresses_S: Tensor
    """int64, their sources."""
    required_rows_M: Tensor
    """int32, how many of them a tile waits for; undefined past the last tile."""
    put_slots_SK: Tensor
    """int32, slots of each row in the order of choices, valid ones first; rows ordered by their last slots."""
    put_num_slots_S: Tensor
    """int32, number of valid ones."""
    put_addresses_S: Tensor
    """int64, destinations of their sums."""
    put_tiles_S: Tensor
    """int32, tiles of their last slots."""


def columns_at_a_time(width: int) -> int:
    """The columns of a row that are copied at a time, a power of two; a scale behind 4,096 codes is no piece alone."""
    most = 4096 if 2048 < width <= 2048 + 64 else 2048
    return min(triton.next_power_of_2(max(width, 1)), most)


class CopyBlocks(NamedTuple):
    """Thread blocks that copy rows beside a GEMM."""

    number: int
    elements: int
    """Elements copied at a time, while the next are loaded; a power of two."""

    def sizes(self, num_rows: int, width: int, device: torch.device) -> dict[str, int]:
        """Launch arguments for `num_rows` rows: number of copy blocks, rows and columns copied at a time."""
        columns = min(columns_at_a_time(width), self.elements)
        rows = min(self.elements // columns, 64)
        wanted = triton.next_power_of_2(max(triton.cdiv(num_rows, rows), 1))  # few distinct values
        multiprocessors = num_multiprocessors(device)
        most = self.number if multiprocessors is None else min(self.number, max(multiprocessors // 2, 1))
        number = min(most, wanted)
        return {"COPY_BLOCKS": number, "COPIED_ROWS": rows, "COPIED_COLUMNS": columns}


def get_arguments(
    schedule: TileSchedule | None, copy_blocks: CopyBlocks, width: int
) -> tuple[tuple[Tensor | None, ...], dict[str, int]]:
    """Launch arguments of a GEMM that gets its rows; without schedule they are already in place."""
    if schedule is None:
        return (None,) * 5, {"COPY_BLOCKS": 0, "COPY_BLOCKS2": 0, "COPIED_ROWS": 0, "COPIED_COLUMNS": 0}
    sizes = copy_blocks.sizes(schedule.get_rows_S.numel(), width, schedule.count.device)
    arrived = schedule.count.new_zeros(sizes["COPY_BLOCKS"])
    lists = (schedule.get_addresses_S, schedule.get_rows_S, schedule.count, schedule.required_rows_M, arrived)
    return lists, {"COPY_BLOCKS2": triton.next_power_of_2(sizes["COPY_BLOCKS"]), **sizes}


@triton.jit
def signal(ptr):
    """Release what this thread block has written, and count it."""
    tl.debug_barrier()
    tl.atomic_add(ptr, 1, sem="release")


@triton.jit
def _acquire(IS_INTERPRETED: tl.constexpr):
    """After a counter has reached its target: make released writes visible to all threads."""
    if not IS_INTERPRETED:
        tl.inline_asm_elementwise("fence.acq_rel.gpu; mov.u32 $0, 0;", "=r", [], dtype=tl.int32, is_pure=False, pack=1)
    tl.debug_barrier()


@triton.jit
def _find_source(block, get_addresses_ptr, get_rows_ptr, count, ROWS: tl.constexpr):
    """The rows of a block of the list, their sources, and which of them are valid."""
    entry = block * ROWS + tl.arange(0, ROWS)
    is_row = entry < count
    row = tl.load(get_rows_ptr + entry, mask=is_row, other=0)
    return row, tl.load(get_addresses_ptr + entry, mask=is_row, other=0), is_row


@triton.jit
def _read_source(address, is_row, first_column, like_ptr, D: tl.constexpr, COLUMNS: tl.constexpr):
    source_ptrs = tl.multiple_of(address.to(tl.pointer_type(like_ptr.dtype.element_ty)), 16)
    column = (first_column + tl.arange(0, COLUMNS))[None, :]
    return tl.load(source_ptrs[:, None] + column, mask=is_row[:, None] & (column < D), other=0.0)


@triton.jit
def get_in_order(
    copy_block, out_ptr, get_addresses_ptr, get_rows_ptr, count_ptr, arrived_ptr, D: tl.constexpr,
    COPY_BLOCKS: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """Copy every listed row from its source to [S, D]. Loads of the next piece, and of the address after it, overlap
    the store."""
    NUM_PIECES: tl.constexpr = (D + COLUMNS - 1) // COLUMNS  # of a row
    count = tl.load(count_ptr)
    num_steps = (tl.cdiv(count, ROWS) - copy_block + COPY_BLOCKS - 1) // COPY_BLOCKS * NUM_PIECES
    row, address, is_row = _find_source(copy_block, get_addresses_ptr, get_rows_ptr, count, ROWS)
    x = _read_source(address, is_row, 0, out_ptr, D, COLUMNS)
    next_block = copy_block + 1 // NUM_PIECES * COPY_BLOCKS
    next_row, next_address, is_next = _find_source(next_block, get_addresses_ptr, get_rows_ptr, count, ROWS)
    for step in range(num_steps):
        next_x = _read_source(next_address, is_next, (step + 1) % NUM_PIECES * COLUMNS, out_ptr, D, COLUMNS)
        block = copy_block + (step + 2) // NUM_PIECES * COPY_BLOCKS
        after_row, after_address, is_after = _find_source(block, get_addresses_ptr, get_rows_ptr, count, ROWS)
        if (step > 0) & (step % NUM_PIECES == 0):
            signal(arrived_ptr + copy_block)  # for the previous block, whose stores are done
        column = (step % NUM_PIECES * COLUMNS + tl.arange(0, COLUMNS))[None, :]
        tl.store(out_ptr + row.to(tl.int64)[:, None] * D + column, x, mask=is_row[:, None] & (column < D))
        row, is_row, x = next_row, is_next, next_x
        next_row, next_address, is_next = after_row, after_address, is_after
    if num_steps > 0:
        signal(arrived_ptr + copy_block)


@triton.jit
def wait_for_rows(
    arrived_ptr, num_wanted, COPY_BLOCKS: tl.constexpr, COPY_BLOCKS2: tl.constexpr, ROWS: tl.constexpr,
    IS_INTERPRETED: tl.constexpr,
):  # fmt: skip
    """Wait for the first `num_wanted` rows of the list."""
    copy_block = tl.arange(0, COPY_BLOCKS2)
    num_blocks = (num_wanted + ROWS - 1) // ROWS
    due = (num_blocks - copy_block + COPY_BLOCKS - 1) // COPY_BLOCKS  # blocks of each copy_block among the first
    due = tl.where(copy_block < COPY_BLOCKS, due, 0)
    while (
        tl.max(due - tl.load(arrived_ptr + copy_block, mask=copy_block < COPY_BLOCKS, other=0, volatile=True), axis=0)
        > 0
    ):
        pass
    _acquire(IS_INTERPRETED)


@triton.jit
def _find_sums(
    block,
    put_slots_ptr,
    put_num_slots_ptr,
    put_addresses_ptr,
    put_tiles_ptr,
    count,
    K: tl.constexpr,
    ROWS: tl.constexpr,
):
    """Of a block of the list: destinations of sums, numbers of slots, the last row's tile, and first four slots."""
    first = block * ROWS
    entry = first + tl.arange(0, ROWS)
    is_row = entry < count
    address = tl.load(put_addresses_ptr + entry, mask=is_row, other=0)
    length = tl.load(put_num_slots_ptr + entry, mask=is_row, other=0)
    tile = tl.load(put_tiles_ptr + tl.minimum(first + ROWS, count) - 1, mask=first < count, other=0)
    slots_ptrs = put_slots_ptr + entry.to(tl.int64) * K
    slot0 = tl.load(slots_ptrs, mask=is_row, other=0)
    slot1 = tl.load(slots_ptrs + 1, mask=is_row & (K > 1), other=0)
    slot2 = tl.load(slots_ptrs + 2, mask=is_row & (K > 2), other=0)
    slot3 = tl.load(slots_ptrs + 3, mask=is_row & (K > 3), other=0)
    return address, length, tile, slot0, slot1, slot2, slot3


@triton.jit
def _read_slot(y_ptr, slot, is_slot, first_column, D: tl.constexpr, COLUMNS: tl.constexpr):
    column = (first_column + tl.arange(0, COLUMNS))[None, :]
    return tl.load(y_ptr + slot[:, None].to(tl.int64) * D + column, mask=is_slot[:, None] & (column < D), other=0.0)


@triton.jit
def _wait_for_tile(
    tile, group, done_ptr, num_tiles, GROUP: tl.constexpr, COLUMNS_OF_TILES: tl.constexpr, IS_INTERPRETED: tl.constexpr
):  # fmt: skip
    """Wait for a tile and all before it; returns the first group not waited for."""
    if group <= tile // GROUP:
        while group <= tile // GROUP:
            num_due = tl.minimum(num_tiles - group * GROUP, GROUP) * COLUMNS_OF_TILES
            while tl.load(done_ptr + group, volatile=True) < num_due:
                pass
            group += 1
        _acquire(IS_INTERPRETED)
    return group


@triton.jit
def put_in_order(
    copy_block, y_ptr, put_slots_ptr, put_num_slots_ptr, put_addresses_ptr, put_tiles_ptr, count_ptr, done_ptr,
    num_tiles, D: tl.constexpr,
    COLUMNS_OF_TILES: tl.constexpr, GROUP: tl.constexpr, K: tl.constexpr, TOTAL: tl.constexpr,
    COPY_BLOCKS: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, IS_INTERPRETED: tl.constexpr,
):  # fmt: skip
    """Sum the slots of every listed row in the order of choices, and store the sum at its destination.

    Loads of the next piece's slots, and of the lists after it, overlap the sum. Few rows have more than four slots
    where sums are put beside a GEMM.
    """
    NUM_PIECES: tl.constexpr = (D + COLUMNS - 1) // COLUMNS  # of a row
    count = tl.load(count_ptr)
    num_steps = (tl.cdiv(count, ROWS) - copy_block + COPY_BLOCKS - 1) // COPY_BLOCKS * NUM_PIECES
    group = tl.zeros((), dtype=tl.int32)
    lists = (put_slots_ptr, put_num_slots_ptr, put_addresses_ptr, put_tiles_ptr, count)
    address, length, tile, slot0, slot1, slot2, slot3 = _find_sums(copy_block, *lists, K, ROWS)
    if num_steps > 0:
        group = _wait_for_tile(tile, group, done_ptr, num_tiles, GROUP, COLUMNS_OF_TILES, IS_INTERPRETED)
    y0 = _read_slot(y_ptr, slot0, length > 0, 0, D, COLUMNS)
    y1 = _read_slot(y_ptr, slot1, length > 1, 0, D, COLUMNS)
    y2 = _read_slot(y_ptr, slot2, length > 2, 0, D, COLUMNS)
    y3 = _read_slot(y_ptr, slot3, length > 3, 0, D, COLUMNS)
    block = copy_block + 1 // NUM_PIECES * COPY_BLOCKS
    next_address, next_length, tile, slot0, slot1, slot2, slot3 = _find_sums(block, *lists, K, ROWS)
    for step in range(num_steps):
        if step + 1 < num_steps:
            group = _wait_for_tile(tile, group, done_ptr, num_tiles, GROUP, COLUMNS_OF_TILES, IS_INTERPRETED)
        first_column = (step + 1) % NUM_PIECES * COLUMNS
        next0 = _read_slot(y_ptr, slot0, next_length > 0, first_column, D, COLUMNS)
        next1 = _read_slot(y_ptr, slot1, next_length > 1, first_column, D, COLUMNS)
        next2 = _read_slot(y_ptr, slot2, next_length > 2, first_column, D, COLUMNS)
        next3 = _read_slot(y_ptr, slot3, next_length > 3, first_column, D, COLUMNS)
        block = copy_block + (step + 2) // NUM_PIECES * COPY_BLOCKS
        after_address, after_length, tile, slot0, slot1, slot2, slot3 = _find_sums(block, *lists, K, ROWS)
        total = y0.to(TOTAL) + y1.to(TOTAL) + y2.to(TOTAL) + y3.to(TOTAL)
        first_column = step % NUM_PIECES * COLUMNS
        entry = (copy_block + step // NUM_PIECES * COPY_BLOCKS) * ROWS + tl.arange(0, ROWS)
        for k in range(4, tl.max(length, axis=0)):
            slot = tl.load(put_slots_ptr + entry.to(tl.int64) * K + k, mask=k < length, other=0)
            total += _read_slot(y_ptr, slot, k < length, first_column, D, COLUMNS).to(TOTAL)
        place_ptrs = tl.multiple_of(address.to(tl.pointer_type(y_ptr.dtype.element_ty)), 16)
        column = (first_column + tl.arange(0, COLUMNS))[None, :]
        keep = (length > 0)[:, None] & (column < D)
        tl.store(place_ptrs[:, None] + column, total.to(y_ptr.dtype.element_ty), mask=keep)
        address, length, y0, y1, y2, y3 = next_address, next_length, next0, next1, next2, next3
        next_address, next_length = after_address, after_length
