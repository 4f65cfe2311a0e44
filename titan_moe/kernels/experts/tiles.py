"""The tile map of grouped kernels: the expert and the slots that each thread block computes.

R expert slots, sorted by expert · e local experts · M tiles

Physics: a few hundred integers, made by one small kernel. The number of tiles depends on the routing, but
`ceil(R / rows) + e` bounds it, so a launch has a static grid, and thread blocks past the last tile return at once. No
slot is padded: a tile that is not full masks its rows.

An empty thread block of a GEMM is not free: it needs as much shared memory as any, so it occupies a multiprocessor for
about a microsecond. Where R is far above a usual load, the grid is bounded by the usual load, and thread blocks loop
over tiles: the p-th of G computes tiles p, p + G, p + 2·G, ... up to the last one.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

MAX_PROGRAMS = 16_384
"""Thread blocks of a memory-bound launch: several times those that a GPU holds, so that the last ones hardly matter."""
SLACK = 64
"""Slots past the last expert's that a weight gradient may read: numbers, if they are not to spoil it."""


class Tiles(NamedTuple):
    """A tile map: entry m is a stretch of at most `rows` slots of one expert."""

    experts_M: Tensor
    """int32, the tile's expert; -1 past the last tile."""
    begins_M: Tensor
    """int32, the tile's first slot; those of an expert ascend, or begin in the middle and go round."""
    ends_M: Tensor
    """int32, the end of the expert's slots."""
    rows: int
    """Slots of a full tile."""
    count: Tensor
    """int32 [1], number of tiles."""
    usual: int
    """Number of tiles that a launch has thread blocks for, at most the static bound M."""

    def looped(self) -> Tensor | None:
        """The number of tiles if thread blocks loop over them, None if there is one for each of the static bound."""
        return self.count if self.usual < self.experts_M.numel() else None


class GemmTiles(NamedTuple):
    """How a GEMM of slots cuts its work; `tools/sweep_expert_gemms.py` times others."""

    outputs: int = 256
    """Columns that a thread block computes; of gate and of up as many each."""
    inner: int = 64
    group: int = 16
    """Tiles of rows that share columns while they run."""
    num_warps: int = 8
    num_stages: int = 4


def check_cut(cut: GemmTiles, columns: int) -> None:
    """Refuse a cut that does not fit blocks with a scale, of so many columns and outputs.

    Raises: ValueError where a thread block does not multiply one block of columns by one or two of outputs at a time.
    """
    if columns and (cut.inner != columns or cut.outputs not in (columns, 2 * columns)):
        raise ValueError(
            f"{cut} does not fit blocks of {columns}; take inner={columns}, outputs={columns} or twice that"
        )


@triton.jit
def add_block(total, x, weight_desc, expert, first, block, row_scale, scale_ptr, keep):
    """Add the product of a block of x, [R, 128], with one of weights: 128 outputs from `first` on, times both scales
    (arXiv:2412.19437, section 3.3.2). `scale_ptr` is read where `keep` is true."""
    size: tl.constexpr = x.shape[1]
    weight = weight_desc.load([expert, first, block * size]).reshape(size, size).T
    scale = row_scale * tl.load(scale_ptr, mask=keep, other=0.0)
    return total + tl.dot(x, weight) * scale[:, None]


@triton.jit
def place_in_groups(program, num_rows, num_columns, GROUP: tl.constexpr):
    """The row and the column of a thread block's tile: column by column within groups of rows.

    Thread blocks that run at the same time then share rows and columns, which one loads into the L2 cache for all; row
    by row, wide weights would come from memory once for each row of tiles.
    """
    first = program // (GROUP * num_columns) * GROUP
    size = tl.minimum(num_rows - first, GROUP)
    within = program % (GROUP * num_columns)
    return first + within % size, within // size


def plan_tiles_reference(
    offsets_e: Tensor, num_slots: int, rows: int, turn: int = 0, turns: int = 1, usual_slots: int | None = None
) -> Tiles:
    """The definition, expert by expert on the host."""
    tiles = []
    begin = 0
    for expert, end in enumerate(offsets_e.tolist()):
        own = [(expert, first, end) for first in range(begin, end, rows)]
        first = len(own) * turn // turns
        tiles += own[first:] + own[:first]
        begin = end
    count = torch.tensor([len(tiles)], dtype=torch.int32, device=offsets_e.device)
    tiles += [(-1, 0, 0)] * (_bound(num_slots, rows, offsets_e) - len(tiles))
    experts_M, begins_M, ends_M = torch.tensor(tiles, dtype=torch.int32, device=offsets_e.device).unbind(1)
    return Tiles(experts_M, begins_M, ends_M, rows, count, _usual(len(tiles), usual_slots, rows, offsets_e))


def _bound(num_slots: int, rows: int, offsets_e: Tensor) -> int:
    return triton.cdiv(num_slots, rows) + offsets_e.numel()


def _usual(num_tiles: int, usual_slots: int | None, rows: int, offsets_e: Tensor) -> int:
    return num_tiles if usual_slots is None else min(num_tiles, _bound(usual_slots, rows, offsets_e))


@triton.jit(do_not_specialize=["num_tiles", "turn"])
def _plan_tiles_kernel(
    offsets_ptr, experts_ptr, begins_ptr, ends_ptr, count_ptr, num_experts, num_tiles, rows, turn, turns,
    BLOCK_E: tl.constexpr, BLOCK_M: tl.constexpr,
):  # fmt: skip
    expert = tl.arange(0, BLOCK_E)
    is_expert = expert < num_experts
    end = tl.load(offsets_ptr + expert, mask=is_expert, other=0)
    begin = tl.load(offsets_ptr + expert - 1, mask=is_expert & (expert > 0), other=0)
    count = tl.where(is_expert, (end - begin + rows - 1) // rows, 0)
    last = tl.cumsum(count, axis=0)  # tiles up to and with each expert
    tl.store(count_ptr, tl.sum(count, axis=0), mask=tl.program_id(0) == 0)
    tile = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    # each tile lies in at most one expert's stretch, so sums over experts select
    is_mine = (tile[:, None] < last[None, :]) & (tile[:, None] >= (last - count)[None, :])
    is_tile = tl.sum(is_mine.to(tl.int32), axis=1) > 0
    place = tile[:, None] - (last - count)[None, :] + (count * turn // turns)[None, :]
    first = begin[None, :] + tl.where(place < count[None, :], place, place - count[None, :]) * rows
    keep = tile < num_tiles
    mine = tl.sum(tl.where(is_mine, expert[None, :], 0), axis=1)
    tl.store(experts_ptr + tile, tl.where(is_tile, mine, -1), mask=keep)
    tl.store(begins_ptr + tile, tl.sum(tl.where(is_mine, first, 0), axis=1), mask=keep)
    tl.store(ends_ptr + tile, tl.sum(tl.where(is_mine, end[None, :], 0), axis=1), mask=keep)


def plan_tiles(
    offsets_e: Tensor, num_slots: int, rows: int, turn: int = 0, turns: int = 1, usual_slots: int | None = None
) -> Tiles:
    """Cut every expert's slots into tiles, experts in order. Nothing reads the device from the host.

    Args:
        offsets_e: int32, running end of each expert's slots.
        num_slots: static bound of the slots (R).
        rows: slots of a full tile.
        turn, turns: where in an expert's slots its tiles begin, that many of so many parts into them; they then go
            round. Ranks of different turns take rows of different sources at a time.
        usual_slots: load up to which each tile has a thread block of its own, `num_slots` if None. Beyond, thread
            blocks loop.
    """
    num_experts = offsets_e.numel()
    num_tiles = _bound(num_slots, rows, offsets_e)
    # an allocation each: rows of one would be aligned for some numbers of slots only, and every kernel that reads them
    # would be compiled anew when a batch brings another alignment
    maps = [offsets_e.new_empty(num_tiles) for _ in range(3)]
    count = offsets_e.new_empty(1)
    block_m = 32
    _plan_tiles_kernel[(triton.cdiv(num_tiles, block_m),)](
        offsets_e, *maps, count, num_experts, num_tiles, rows, turn, turns,
        BLOCK_E=triton.next_power_of_2(num_experts), BLOCK_M=block_m,
    )  # fmt: skip
    return Tiles(maps[0], maps[1], maps[2], rows, count, _usual(num_tiles, usual_slots, rows, offsets_e))
