"""Gather rows, multiply by gate and up, apply SwiGLU and the score: the way into the experts, in one kernel.

S rows · R expert slots, sorted by expert · e local experts · D width of a row · F hidden width

Physics: 4·R·D·F FLOPs, bound by the matrix units from about 200 slots an expert on. The rows are gathered while the
GEMM loads its tiles, so no permuted copy of them exists; gate and up of the same columns are one product of twice as
many columns, which reads the rows from shared memory once, and are split afterwards, so that the epilogue has both and
writes the pre-activation (for backward) and the weighted activation, each once.
"""

import triton
import triton.language as tl
from torch import Tensor
from triton import knobs
from triton.tools.tensor_descriptor import TensorDescriptor

from titan_moe.config.swiglu import PLAIN_SWIGLU, SwiGLU
from titan_moe.kernels.experts.activation import clamp, forward
from titan_moe.kernels.experts.copy_blocks import CopyBlocks, TileSchedule, get_arguments, get_in_order, wait_for_rows
from titan_moe.kernels.experts.low_rank import add_low_pair, low_block
from titan_moe.kernels.experts.tiles import GemmTiles, Tiles, place_in_groups

TILE_ROWS = 128


MEASURED = GemmTiles(outputs=128)
GET_BLOCKS = CopyBlocks(36, 16_384)
"""Measured on 2 H200s, as those of the other GEMMs (tools/results)."""


@triton.jit
def _expert_up_kernel(
    x_ptr, rows_ptr, scores_ptr, weight_desc, bias_ptr, hidden_ptr, active_ptr, experts_ptr, begins_ptr, ends_ptr,
    get_addresses_ptr, get_rows_ptr, count_ptr, required_rows_ptr, arrived_ptr, base_ptr, num_tiles_ptr,
    low_ptr, factor_ptr,
    F: tl.constexpr, D: tl.constexpr, IS_INTERPRETED: tl.constexpr,
    BLOCK_R: tl.constexpr, BLOCK_F: tl.constexpr, BLOCK_D: tl.constexpr, GROUP: tl.constexpr,
    COPY_BLOCKS: tl.constexpr, COPY_BLOCKS2: tl.constexpr, COPIED_ROWS: tl.constexpr, COPIED_COLUMNS: tl.constexpr,
    LIMIT: tl.constexpr, ALPHA: tl.constexpr, UP_OFFSET: tl.constexpr, RANK: tl.constexpr, LOW: tl.constexpr,
):  # fmt: skip
    if base_ptr is not None:  # products with a width keep their alignment
        x_ptr += tl.load(base_ptr) * D
        hidden_ptr += tl.load(base_ptr + 1) * (2 * F)
    program = tl.program_id(0) - COPY_BLOCKS
    if COPY_BLOCKS:
        if program < 0:
            get_in_order(
                program + COPY_BLOCKS, x_ptr, get_addresses_ptr, get_rows_ptr, count_ptr, arrived_ptr, D,
                COPY_BLOCKS, COPIED_ROWS, COPIED_COLUMNS,
            )  # fmt: skip
            return
    num_columns: tl.constexpr = (F + BLOCK_F - 1) // BLOCK_F
    num_programs = tl.num_programs(0) - COPY_BLOCKS
    if num_tiles_ptr is None:
        tile, column = place_in_groups(program, num_programs // num_columns, num_columns, GROUP)
        expert = tl.load(experts_ptr + tile)
        if expert < 0:
            return
        _expert_up_tile(
            tile, column, expert, x_ptr, rows_ptr, scores_ptr, weight_desc, bias_ptr, hidden_ptr, active_ptr,
            begins_ptr, ends_ptr, required_rows_ptr, arrived_ptr, low_ptr, factor_ptr, F, D, IS_INTERPRETED,
            BLOCK_R, BLOCK_F, BLOCK_D, COPY_BLOCKS, COPY_BLOCKS2, COPIED_ROWS, LIMIT, ALPHA, UP_OFFSET, RANK, LOW,
        )  # fmt: skip
    else:
        num_tiles = tl.load(num_tiles_ptr)
        for position in tl.range(program, num_tiles * num_columns, num_programs, num_stages=1):
            tile, column = place_in_groups(position, num_tiles, num_columns, GROUP)
            _expert_up_tile(
                tile, column, tl.load(experts_ptr + tile), x_ptr, rows_ptr, scores_ptr, weight_desc, bias_ptr,
                hidden_ptr, active_ptr, begins_ptr, ends_ptr, required_rows_ptr, arrived_ptr, low_ptr, factor_ptr,
                F, D, IS_INTERPRETED, BLOCK_R, BLOCK_F, BLOCK_D, COPY_BLOCKS, COPY_BLOCKS2, COPIED_ROWS,
                LIMIT, ALPHA, UP_OFFSET, RANK, LOW,
            )  # fmt: skip


@triton.jit
def _expert_up_tile(
    tile, column, expert, x_ptr, rows_ptr, scores_ptr, weight_desc, bias_ptr, hidden_ptr, active_ptr, begins_ptr,
    ends_ptr, required_rows_ptr, arrived_ptr, low_ptr, factor_ptr,
    F: tl.constexpr, D: tl.constexpr, IS_INTERPRETED: tl.constexpr,
    BLOCK_R: tl.constexpr, BLOCK_F: tl.constexpr, BLOCK_D: tl.constexpr,
    COPY_BLOCKS: tl.constexpr, COPY_BLOCKS2: tl.constexpr, COPIED_ROWS: tl.constexpr,
    LIMIT: tl.constexpr, ALPHA: tl.constexpr, UP_OFFSET: tl.constexpr, RANK: tl.constexpr, LOW: tl.constexpr,
):  # fmt: skip
    """Compute a tile of slots and columns, once its rows have been received."""
    if COPY_BLOCKS:
        wait_for_rows(
            arrived_ptr, tl.load(required_rows_ptr + tile), COPY_BLOCKS, COPY_BLOCKS2, COPIED_ROWS, IS_INTERPRETED
        )
    slots = tl.load(begins_ptr + tile) + tl.arange(0, BLOCK_R)
    is_slot = slots < tl.load(ends_ptr + tile)
    features = column * BLOCK_F + tl.arange(0, BLOCK_F)
    is_feature = features < F
    inner = tl.arange(0, BLOCK_D)
    rows = tl.load(rows_ptr + slots, mask=is_slot, other=0)
    both = tl.zeros((BLOCK_R, 2 * BLOCK_F), dtype=tl.float32)
    for k in range(0, D, BLOCK_D):
        x_ptrs = x_ptr + rows.to(tl.int64)[:, None] * D + (k + inner)[None, :]
        x = tl.load(x_ptrs, mask=is_slot[:, None] & (inner < D - k)[None, :], other=0.0)
        weight = weight_desc.load([expert * 2, column * BLOCK_F, k]).reshape(2 * BLOCK_F, BLOCK_D)
        both = tl.dot(x, weight.T, both, input_precision="ieee")
    if low_ptr is not None:
        both = add_low_pair(both, low_ptr, factor_ptr, expert, slots, is_slot, column * BLOCK_F, F, RANK, BLOCK_F, LOW)
    gate, up = tl.split(both.reshape(BLOCK_R, 2, BLOCK_F).permute(0, 2, 1))
    if bias_ptr is not None:
        bias_ptrs = bias_ptr + expert * (2 * F) + features
        gate += tl.load(bias_ptrs, mask=is_feature, other=0.0).to(tl.float32)[None, :]
        up += tl.load(bias_ptrs + F, mask=is_feature, other=0.0).to(tl.float32)[None, :]
    keep = is_slot[:, None] & is_feature[None, :]
    hidden_ptrs = hidden_ptr + slots.to(tl.int64)[:, None] * (2 * F) + features[None, :]
    # the activation is made of the rounded pre-activation, as backward will see it
    gate = gate.to(hidden_ptr.dtype.element_ty)
    up = up.to(hidden_ptr.dtype.element_ty)
    tl.store(hidden_ptrs, gate, mask=keep)
    tl.store(hidden_ptrs + F, up, mask=keep)
    score = tl.load(scores_ptr + slots, mask=is_slot, other=0.0)
    gate, up = gate.to(tl.float32), up.to(tl.float32)
    if IS_INTERPRETED:
        silu, up = forward(gate, up, LIMIT, ALPHA, UP_OFFSET)
    else:
        gate, up = clamp(gate, up, LIMIT)
        silu = _silu(gate) if ALPHA == 1.0 else _silu(ALPHA * gate) * (1 / ALPHA)
        up = up if UP_OFFSET == 0.0 else up + UP_OFFSET
    active = silu * up * score[:, None]
    active_ptrs = active_ptr + slots.to(tl.int64)[:, None] * F + features[None, :]
    tl.store(active_ptrs, active.to(active_ptr.dtype.element_ty), mask=keep)


@triton.jit
def _silu(gate):
    """Without care for numbers below 1e-38, which saves a third of the epilogue's instructions."""
    # in PTX, since Triton knows no other quotient than the one that scales its factors
    return tl.inline_asm_elementwise(
        """{
        .reg .f32 share;
        mul.f32 share, $1, 0fBFB8AA3B; // -log2(e)
        ex2.approx.ftz.f32 share, share;
        add.f32 share, share, 0f3F800000;
        rcp.approx.ftz.f32 share, share;
        mul.f32 $0, $1, share;
        }""",
        "=f,f",
        [gate],
        dtype=tl.float32,
        is_pure=True,
        pack=1,
    )


def expert_up(
    x_SD: Tensor,
    rows_R: Tensor,
    scores_R: Tensor,
    weight_e2FD: Tensor,
    tiles: Tiles,
    cut: GemmTiles = MEASURED,
    schedule: TileSchedule | None = None,
    copy_blocks: CopyBlocks = GET_BLOCKS,
    *,
    bias: Tensor | None = None,
    hidden: Tensor | None = None,
    base: Tensor | None = None,
    low: tuple[Tensor, Tensor] | None = None,
    activation: SwiGLU = PLAIN_SWIGLU,
) -> tuple[Tensor, Tensor]:
    """Pre-activation [R, 2F] and weighted activation [R, F] of every slot; past the last expert nothing is written.

    With `schedule`, copy blocks of the launch get rows into x.

    Args:
        bias: [e, 2, F], added to the pre-activation.
        hidden: where the pre-activation is written, a new tensor if None.
        base: int64 [2] on the device. x_SD and `hidden` are those of several layers; this layer's begin at row base[0]
            and at slot base[1]. Indices count from there.
        low: low products of gate and up, [R, 2 r], and their factors, [e, 2, F, r], contiguous: each slot gets them,
            before its pre-activation is rounded.
    """
    num_slots, (_, _, num_features, width) = scores_R.numel(), weight_e2FD.shape
    if hidden is None:
        if base is not None:
            raise ValueError("base is a place in hidden, which is not given")
        hidden = x_SD.new_empty(num_slots, 2 * num_features)
    active_RF = x_SD.new_empty(num_slots, num_features)
    if not num_slots:
        return hidden, active_RF
    # a block may run over the end of its expert's gate or up half: those columns are computed and not stored
    weights = TensorDescriptor.from_tensor(weight_e2FD.flatten(0, 1), [2, cut.outputs, cut.inner])
    copies, sizes = get_arguments(schedule, copy_blocks, width)
    rank = 0 if low is None else low[1].shape[-1]
    _expert_up_kernel[(sizes["COPY_BLOCKS"] + tiles.usual * triton.cdiv(num_features, cut.outputs),)](
        x_SD, rows_R, scores_R, weights, bias, hidden, active_RF, *tiles[:3], *copies, base, tiles.looped(),
        *(low or (None, None)),
        F=num_features, D=width, IS_INTERPRETED=knobs.runtime.interpret, **sizes,
        BLOCK_R=tiles.rows, BLOCK_F=cut.outputs, BLOCK_D=cut.inner, GROUP=cut.group,
        LIMIT=activation.limit, ALPHA=activation.alpha, UP_OFFSET=activation.up_offset,
        RANK=rank, LOW=low_block(2 * rank),
        num_warps=cut.num_warps, num_stages=cut.num_stages,
    )  # fmt: skip
    return hidden, active_RF
