"""Back through SwiGLU and the score, quantised by slot or by blocks of 128 columns.

R expert slots, sorted by expert · F hidden width

The gradient of rows reads the gradient of the pre-activation as it is here. Gradients of weights sum over slots, where
a slot's own scale cannot leave the sum, nor can that of its row: for them `factors_R2` has the products of both,
which transposed.py brings into the codes. With blocks they are rounded again (requantized.py), and need the scales.

Physics: memory-bound, reads 4·R·F bytes and writes 3·R·F. The sigmoid's exponential and reciprocal are the only slow
instructions: scales are powers of two, by whose reciprocals codes are multiplied.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from titan_moe.config.swiglu import PLAIN_SWIGLU, SwiGLU
from titan_moe.kernels.experts.activation import backward, forward
from titan_moe.kernels.experts.fp8.packed import CODES, WHOLE_ROW, codes_width
from titan_moe.kernels.experts.fp8.rows import power_of_two, scale_at, store_blocks
from titan_moe.kernels.experts.fp8.swiglu import new_scales
from titan_moe.kernels.experts.tiles import MAX_PROGRAMS


@triton.jit
def _fp8_swiglu_backward_kernel(
    dactive_ptr, kept_ptr, scores_ptr, rows_ptr, offsets_ptr, base_ptr, delayed_ptr, x_ptr, dy_ptr,
    dhidden_ptr, scales_ptr, active_ptr, factors_ptr, dscores_ptr, num_slots, num_experts,
    F: tl.constexpr, ROW: tl.constexpr, D: tl.constexpr, X_ROW: tl.constexpr, BLOCK_F: tl.constexpr,
    COLUMNS: tl.constexpr, LIMIT: tl.constexpr, ALPHA: tl.constexpr, UP_OFFSET: tl.constexpr,
):  # fmt: skip
    if base_ptr is not None:  # products with a width keep their alignment
        x_ptr += tl.load(base_ptr) * X_ROW
        kept_ptr += tl.load(base_ptr + 1) * ROW
    if delayed_ptr is not None:
        dy_ptr += tl.load(delayed_ptr) * X_ROW
        dactive_ptr += tl.load(delayed_ptr + 1) * F
    end = tl.minimum(num_slots, tl.load(offsets_ptr + num_experts - 1))
    features = tl.arange(0, BLOCK_F)
    for index in range(tl.program_id(0), end, tl.num_programs(0)):
        slot = tl.cast(index, tl.int64)
        kept_row_ptr, dactive_row_ptr = kept_ptr + slot * ROW, dactive_ptr + slot * F
        score, kept_scales_ptr = tl.load(scores_ptr + slot), scale_at(kept_row_ptr, 2 * F)
        dhidden_row_ptr = dhidden_ptr + slot * 2 * F
        if COLUMNS:
            scales_row_ptr, dscore = scales_ptr + slot * (2 * F // COLUMNS), 0.0
            for first in range(0, F, BLOCK_F):
                is_feature, block = first + features < F, (first + features) // COLUMNS
                gate_scale = tl.load(kept_scales_ptr + block, mask=is_feature, other=0.0)
                up_scale = tl.load(kept_scales_ptr + F // COLUMNS + block, mask=is_feature, other=0.0)
                dgate, dup, active, _, _, share = _piece(
                    dactive_row_ptr,
                    kept_row_ptr,
                    first + features,
                    gate_scale,
                    up_scale,
                    score,
                    F,
                    LIMIT,
                    ALPHA,
                    UP_OFFSET,
                )
                dscore += share
                store_blocks(dgate, dhidden_row_ptr, scales_row_ptr, first, F, BLOCK_F, COLUMNS)
                store_blocks(dup, dhidden_row_ptr + F, scales_row_ptr + F // COLUMNS, first, F, BLOCK_F, COLUMNS)
                if active_ptr is not None:
                    active_scales_ptr = factors_ptr + slot * (F // COLUMNS)
                    store_blocks(active, active_ptr + slot * F, active_scales_ptr, first, F, BLOCK_F, COLUMNS)
            tl.store(dscores_ptr + slot, dscore)
        else:
            kept_scale = tl.load(kept_scales_ptr)
            dgate, dup, active, most, most_active, dscore = _piece(
                dactive_row_ptr, kept_row_ptr, features, kept_scale, kept_scale, score, F, LIMIT, ALPHA, UP_OFFSET
            )
            for first in range(BLOCK_F, F, BLOCK_F):
                _, _, _, more, more_active, share = _piece(
                    dactive_row_ptr, kept_row_ptr, first + features, kept_scale, kept_scale, score, F,
                    LIMIT, ALPHA, UP_OFFSET,
                )  # fmt: skip
                most, most_active, dscore = tl.maximum(most, more), tl.maximum(most_active, more_active), dscore + share
            scale, active_scale = power_of_two(most), power_of_two(most_active)
            per_scale, per_active_scale = 1 / scale, 1 / active_scale  # exact
            element: tl.constexpr = dhidden_ptr.dtype.element_ty
            for first in range(0, F, BLOCK_F):
                if F > BLOCK_F:  # or the only piece is still in registers
                    dgate, dup, active, _, _, _ = _piece(
                        dactive_row_ptr, kept_row_ptr, first + features, kept_scale, kept_scale, score, F,
                        LIMIT, ALPHA, UP_OFFSET,
                    )  # fmt: skip
                keep = first + features < F
                tl.store(dhidden_row_ptr + first + features, (dgate * per_scale).to(element), mask=keep)
                tl.store(dhidden_row_ptr + F + first + features, (dup * per_scale).to(element), mask=keep)
                if active_ptr is not None:
                    tl.store(
                        active_ptr + slot * F + first + features, (active * per_active_scale).to(element), mask=keep
                    )
            tl.store(scales_ptr + slot, scale)
            tl.store(dscores_ptr + slot, dscore)
            row = tl.load(rows_ptr + slot).to(tl.int64)
            # slots without gradient take no digits from others
            factor = tl.where(most == 0, 0.0, scale * tl.load(scale_at(x_ptr + row * X_ROW, D)))
            active_factor = tl.where(most_active == 0, 0.0, active_scale * tl.load(scale_at(dy_ptr + row * X_ROW, D)))
            tl.store(factors_ptr + slot * 2, factor)
            tl.store(factors_ptr + slot * 2 + 1, active_factor)


@triton.jit
def _piece(
    dactive_ptr, kept_ptr, features, gate_scale, up_scale, score, F: tl.constexpr,
    LIMIT: tl.constexpr, ALPHA: tl.constexpr, UP_OFFSET: tl.constexpr,
):  # fmt: skip
    """Of a piece of a slot: gradients of gate and up, weighted activation, the largest of the first two, the largest of
    the third, and the share of the gradient of the score."""
    keep = features < F
    gate = tl.load(kept_ptr + features, mask=keep, other=0.0).to(tl.float32) * gate_scale
    up = tl.load(kept_ptr + F + features, mask=keep, other=0.0).to(tl.float32) * up_scale
    dactive = tl.load(dactive_ptr + features, mask=keep, other=0.0).to(tl.float32)
    silu, factor = forward(gate, up, LIMIT, ALPHA, UP_OFFSET)
    dgate, dup = backward(gate, up, dactive * score, LIMIT, ALPHA, UP_OFFSET)
    unweighted = silu * factor
    active = unweighted * score
    most = tl.max(tl.maximum(tl.abs(dgate), tl.abs(dup)), axis=0)
    return dgate, dup, active, most, tl.max(tl.abs(active), axis=0), tl.sum(dactive * unweighted, axis=0)


def swiglu_backward(
    dactive_RF: Tensor,
    kept: Tensor,
    scores_R: Tensor,
    rows_R: Tensor,
    offsets_e: Tensor,
    x: Tensor,
    dy: Tensor,
    base: Tensor | None = None,
    delayed: Tensor | None = None,
    *,
    has_active: bool = True,
    columns: int = WHOLE_ROW,
    activation: SwiGLU = PLAIN_SWIGLU,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Gradient of the pre-activation [R, 2F] in e4m3 and its scales [R], with blocks [R, 2F / 128], weighted activation
    [R, F] in e4m3, and gradients of the scores [R].

    Before the last come factors for gradients of weights. With scales of slots they are [R, 2]: the scale of a slot's
    gradient times that of its row of x, and the scale of its activation times that of its row of dy. With blocks they
    are the scales of the activation, [R, F / 128].

    Without `has_active` the activation is empty. Slots past the last expert are not written. `kept` is the packed
    pre-activation, x and dy are packed rows. With `base`, x and `kept` are those of several layers, and with `delayed`
    dy and dactive_RF are.
    """
    num_slots, num_features = scores_R.numel(), dactive_RF.shape[1]
    dhidden_R2F = dactive_RF.new_empty(num_slots, 2 * num_features, dtype=CODES)
    active_RF = dactive_RF.new_empty(num_slots if has_active else 0, num_features, dtype=CODES)
    scales, dscores_R = new_scales(scores_R, 2 * num_features, columns), torch.empty_like(scores_R)
    factors = new_scales(scores_R, num_features, columns) if columns else scores_R.new_empty(num_slots, 2)
    block_f = min(triton.next_power_of_2(num_features), 2048)
    if num_slots:
        _fp8_swiglu_backward_kernel[(min(num_slots, MAX_PROGRAMS),)](
            dactive_RF, kept, scores_R, rows_R, offsets_e, base, delayed, x, dy,
            dhidden_R2F, scales, active_RF if has_active else None, factors, dscores_R,
            num_slots, offsets_e.numel(),
            F=num_features, ROW=kept.shape[1], D=codes_width(dy.shape[1], columns), X_ROW=dy.shape[1],
            BLOCK_F=block_f, COLUMNS=columns, LIMIT=activation.limit, ALPHA=activation.alpha,
            UP_OFFSET=activation.up_offset, num_warps=max(block_f // 512, 1),
        )  # fmt: skip
    return dhidden_R2F, scales, active_RF, factors, dscores_R
