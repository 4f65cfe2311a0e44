"""A grouped GEMM of slots, whose sums may be put to their destinations while it runs.

S rows · R expert slots, sorted by expert · K choices a row · e local experts · I input width · O output width

Physics: 2·R·I·O FLOPs, bound by the matrix units from about 200 slots an expert on.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton import knobs
from triton.tools.tensor_descriptor import TensorDescriptor

from titan_moe.kernels.experts.copy_blocks import CopyBlocks, TileSchedule, put_in_order, signal
from titan_moe.kernels.experts.low_rank import add_low, low_block
from titan_moe.kernels.experts.tiles import GemmTiles, Tiles, add_block, check_cut, place_in_groups

MEASURED = GemmTiles()
PUT_BLOCKS = CopyBlocks(36, 8192)


@triton.jit(do_not_specialize=["num_tiles"])
def _slot_mm_kernel(
    x_desc, weight_desc, out_ptr, experts_ptr, begins_ptr, ends_ptr,
    put_slots_ptr, put_num_slots_ptr, put_addresses_ptr, put_tiles_ptr, count_ptr, done_ptr, num_tiles, num_tiles_ptr,
    row_scales_ptr, scales_ptr, scores_ptr, bias_ptr, low_ptr, factor_ptr,
    I: tl.constexpr, O: tl.constexpr, SCALED: tl.constexpr, IS_TRANSPOSED: tl.constexpr, RANK: tl.constexpr,
    LOW: tl.constexpr,
    BLOCK_R: tl.constexpr, BLOCK_O: tl.constexpr, BLOCK_I: tl.constexpr, GROUP: tl.constexpr,
    K: tl.constexpr, COPY_BLOCKS: tl.constexpr, COPIED_ROWS: tl.constexpr, COPIED_COLUMNS: tl.constexpr,
    IS_INTERPRETED: tl.constexpr,
):  # fmt: skip
    num_columns: tl.constexpr = (O + BLOCK_O - 1) // BLOCK_O
    program = tl.program_id(0)
    if num_tiles_ptr is not None:
        num_tiles = tl.load(num_tiles_ptr)
    if COPY_BLOCKS:
        # the interpreter runs thread blocks in order, so there tiles come first
        first_copy_block = tl.num_programs(0) - COPY_BLOCKS if IS_INTERPRETED else 0
        copy_block = program - first_copy_block
        if (copy_block >= 0) & (copy_block < COPY_BLOCKS):
            put_in_order(
                copy_block, out_ptr, put_slots_ptr, put_num_slots_ptr, put_addresses_ptr, put_tiles_ptr, count_ptr,
                done_ptr, num_tiles, O,
                num_columns, GROUP, K, tl.float32, COPY_BLOCKS, COPIED_ROWS, COPIED_COLUMNS, IS_INTERPRETED,
            )  # fmt: skip
            return
        if not IS_INTERPRETED:
            program -= COPY_BLOCKS
    num_programs = tl.num_programs(0) - COPY_BLOCKS
    if num_tiles_ptr is None:
        tile, column = place_in_groups(program, num_tiles, num_columns, GROUP)
        expert = tl.load(experts_ptr + tile)
        if expert >= 0:
            _slot_mm_any_tile(
                tile, column, expert, x_desc, weight_desc, out_ptr, begins_ptr, ends_ptr,
                row_scales_ptr, scales_ptr, scores_ptr, bias_ptr, low_ptr, factor_ptr,
                I, O, SCALED, IS_TRANSPOSED, RANK, LOW, BLOCK_R, BLOCK_O, BLOCK_I,
            )  # fmt: skip
        if COPY_BLOCKS:
            signal(done_ptr + tile // GROUP)
    else:
        for position in tl.range(program, num_tiles * num_columns, num_programs, num_stages=1):
            tile, column = place_in_groups(position, num_tiles, num_columns, GROUP)
            _slot_mm_any_tile(
                tile, column, tl.load(experts_ptr + tile), x_desc, weight_desc, out_ptr, begins_ptr, ends_ptr,
                row_scales_ptr, scales_ptr, scores_ptr, bias_ptr, low_ptr, factor_ptr,
                I, O, SCALED, IS_TRANSPOSED, RANK, LOW, BLOCK_R, BLOCK_O, BLOCK_I,
            )  # fmt: skip
            if COPY_BLOCKS:
                signal(done_ptr + tile // GROUP)


@triton.jit
def _slot_mm_any_tile(
    tile, column, expert, x_desc, weight_desc, out_ptr, begins_ptr, ends_ptr,
    row_scales_ptr, scales_ptr, scores_ptr, bias_ptr, low_ptr, factor_ptr,
    I: tl.constexpr, O: tl.constexpr, SCALED: tl.constexpr, IS_TRANSPOSED: tl.constexpr, RANK: tl.constexpr,
    LOW: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_O: tl.constexpr, BLOCK_I: tl.constexpr,
):  # fmt: skip
    if SCALED:
        _slot_mm_tile_of_blocks(
            tile, column, expert, x_desc, weight_desc, out_ptr, begins_ptr, ends_ptr, row_scales_ptr, scales_ptr,
            I, O, SCALED, BLOCK_R, BLOCK_O,
        )  # fmt: skip
    else:
        _slot_mm_tile(
            tile, column, expert, x_desc, weight_desc, out_ptr, begins_ptr, ends_ptr,
            row_scales_ptr, scales_ptr, scores_ptr, bias_ptr, low_ptr, factor_ptr,
            I, O, IS_TRANSPOSED, RANK, LOW, BLOCK_R, BLOCK_O, BLOCK_I,
        )  # fmt: skip


@triton.jit
def _slot_mm_tile(
    tile, column, expert, x_desc, weight_desc, out_ptr, begins_ptr, ends_ptr,
    row_scales_ptr, scales_ptr, scores_ptr, bias_ptr, low_ptr, factor_ptr,
    I: tl.constexpr, O: tl.constexpr, IS_TRANSPOSED: tl.constexpr, RANK: tl.constexpr, LOW: tl.constexpr,
    BLOCK_R: tl.constexpr, BLOCK_O: tl.constexpr, BLOCK_I: tl.constexpr,
):  # fmt: skip
    begin, first = tl.load(begins_ptr + tile), column * BLOCK_O
    total = tl.zeros((BLOCK_R, BLOCK_O), dtype=tl.float32)
    for k in range(0, I, BLOCK_I):
        x = x_desc.load([begin, k])
        if IS_TRANSPOSED:
            weight = weight_desc.load([expert, first, k]).reshape(BLOCK_O, BLOCK_I).T
        else:
            weight = weight_desc.load([expert, k, first]).reshape(BLOCK_I, BLOCK_O)
        total = tl.dot(x, weight, total, input_precision="ieee")
    slots = begin + tl.arange(0, BLOCK_R)
    is_slot = slots < tl.load(ends_ptr + tile)
    columns = first + tl.arange(0, BLOCK_O)
    if scales_ptr is not None:
        row_scale = tl.load(row_scales_ptr + slots, mask=is_slot, other=0.0)
        column_scale = tl.load(scales_ptr + expert * O + columns, mask=columns < O, other=0.0)
        total = total * row_scale[:, None] * column_scale[None, :]
    if bias_ptr is not None:
        score = tl.load(scores_ptr + slots, mask=is_slot, other=0.0)
        bias = tl.load(bias_ptr + expert * O + columns, mask=columns < O, other=0.0).to(tl.float32)
        total += score[:, None] * bias[None, :]
    if low_ptr is not None:
        total = add_low(total, low_ptr, factor_ptr, expert, slots, is_slot, columns, O, RANK, IS_TRANSPOSED, LOW)
    out_ptrs = out_ptr + slots.to(tl.int64)[:, None] * O + columns[None, :]
    keep = is_slot[:, None] & (columns < O)[None, :]
    tl.store(out_ptrs, total.to(out_ptr.dtype.element_ty), mask=keep)


@triton.jit
def _slot_mm_tile_of_blocks(
    tile, column, expert, x_desc, weight_desc, out_ptr, begins_ptr, ends_ptr, row_scales_ptr, scales_ptr,
    I: tl.constexpr, O: tl.constexpr, SCALED: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_O: tl.constexpr,
):  # fmt: skip
    """One or two blocks of columns, whose products are scaled and added outside the matrix units."""
    begin, first = tl.load(begins_ptr + tile), column * BLOCK_O
    slots = begin + tl.arange(0, BLOCK_R)
    is_slot = slots < tl.load(ends_ptr + tile)
    row_scale_ptrs = row_scales_ptr + slots.to(tl.int64) * (I // SCALED)
    scales_ptr += (expert * (O // SCALED) + first // SCALED) * (I // SCALED)
    total = tl.zeros((BLOCK_R, SCALED), dtype=tl.float32)
    other_total = tl.zeros((BLOCK_R, SCALED), dtype=tl.float32)
    has_other = first + SCALED < O
    for block in range(I // SCALED):
        x = x_desc.load([begin, block * SCALED])
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


def slot_mm(
    x_RI: Tensor,
    weight_eIO: Tensor,
    tiles: Tiles,
    *,
    schedule: TileSchedule | None = None,
    copy_blocks: CopyBlocks = PUT_BLOCKS,
    cut: GemmTiles = MEASURED,
    scales: tuple[Tensor, Tensor] | None = None,
    columns: int = 0,
    bias: tuple[Tensor, Tensor] | None = None,
    low: tuple[Tensor, Tensor] | None = None,
    dtype: torch.dtype | None = None,
) -> Tensor:
    """Each slot times its expert's weight: -> [R, O]; slots past the last expert are not written.

    The weight is contiguous, or the transpose of what is. With `schedule`, the sum of each row's slots in fp32 is
    put to its destination as soon as they are done.

    Args:
        scales: fp32, scales of slots [R] and of weights [e, O] in fp8. The weight is then the transpose of what is
            contiguous.
        columns: as in gather_mm.py; scales of slots are then [R, I / columns].
        bias: scores of slots [R], fp32, and biases [e, O]: each slot gets its expert's times its score, before it is
            rounded; not with `columns`.
        low: low products of slots, [R, r], and factors, [e, r, O], contiguous, or the transpose of what is, as the
            weight is: their product is added before the result is rounded; not with `columns`.
        dtype: of the result, if it is not that of x_RI.
    """
    check_cut(cut, columns)
    num_slots, width = x_RI.shape
    is_transposed, out_width = weight_eIO.stride(2) != 1, weight_eIO.shape[2]
    out_RO = x_RI.new_empty(num_slots, out_width, dtype=dtype)
    if not num_slots:
        return out_RO
    num_tiles, num_columns = tiles.experts_M.numel(), triton.cdiv(out_width, cut.outputs)
    rank = 0 if low is None else low[0].shape[1]
    rows = TensorDescriptor.from_tensor(x_RI, [tiles.rows, cut.inner])
    block = [1, columns or cut.outputs, cut.inner] if is_transposed else [1, cut.inner, cut.outputs]
    weights = TensorDescriptor.from_tensor(weight_eIO.mT if is_transposed else weight_eIO, block)
    if schedule is None:
        copies = (None,) * 6
        sizes = {"K": 0, "COPY_BLOCKS": 0, "COPIED_ROWS": 0, "COPIED_COLUMNS": 0}
    else:
        done_G = tiles.experts_M.new_zeros(triton.cdiv(num_tiles, cut.group))
        copies = (*schedule[4:], schedule.count, done_G)
        num_rows, num_choices = schedule.put_slots_SK.shape
        sizes = {"K": num_choices, **copy_blocks.sizes(num_rows, out_width, x_RI.device)}
    _slot_mm_kernel[(tiles.usual * num_columns + sizes["COPY_BLOCKS"],)](
        rows, weights, out_RO, *tiles[:3], *copies, num_tiles, tiles.looped(), *(scales or (None, None)),
        *(bias or (None, None)), *(low or (None, None)),
        I=width, O=out_width, SCALED=columns, IS_TRANSPOSED=is_transposed, RANK=rank, LOW=low_block(rank),
        BLOCK_R=tiles.rows, BLOCK_O=cut.outputs, BLOCK_I=cut.inner, GROUP=cut.group,
        IS_INTERPRETED=knobs.runtime.interpret, **sizes, num_warps=cut.num_warps, num_stages=cut.num_stages,
    )  # fmt: skip
    return out_RO
