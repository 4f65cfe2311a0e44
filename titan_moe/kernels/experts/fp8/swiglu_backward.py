"""Back through SwiGLU and the score, quantised: once by slot for the gradient of rows, once transposed for weights.

R expert slots, sorted by expert · M tiles of 128 slots · e experts · F hidden width

Two passes over the same operands, because a slot's scale needs the whole slot, and a transposed tile needs many slots.
The matrix units read fp8 along the summed dimension alone: slots, for the gradients of weights. There a slot's own
scale cannot leave the sum, so those of rows (kernels/experts/fp8/rows.py) move to the other factor: the transposed pass
multiplies gradients of the pre-activation by the scale of the slot's row, and activations by that of its gradient row.
One scale an expert remains, a bound from the scales of its slots: slots whose product of scales is 2 ** 12 below the
largest one lose digits, at 2 ** 18 all.

Physics: memory-bound. By slot, reads 4·R·F bytes and writes 2·R·F; transposed, reads 4·R·F and writes 3·R·F.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from titan_moe.kernels.experts.fp8.rows import CODES, TAIL_BYTES, power_of_two, scale_at
from titan_moe.kernels.experts.tiles import MAX_PROGRAMS, Tiles

TRANSPOSED_CUT = 64, 8
"""Columns of a thread block of the transposed pass, and its warps."""


@triton.jit
def _fp8_swiglu_backward_kernel(
    dactive_ptr, kept_ptr, scores_ptr, rows_ptr, offsets_ptr, base_ptr, x_ptr, dy_ptr,
    dhidden_ptr, scales_ptr, dscores_ptr, amax_ptr, num_slots, num_experts,
    F: tl.constexpr, ROW: tl.constexpr, D: tl.constexpr, X_ROW: tl.constexpr, BLOCK_F: tl.constexpr,
):  # fmt: skip
    if base_ptr is not None:  # a product with the width keeps its alignment
        x_ptr += tl.load(base_ptr) * X_ROW
        kept_ptr += tl.load(base_ptr + 1) * ROW
    end = tl.minimum(num_slots, tl.load(offsets_ptr + num_experts - 1))
    features = tl.arange(0, BLOCK_F)
    for index in range(tl.program_id(0), end, tl.num_programs(0)):
        slot = tl.cast(index, tl.int64)
        kept_row_ptr, dactive_row_ptr = kept_ptr + slot * ROW, dactive_ptr + slot * F
        score, kept_scale = tl.load(scores_ptr + slot), tl.load(scale_at(kept_row_ptr, 2 * F))
        dgate, dup, most, most_active, dscore = _piece(dactive_row_ptr, kept_row_ptr, features, kept_scale, score, F)
        for first in range(BLOCK_F, F, BLOCK_F):
            _, _, more, more_active, share = _piece(
                dactive_row_ptr, kept_row_ptr, first + features, kept_scale, score, F
            )
            most, most_active, dscore = tl.maximum(most, more), tl.maximum(most_active, more_active), dscore + share
        scale = power_of_two(most)
        dhidden_row_ptr = dhidden_ptr + slot * 2 * F
        element: tl.constexpr = dhidden_ptr.dtype.element_ty
        for first in range(0, F, BLOCK_F):
            if F > BLOCK_F:  # or the only piece is still in registers
                dgate, dup, _, _, _ = _piece(dactive_row_ptr, kept_row_ptr, first + features, kept_scale, score, F)
            keep = first + features < F
            tl.store(dhidden_row_ptr + first + features, (dgate / scale).to(element), mask=keep)
            tl.store(dhidden_row_ptr + F + first + features, (dup / scale).to(element), mask=keep)
        tl.store(scales_ptr + slot, scale)
        tl.store(dscores_ptr + slot, dscore)
        row = tl.load(rows_ptr + slot).to(tl.int64)
        tl.store(amax_ptr + slot * 2, most * tl.load(scale_at(x_ptr + row * X_ROW, D)))
        tl.store(amax_ptr + slot * 2 + 1, most_active * tl.load(scale_at(dy_ptr + row * X_ROW, D)))


@triton.jit
def _piece(dactive_ptr, kept_ptr, features, kept_scale, score, F: tl.constexpr):
    """Gradients of gate and up of a piece of a slot, the largest of them, the largest activation, and the piece's share
    of the gradient of the score."""
    dgate, dup, active, share = _gradients(
        dactive_ptr + features, kept_ptr + features, F, kept_scale, score, features < F
    )
    most = tl.max(tl.maximum(tl.abs(dgate), tl.abs(dup)), axis=0)
    return dgate, dup, most, tl.max(tl.abs(active), axis=0), tl.sum(share, axis=0)


@triton.jit
def _gradients(dactive_ptrs, gate_ptrs, F: tl.constexpr, kept_scale, score, keep):
    """Gradients of gate and up, weighted activation, and what the gradient of the score sums."""
    gate = tl.load(gate_ptrs, mask=keep, other=0.0).to(tl.float32) * kept_scale
    up = tl.load(gate_ptrs + F, mask=keep, other=0.0).to(tl.float32) * kept_scale
    dactive = tl.load(dactive_ptrs, mask=keep, other=0.0).to(tl.float32)
    sigmoid = tl.sigmoid(gate)
    silu = gate * sigmoid
    dunweighted = dactive * score
    dgate = dunweighted * up * (sigmoid + silu * (1 - sigmoid))
    return dgate, dunweighted * silu, silu * up * score, dactive * silu * up


def swiglu_backward(
    dactive_RF: Tensor,
    kept: Tensor,
    scores_R: Tensor,
    rows_R: Tensor,
    offsets_e: Tensor,
    x: Tensor,
    dy: Tensor,
    base: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Gradient of the pre-activation [R, 2F] in e4m3, its scales [R], gradients of the scores [R], and what
    `transposed_factors` needs: for each slot the largest of both factors.

    Slots past the last expert are not written. `kept` is the packed pre-activation, x and dy are packed rows. With
    `base`, x and `kept` are those of several layers.
    """
    num_slots, num_features = dactive_RF.shape
    dhidden_R2F = dactive_RF.new_empty(num_slots, 2 * num_features, dtype=CODES)
    scales_R, dscores_R = torch.empty_like(scores_R), torch.empty_like(scores_R)
    amax_R2 = scores_R.new_empty(num_slots, 2)
    block_f = min(triton.next_power_of_2(num_features), 2048)
    if num_slots:
        _fp8_swiglu_backward_kernel[(min(num_slots, MAX_PROGRAMS),)](
            dactive_RF, kept, scores_R, rows_R, offsets_e, base, x, dy, dhidden_R2F, scales_R, dscores_R, amax_R2,
            num_slots, offsets_e.numel(),
            F=num_features, ROW=kept.shape[1], D=dy.shape[1] - TAIL_BYTES, X_ROW=dy.shape[1],
            BLOCK_F=block_f, num_warps=max(block_f // 512, 1),
        )  # fmt: skip
    return dhidden_R2F, scales_R, dscores_R, amax_R2


@triton.jit
def _scales_kernel(amax_ptr, offsets_ptr, scales_ptr, BLOCK: tl.constexpr):
    """An expert's two scales."""
    expert = tl.program_id(0)
    begin = tl.load(offsets_ptr + expert - 1, mask=expert > 0, other=0)
    end = tl.load(offsets_ptr + expert)
    most_dhidden, most_active = tl.zeros((BLOCK,), tl.float32), tl.zeros((BLOCK,), tl.float32)
    for first in range(begin, end, BLOCK):
        slots = first + tl.arange(0, BLOCK)
        keep = slots < end
        most_dhidden = tl.maximum(most_dhidden, tl.load(amax_ptr + slots * 2, mask=keep, other=0.0))
        most_active = tl.maximum(most_active, tl.load(amax_ptr + slots * 2 + 1, mask=keep, other=0.0))
    tl.store(scales_ptr + expert * 2, power_of_two(tl.max(most_dhidden, axis=0)))
    tl.store(scales_ptr + expert * 2 + 1, power_of_two(tl.max(most_active, axis=0)))


@triton.jit
def _transposed_kernel(
    dactive_ptr, kept_ptr, scores_ptr, rows_ptr, base_ptr, x_ptr, dy_ptr, expert_scales_ptr,
    experts_ptr, begins_ptr, ends_ptr, dhidden_ptr, active_ptr, num_columns,
    F: tl.constexpr, ROW: tl.constexpr, D: tl.constexpr, X_ROW: tl.constexpr,
    BLOCK_R: tl.constexpr, BLOCK_F: tl.constexpr,
):  # fmt: skip
    if base_ptr is not None:  # a product with the width keeps its alignment
        x_ptr += tl.load(base_ptr) * X_ROW
        kept_ptr += tl.load(base_ptr + 1) * ROW
    tile = tl.program_id(0)
    expert = tl.load(experts_ptr + tile)
    if expert < 0:
        return
    slots = tl.load(begins_ptr + tile) + tl.arange(0, BLOCK_R)
    is_slot = slots < tl.load(ends_ptr + tile)
    slots = slots.to(tl.int64)
    row = tl.load(rows_ptr + slots, mask=is_slot, other=0).to(tl.int64)
    score = tl.load(scores_ptr + slots, mask=is_slot, other=0.0)
    kept_scale = tl.load(scale_at(kept_ptr + slots * ROW, 2 * F), mask=is_slot, other=0.0)
    # quotients of powers of two: exact
    x_scale = tl.load(scale_at(x_ptr + row * X_ROW, D), mask=is_slot, other=0.0) / tl.load(
        expert_scales_ptr + expert * 2
    )
    dy_scale = tl.load(scale_at(dy_ptr + row * X_ROW, D), mask=is_slot, other=0.0) / tl.load(
        expert_scales_ptr + expert * 2 + 1
    )
    features = tl.program_id(1) * BLOCK_F + tl.arange(0, BLOCK_F)
    keep = is_slot[:, None] & (features < F)[None, :]
    dgate, dup, active, _ = _gradients(
        dactive_ptr + slots[:, None] * F + features[None, :], kept_ptr + slots[:, None] * ROW + features[None, :],
        F, kept_scale[:, None], score[:, None], keep,
    )  # fmt: skip
    element: tl.constexpr = dhidden_ptr.dtype.element_ty
    place = tile * BLOCK_R + tl.arange(0, BLOCK_R)
    out = features.to(tl.int64)[:, None] * num_columns + place[None, :]
    is_feature = (features < F)[:, None]
    tl.store(dhidden_ptr + out, tl.trans((dgate * x_scale[:, None]).to(element)), mask=is_feature)
    half = F * tl.cast(num_columns, tl.int64)
    tl.store(dhidden_ptr + half + out, tl.trans((dup * x_scale[:, None]).to(element)), mask=is_feature)
    tl.store(active_ptr + out, tl.trans((active * dy_scale[:, None]).to(element)), mask=is_feature)


def transposed_factors(
    dactive_RF: Tensor,
    kept: Tensor,
    scores_R: Tensor,
    rows_R: Tensor,
    offsets_e: Tensor,
    x: Tensor,
    dy: Tensor,
    amax_R2: Tensor,
    tiles: Tiles,
    base: Tensor | None = None,
    cut: tuple[int, int] = TRANSPOSED_CUT,
) -> tuple[Tensor, Tensor, Tensor]:
    """What the gradients of weights sum over slots, in e4m3: gradients of the pre-activation [2F, 128·M] times the
    scales of x, weighted activations [F, 128·M] times the scales of dy; and scales [e, 2].

    Column 128·m + i is the i-th slot of tile m; it is zero past the tile's last slot, and is not written in tiles past
    the last.
    """
    num_features, num_columns = dactive_RF.shape[1], tiles.rows * tiles.experts_M.numel()
    dhidden = dactive_RF.new_empty(2 * num_features, num_columns, dtype=CODES)
    active = dactive_RF.new_empty(num_features, num_columns, dtype=CODES)
    scales_e2 = amax_R2.new_empty(offsets_e.numel(), 2)
    _scales_kernel[(offsets_e.numel(),)](amax_R2, offsets_e, scales_e2, BLOCK=4096, num_warps=8)
    block_f, num_warps = cut
    _transposed_kernel[(tiles.experts_M.numel(), triton.cdiv(num_features, block_f))](
        dactive_RF, kept, scores_R, rows_R, base, x, dy, scales_e2, *tiles[:3], dhidden, active, num_columns,
        F=num_features, ROW=kept.shape[1], D=dy.shape[1] - TAIL_BYTES, X_ROW=dy.shape[1],
        BLOCK_R=tiles.rows, BLOCK_F=block_f, num_warps=num_warps,
    )  # fmt: skip
    return dhidden, active, scales_e2
