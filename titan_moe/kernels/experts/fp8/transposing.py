"""Layouts in which threads transpose a tile of 128 x 128 numbers within their own registers.

A thread has 64 numbers, some columns of some rows. It reads columns of a row side by side and writes rows of a column
side by side, so bytes move between its registers alone; Triton's own layouts go through shared memory. For Gluon,
Triton's language with explicit layouts.
"""

from typing import NamedTuple

from triton.experimental.gluon import language as gl

from titan_moe.kernels.experts.fp8.packed import BLOCK

NUM_WARPS = 8
OF_THREAD, OF_WARP = 64, (32, 64)
"""Numbers of a thread; rows and columns of a warp."""


class Layouts(NamedTuple):
    """By their names in kernels."""

    READ: gl.DistributedLinearLayout
    """[rows, columns] with the columns of a thread side by side."""
    WRITTEN: gl.DistributedLinearLayout
    """The same with its rows side by side."""


def transposing(columns: int) -> Layouts:
    """Layouts of threads with so many columns, a power of two from 4 to 32."""
    rows = OF_THREAD // columns
    of_columns, of_rows = [[0, bit] for bit in _bits(1, columns)], [[bit, 0] for bit in _bits(1, rows)]
    lanes = [[0, bit] for bit in _bits(columns, OF_WARP[1])] + [[bit, 0] for bit in _bits(rows, OF_WARP[0])]
    warps = [[0, bit] for bit in _bits(OF_WARP[1], BLOCK)] + [[bit, 0] for bit in _bits(OF_WARP[0], BLOCK)]
    tile = [BLOCK, BLOCK]
    return Layouts(
        gl.DistributedLinearLayout(of_columns + of_rows, lanes, warps, [], tile),
        gl.DistributedLinearLayout(of_rows + of_columns, lanes, warps, [], tile),
    )


def _bits(first: int, end: int) -> list[int]:
    """Powers of two from `first` to below `end`."""
    return [bit for bit in (1 << shift for shift in range(16)) if first <= bit < end]
