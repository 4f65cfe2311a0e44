"""A grouped GEMM whose left factor is gathered by row.

S rows · R expert slots, sorted by expert · e local experts · I input width · O output width

Physics: 2·R·I·O FLOPs, bound by the matrix units from about 200 slots an expert on; the rows are gathered while the
GEMM loads its tiles, so no permuted copy of them exists.
"""

from typing import NamedTuple

import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from titan_moe.kernels.tiles import Tiles, num_multiprocessors, place_in_groups


class GatherTiles(NamedTuple):
    """How the kernel cuts its work; `tools/sweep_expert_gemms.py` times others."""

    outputs: int = 256
    inner: int = 64
    group: int = 8
    """Tiles of rows that share columns while they run."""
    num_warps: int = 8
    num_stages: int = 4
    weights_by_tma: bool = False
    is_persistent: bool = False
    """One program a multiprocessor, which loads its next tile while it stores the last; with weights by TMA, since
    their pointers and the sums do not fit the registers together."""
    narrows_last: bool = False
    """Whether the last columns are cut half as wide where that is enough; persistent programs do not."""


MEASURED = GatherTiles()


@triton.jit
def _gather_mm_kernel(
    x_ptr, rows_ptr, weight, last_weight, out_ptr, experts_ptr, begins_ptr, ends_ptr, count_ptr,
    I: tl.constexpr, O: tl.constexpr, BY_TMA: tl.constexpr, IS_PERSISTENT: tl.constexpr,
    BLOCK_R: tl.constexpr, BLOCK_O: tl.constexpr, BLOCK_LAST: tl.constexpr, BLOCK_I: tl.constexpr, GROUP: tl.constexpr,
):  # fmt: skip
    num_columns: tl.constexpr = (O + BLOCK_O - 1) // BLOCK_O
    if IS_PERSISTENT:
        num_rows = tl.load(count_ptr)
        for program in tl.range(tl.program_id(0), num_rows * num_columns, tl.num_programs(0), flatten=True):
            tile, column = place_in_groups(program, num_rows, num_columns, GROUP)
            _gather_mm_tile(
                tl.load(experts_ptr + tile), column * BLOCK_O, tl.load(begins_ptr + tile), tl.load(ends_ptr + tile),
                x_ptr, rows_ptr, weight, out_ptr, I, O, BY_TMA, BLOCK_R, BLOCK_O, BLOCK_I,
            )  # fmt: skip
    else:
        tile, column = place_in_groups(tl.program_id(0), tl.num_programs(0) // num_columns, num_columns, GROUP)
        expert = tl.load(experts_ptr + tile)
        if expert < 0:
            return
        begin, end = tl.load(begins_ptr + tile), tl.load(ends_ptr + tile)
        if BLOCK_LAST < BLOCK_O and column == num_columns - 1:
            _gather_mm_tile(
                expert, column * BLOCK_O, begin, end,
                x_ptr, rows_ptr, last_weight, out_ptr, I, O, BY_TMA, BLOCK_R, BLOCK_LAST, BLOCK_I,
            )  # fmt: skip
        else:
            _gather_mm_tile(
                expert, column * BLOCK_O, begin, end,
                x_ptr, rows_ptr, weight, out_ptr, I, O, BY_TMA, BLOCK_R, BLOCK_O, BLOCK_I,
            )  # fmt: skip


@triton.jit
def _gather_mm_tile(
    expert, first, begin, end, x_ptr, rows_ptr, weight, out_ptr, I: tl.constexpr, O: tl.constexpr, BY_TMA: tl.constexpr,
    BLOCK_R: tl.constexpr, BLOCK_O: tl.constexpr, BLOCK_I: tl.constexpr,
):  # fmt: skip
    slots = begin + tl.arange(0, BLOCK_R)
    is_slot = slots < end
    rows = tl.load(rows_ptr + slots, mask=is_slot, other=0)
    columns = first + tl.arange(0, BLOCK_O)
    is_column = columns < O
    inner = tl.arange(0, BLOCK_I)
    if not BY_TMA:
        weight_ptrs = weight + (expert.to(tl.int64) * I + inner)[:, None] * O + columns[None, :]
    total = tl.zeros((BLOCK_R, BLOCK_O), dtype=tl.float32)
    for k in range(0, I, BLOCK_I):
        is_inner = inner < I - k
        # made here, of what a flattened loop carries: pointers themselves would fill the registers
        x_ptrs = x_ptr + rows.to(tl.int64)[:, None] * I + (k + inner)[None, :]
        x = tl.load(x_ptrs, mask=is_slot[:, None] & is_inner[None, :], other=0.0)
        if BY_TMA:
            factor = weight.load([expert, k, first]).reshape(BLOCK_I, BLOCK_O)
        else:
            factor = tl.load(weight_ptrs + k * O, mask=is_inner[:, None] & is_column[None, :], other=0.0)
        total = tl.dot(x, factor, total, input_precision="ieee")
    out_ptrs = out_ptr + slots.to(tl.int64)[:, None] * O + columns[None, :]
    tl.store(out_ptrs, total.to(out_ptr.dtype.element_ty), mask=is_slot[:, None] & is_column[None, :])


def gather_mm(x_SI: Tensor, rows_R: Tensor, weight_eIO: Tensor, tiles: Tiles, cut: GatherTiles = MEASURED) -> Tensor:
    """Each slot's row times its expert's weight: -> [R, O]; slots past the last expert are not written."""
    _, width, out_width = weight_eIO.shape
    out_RO = x_SI.new_empty(rows_R.numel(), out_width)
    is_half_enough = cut.narrows_last and 0 < out_width % cut.outputs <= cut.outputs // 2
    last = cut.outputs // 2 if is_half_enough else cut.outputs
    by_tma = cut.weights_by_tma or cut.is_persistent
    weights = [
        TensorDescriptor.from_tensor(weight_eIO, [1, cut.inner, outputs]) if by_tma else weight_eIO
        for outputs in (cut.outputs, last)
    ]
    num_tiles = tiles.experts_M.numel() * triton.cdiv(out_width, cut.outputs)
    _gather_mm_kernel[(num_multiprocessors(x_SI.device) if cut.is_persistent else num_tiles,)](
        x_SI, rows_R, *weights, out_RO, *tiles[:4],
        I=width, O=out_width, BY_TMA=by_tma, IS_PERSISTENT=cut.is_persistent,
        BLOCK_R=tiles.rows, BLOCK_O=cut.outputs, BLOCK_LAST=last, BLOCK_I=cut.inner, GROUP=cut.group,
        num_warps=cut.num_warps, num_stages=cut.num_stages,
    )  # fmt: skip
    return out_RO
