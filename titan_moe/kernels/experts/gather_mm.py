"""A grouped GEMM whose left factor is gathered by row.

S rows · R expert slots, sorted by expert · e local experts · I input width · O output width

Physics: 2·R·I·O FLOPs, bound by the matrix units from about 200 slots an expert on; the rows are gathered while the
GEMM loads its tiles, so no permuted copy of them exists.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton import knobs
from triton.tools.tensor_descriptor import TensorDescriptor

from titan_moe.kernels.experts.copy_blocks import CopyBlocks, TileSchedule, get_arguments, get_in_order, wait_for_rows
from titan_moe.kernels.experts.low_rank import add_low, low_block
from titan_moe.kernels.experts.tiles import GemmTiles, Tiles, add_block, check_cut, place_in_groups

MEASURED = GemmTiles()
GET_BLOCKS = CopyBlocks(40, 16_384)


@triton.jit
def _gather_mm_kernel(
    x_ptr, rows_ptr, weight_desc, last_desc, out_ptr, experts_ptr, begins_ptr, ends_ptr,
    get_addresses_ptr, get_rows_ptr, count_ptr, required_rows_ptr, arrived_ptr, num_tiles_ptr, scales_ptr, base_ptr,
    out_base_ptr, low_ptr, factor_ptr,
    I: tl.constexpr, O: tl.constexpr, ROW: tl.constexpr, SCALED: tl.constexpr, IS_INTERPRETED: tl.constexpr,
    BLOCK_R: tl.constexpr, BLOCK_O: tl.constexpr, BLOCK_LAST: tl.constexpr, BLOCK_I: tl.constexpr, GROUP: tl.constexpr,
    COPY_BLOCKS: tl.constexpr, COPY_BLOCKS2: tl.constexpr, COPIED_ROWS: tl.constexpr, COPIED_COLUMNS: tl.constexpr,
    RANK: tl.constexpr, LOW: tl.constexpr,
):  # fmt: skip
    if base_ptr is not None:  # products with a width keep their alignment
        x_ptr += tl.load(base_ptr) * ROW
    if out_base_ptr is not None:
        out_ptr += tl.load(out_base_ptr + 1) * O
    program = tl.program_id(0) - COPY_BLOCKS
    if COPY_BLOCKS:
        if program < 0:
            if scales_ptr is None:
                get_in_order(
                    program + COPY_BLOCKS, x_ptr, get_addresses_ptr, get_rows_ptr, count_ptr, arrived_ptr, ROW,
                    COPY_BLOCKS, COPIED_ROWS, COPIED_COLUMNS,
                )  # fmt: skip
            else:  # codes in pairs
                pairs_ptr = x_ptr.to(tl.pointer_type(tl.int16), bitcast=True)
                get_in_order(
                    program + COPY_BLOCKS, pairs_ptr, get_addresses_ptr, get_rows_ptr, count_ptr, arrived_ptr,
                    ROW // 2, COPY_BLOCKS, COPIED_ROWS, COPIED_COLUMNS,
                )  # fmt: skip
            return
    num_columns: tl.constexpr = (O + BLOCK_O - 1) // BLOCK_O
    num_programs = tl.num_programs(0) - COPY_BLOCKS
    if num_tiles_ptr is None:
        tile, column = place_in_groups(program, num_programs // num_columns, num_columns, GROUP)
        expert = tl.load(experts_ptr + tile)
        if expert < 0:
            return
        _gather_mm_tile(
            tile, column, expert, x_ptr, rows_ptr, weight_desc, last_desc, out_ptr, begins_ptr, ends_ptr,
            required_rows_ptr, arrived_ptr, scales_ptr, low_ptr, factor_ptr, I, O, ROW, SCALED, IS_INTERPRETED,
            BLOCK_R, BLOCK_O, BLOCK_LAST, BLOCK_I, COPY_BLOCKS, COPY_BLOCKS2, COPIED_ROWS, RANK, LOW,
        )  # fmt: skip
    else:
        num_tiles = tl.load(num_tiles_ptr)
        for position in tl.range(program, num_tiles * num_columns, num_programs, num_stages=1):
            tile, column = place_in_groups(position, num_tiles, num_columns, GROUP)
            _gather_mm_tile(
                tile, column, tl.load(experts_ptr + tile), x_ptr, rows_ptr, weight_desc, last_desc, out_ptr,
                begins_ptr, ends_ptr, required_rows_ptr, arrived_ptr, scales_ptr, low_ptr, factor_ptr,
                I, O, ROW, SCALED, IS_INTERPRETED,
                BLOCK_R, BLOCK_O, BLOCK_LAST, BLOCK_I, COPY_BLOCKS, COPY_BLOCKS2, COPIED_ROWS, RANK, LOW,
            )  # fmt: skip


@triton.jit
def _gather_mm_tile(
    tile, column, expert, x_ptr, rows_ptr, weight_desc, last_desc, out_ptr, begins_ptr, ends_ptr,
    required_rows_ptr, arrived_ptr, scales_ptr, low_ptr, factor_ptr,
    I: tl.constexpr, O: tl.constexpr, ROW: tl.constexpr, SCALED: tl.constexpr, IS_INTERPRETED: tl.constexpr,
    BLOCK_R: tl.constexpr, BLOCK_O: tl.constexpr, BLOCK_LAST: tl.constexpr, BLOCK_I: tl.constexpr,
    COPY_BLOCKS: tl.constexpr, COPY_BLOCKS2: tl.constexpr, COPIED_ROWS: tl.constexpr,
    RANK: tl.constexpr, LOW: tl.constexpr,
):  # fmt: skip
    """Compute a tile of slots and columns, once its rows have been received."""
    num_columns: tl.constexpr = (O + BLOCK_O - 1) // BLOCK_O
    if COPY_BLOCKS:
        wait_for_rows(
            arrived_ptr, tl.load(required_rows_ptr + tile), COPY_BLOCKS, COPY_BLOCKS2, COPIED_ROWS, IS_INTERPRETED
        )
    begin, end = tl.load(begins_ptr + tile), tl.load(ends_ptr + tile)
    if SCALED:
        _multiply_blocks(
            expert, column * BLOCK_O, begin, end, x_ptr, rows_ptr, weight_desc, out_ptr, scales_ptr, I, O,
            ROW, SCALED, BLOCK_R, BLOCK_O,
        )  # fmt: skip
    elif BLOCK_LAST < BLOCK_O and column == num_columns - 1:
        _multiply(
            expert, column * BLOCK_O, begin, end, x_ptr, rows_ptr, last_desc, out_ptr, scales_ptr,
            low_ptr, factor_ptr, I, O, ROW, BLOCK_R, BLOCK_LAST, BLOCK_I, RANK, LOW,
        )  # fmt: skip
    else:
        _multiply(
            expert, column * BLOCK_O, begin, end, x_ptr, rows_ptr, weight_desc, out_ptr, scales_ptr,
            low_ptr, factor_ptr, I, O, ROW, BLOCK_R, BLOCK_O, BLOCK_I, RANK, LOW,
        )  # fmt: skip


@triton.jit
def _multiply(
    expert, first, begin, end, x_ptr, rows_ptr, weight_desc, out_ptr, scales_ptr, low_ptr, factor_ptr,
    I: tl.constexpr, O: tl.constexpr, ROW: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_O: tl.constexpr,
    BLOCK_I: tl.constexpr, RANK: tl.constexpr, LOW: tl.constexpr,
):  # fmt: skip
    slots = begin + tl.arange(0, BLOCK_R)
    is_slot = slots < end
    rows = tl.load(rows_ptr + slots, mask=is_slot, other=0)
    inner = tl.arange(0, BLOCK_I)
    total = tl.zeros((BLOCK_R, BLOCK_O), dtype=tl.float32)
    for k in range(0, I, BLOCK_I):
        x_ptrs = x_ptr + rows.to(tl.int64)[:, None] * ROW + (k + inner)[None, :]
        x = tl.load(x_ptrs, mask=is_slot[:, None] & (inner < I - k)[None, :], other=0.0)
        if scales_ptr is None:
            weight = weight_desc.load([expert, k, first]).reshape(BLOCK_I, BLOCK_O)
        else:  # the matrix units read fp8 along the summed dimension alone
            weight = weight_desc.load([expert, first, k]).reshape(BLOCK_O, BLOCK_I).T
        total = tl.dot(x, weight, total, input_precision="ieee")
    columns = first + tl.arange(0, BLOCK_O)
    if scales_ptr is not None:
        row_scales_ptr = (x_ptr + rows.to(tl.int64) * ROW + I).to(tl.pointer_type(tl.float32), bitcast=True)
        row_scale = tl.load(row_scales_ptr, mask=is_slot, other=0.0)
        column_scale = tl.load(scales_ptr + expert * O + columns, mask=columns < O, other=0.0)
        total = total * row_scale[:, None] * column_scale[None, :]
    if low_ptr is not None:
        total = add_low(total, low_ptr, factor_ptr, expert, slots, is_slot, columns, O, RANK, False, LOW)
    out_ptrs = out_ptr + slots.to(tl.int64)[:, None] * O + columns[None, :]
    tl.store(out_ptrs, total.to(out_ptr.dtype.element_ty), mask=is_slot[:, None] & (columns < O)[None, :])


@triton.jit
def _multiply_blocks(
    expert, first, begin, end, x_ptr, rows_ptr, weight_desc, out_ptr, scales_ptr, I: tl.constexpr, O: tl.constexpr,
    ROW: tl.constexpr, SCALED: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_O: tl.constexpr,
):  # fmt: skip
    """`_multiply` of one or two blocks of columns, whose products are scaled and added outside the matrix units."""
    slots = begin + tl.arange(0, BLOCK_R)
    is_slot = slots < end
    rows = tl.load(rows_ptr + slots, mask=is_slot, other=0).to(tl.int64)
    row_ptrs, inner = x_ptr + rows * ROW, tl.arange(0, SCALED)
    row_scale_ptrs = (row_ptrs + I).to(tl.pointer_type(tl.float32), bitcast=True)
    scales_ptr += (expert * (O // SCALED) + first // SCALED) * (I // SCALED)
    total = tl.zeros((BLOCK_R, SCALED), dtype=tl.float32)
    other_total = tl.zeros((BLOCK_R, SCALED), dtype=tl.float32)
    has_other = first + SCALED < O
    for block in range(I // SCALED):
        x_ptrs = row_ptrs[:, None] + (block * SCALED + inner)[None, :]
        x = tl.load(x_ptrs, mask=is_slot[:, None], other=0.0)
        row_scale = tl.load(row_scale_ptrs + block, mask=is_slot, other=0.0)
        total = add_block(total, x, weight_desc, expert, first, block, row_scale, scales_ptr + block, True)
        if BLOCK_O > SCALED:
            other_scale_ptr = scales_ptr + I // SCALED + block
            other_total = add_block(
                other_total, x, weight_desc, expert, first + SCALED, block, row_scale, other_scale_ptr, has_other
            )
    columns = first + tl.arange(0, SCALED)
    out_ptrs = out_ptr + slots.to(tl.int64)[:, None] * O + columns[None, :]
    tl.store(out_ptrs, total.to(out_ptr.dtype.element_ty), mask=is_slot[:, None])
    if BLOCK_O > SCALED:
        tl.store(out_ptrs + SCALED, other_total.to(out_ptr.dtype.element_ty), mask=is_slot[:, None] & has_other)


def gather_mm(
    x_SI: Tensor,
    rows_R: Tensor,
    weight_eIO: Tensor,
    tiles: Tiles,
    cut: GemmTiles = MEASURED,
    schedule: TileSchedule | None = None,
    copy_blocks: CopyBlocks = GET_BLOCKS,
    *,
    scales: Tensor | None = None,
    columns: int = 0,
    base: Tensor | None = None,
    dtype: torch.dtype | None = None,
    out: Tensor | None = None,
    out_base: Tensor | None = None,
    low: tuple[Tensor, Tensor] | None = None,
) -> Tensor:
    """Each slot's row times its expert's weight: -> [R, O]; slots past the last expert are not written.

    With `schedule`, copy blocks of the launch get rows into x.

    Args:
        scales: fp32 [e, O], scales of weights in fp8, which are the transpose of what is contiguous. Then x_SI holds
            rows in fp8 with their scales behind them (kernels/experts/fp8/packed.py).
        columns: of blocks that share a scale, 0 if scales are those of rows and of outputs. Then scales of weights are
            [e, O / columns, I / columns], and products of a block leave the matrix units and are added in fp32.
        base: int64 [2] on the device. x_SI is that of several layers; this layer's begins at row base[0].
        dtype: of the result, if it is not that of x_SI.
        out: where the result is written, a new tensor if None.
        out_base: int64 [2] on the device. `out` is that of several layers; this layer's slots begin at out_base[1].
        low: low products of slots, [R, r], and factors, [e, r, O], contiguous, whose product is added before the result
            is rounded; not with `columns`.
    """
    _, width, out_width = weight_eIO.shape
    if out is None:
        if out_base is not None:
            raise ValueError("out_base is a place in out, which is not given")
        out = x_SI.new_empty(rows_R.numel(), out_width, dtype=dtype)
    check_cut(cut, columns)
    # the last columns are cut half as wide where that is enough
    is_half_enough = 0 < out_width % cut.outputs <= cut.outputs // 2
    last = cut.outputs // 2 if is_half_enough else cut.outputs
    # weights come by TMA: their pointers would take the registers that the sums need
    if scales is None:
        stored, blocks = weight_eIO, [[1, cut.inner, outputs] for outputs in (cut.outputs, last)]
    else:
        stored, blocks = weight_eIO.mT, [[1, columns or outputs, cut.inner] for outputs in (cut.outputs, last)]
    weights = [TensorDescriptor.from_tensor(stored, block) for block in blocks]
    rank = 0 if low is None else low[1].shape[1]
    copies, sizes = get_arguments(schedule, copy_blocks, x_SI.shape[1] // (1 if scales is None else 2))
    _gather_mm_kernel[(sizes["COPY_BLOCKS"] + tiles.usual * triton.cdiv(out_width, cut.outputs),)](
        x_SI, rows_R, *weights, out, *tiles[:3], *copies, tiles.looped(), scales, base, out_base,
        *(low or (None, None)),
        I=width, O=out_width, ROW=x_SI.shape[1], SCALED=columns, IS_INTERPRETED=knobs.runtime.interpret, **sizes,
        BLOCK_R=tiles.rows, BLOCK_O=cut.outputs, BLOCK_LAST=last, BLOCK_I=cut.inner, GROUP=cut.group,
        RANK=rank, LOW=low_block(rank),
        num_warps=cut.num_warps, num_stages=cut.num_stages,
    )  # fmt: skip
    return out
