"""SwiGLU of pre-activations, quantised by slot or by blocks of 128 columns: the activation for the down projection, and
what backward keeps.

R expert slots, sorted by expert · F hidden width

Physics: memory-bound, reads 4·R·F bytes and writes 3·R·F. A scale needs the whole slot, so this is a pass of its own;
a GEMM's thread block has 128 columns of it. Blocks would let the GEMM do it, but gate and up of 128 columns, both with
sums outside the matrix units, do not fit its registers. The activation is made of the pre-activation as the GEMM wrote
it; backward sees the pre-activation in e4m3, half the memory.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from titan_moe.config.swiglu import PLAIN_SWIGLU, SwiGLU
from titan_moe.kernels.experts.activation import forward
from titan_moe.kernels.experts.fp8.packed import CODES, WHOLE_ROW, num_scales, packed_width
from titan_moe.kernels.experts.fp8.rows import power_of_two, scale_at, store_blocks
from titan_moe.kernels.experts.tiles import MAX_PROGRAMS


@triton.jit
def _fp8_swiglu_kernel(
    hidden_ptr, scores_ptr, offsets_ptr, kept_ptr, active_ptr, scales_ptr, base_ptr, num_slots, num_experts,
    F: tl.constexpr, ROW: tl.constexpr, BLOCK_F: tl.constexpr, COLUMNS: tl.constexpr,
    LIMIT: tl.constexpr, ALPHA: tl.constexpr, UP_OFFSET: tl.constexpr,
):  # fmt: skip
    if base_ptr is not None:  # a product with the width keeps its alignment
        kept_ptr += tl.load(base_ptr + 1) * ROW
    end = tl.minimum(num_slots, tl.load(offsets_ptr + num_experts - 1))
    features = tl.arange(0, BLOCK_F)
    for index in range(tl.program_id(0), end, tl.num_programs(0)):
        slot = tl.cast(index, tl.int64)
        gate_ptr, kept_row_ptr = hidden_ptr + slot * 2 * F, kept_ptr + slot * ROW
        score = tl.load(scores_ptr + slot)
        if COLUMNS:
            kept_scales_ptr, scales_row_ptr = scale_at(kept_row_ptr, 2 * F), scales_ptr + slot * (F // COLUMNS)
            for first in range(0, F, BLOCK_F):
                gate, up, active, _, _ = _load(gate_ptr, first + features, score, F, LIMIT, ALPHA, UP_OFFSET)
                store_blocks(active, active_ptr + slot * F, scales_row_ptr, first, F, BLOCK_F, COLUMNS)
                store_blocks(gate, kept_row_ptr, kept_scales_ptr, first, F, BLOCK_F, COLUMNS)
                store_blocks(up, kept_row_ptr + F, kept_scales_ptr + F // COLUMNS, first, F, BLOCK_F, COLUMNS)
        else:
            gate, up, active, most, most_active = _load(gate_ptr, features, score, F, LIMIT, ALPHA, UP_OFFSET)
            for first in range(BLOCK_F, F, BLOCK_F):
                _, _, _, more, more_active = _load(gate_ptr, first + features, score, F, LIMIT, ALPHA, UP_OFFSET)
                most, most_active = tl.maximum(most, more), tl.maximum(most_active, more_active)
            kept_scale, scale = power_of_two(most), power_of_two(most_active)
            per_kept_scale, per_scale = 1 / kept_scale, 1 / scale  # exact
            for first in range(0, F, BLOCK_F):
                if F > BLOCK_F:  # or the only piece is still in registers
                    gate, up, active, _, _ = _load(gate_ptr, first + features, score, F, LIMIT, ALPHA, UP_OFFSET)
                keep = first + features < F
                element: tl.constexpr = active_ptr.dtype.element_ty
                tl.store(active_ptr + slot * F + first + features, (active * per_scale).to(element), mask=keep)
                tl.store(kept_row_ptr + first + features, (gate * per_kept_scale).to(element), mask=keep)
                tl.store(kept_row_ptr + F + first + features, (up * per_kept_scale).to(element), mask=keep)
            tl.store(scale_at(kept_row_ptr, 2 * F), kept_scale)
            tl.store(scales_ptr + slot, scale)


@triton.jit
def _load(
    gate_ptr, features, score, F: tl.constexpr,
    LIMIT: tl.constexpr, ALPHA: tl.constexpr, UP_OFFSET: tl.constexpr,
):  # fmt: skip
    """Gate, up and weighted activation of a piece of a slot; the largest of the first two, and of the third."""
    gate = tl.load(gate_ptr + features, mask=features < F, other=0.0).to(tl.float32)
    up = tl.load(gate_ptr + F + features, mask=features < F, other=0.0).to(tl.float32)
    silu, factor = forward(gate, up, LIMIT, ALPHA, UP_OFFSET)
    active = silu * factor * score
    most = tl.max(tl.maximum(tl.abs(gate), tl.abs(up)), axis=0)
    return gate, up, active, most, tl.max(tl.abs(active), axis=0)


def new_scales(like_R: Tensor, width: int, columns: int) -> Tensor:
    """Memory for the scales of slots with so many codes: [R], with blocks [R, n]."""
    return like_R.new_empty(len(like_R), num_scales(width, columns)) if columns else torch.empty_like(like_R)


def swiglu(
    hidden_R2F: Tensor,
    scores_R: Tensor,
    offsets_e: Tensor,
    kept: Tensor | None = None,
    base: Tensor | None = None,
    *,
    columns: int = WHOLE_ROW,
    activation: SwiGLU = PLAIN_SWIGLU,
) -> tuple[Tensor, Tensor, Tensor]:
    """Pre-activation [R, 2F] -> weighted activation [R, F] in e4m3, its scales [R], with blocks [R, F / 128], and the
    packed pre-activation.

    Slots past the last expert are not written. With `kept` and `base`, int64 [2] on the device, the pre-activation is
    written into `kept`, that of several layers, from slot base[1] on.
    """
    num_slots, num_features = hidden_R2F.shape[0], hidden_R2F.shape[1] // 2
    if kept is None:
        kept = hidden_R2F.new_empty(num_slots, packed_width(2 * num_features, columns), dtype=CODES)
    active_RF = hidden_R2F.new_empty(num_slots, num_features, dtype=CODES)
    scales = new_scales(scores_R, num_features, columns)
    block_f = min(triton.next_power_of_2(num_features), 2048)
    if num_slots:
        _fp8_swiglu_kernel[(min(num_slots, MAX_PROGRAMS),)](
            hidden_R2F, scores_R, offsets_e, kept, active_RF, scales, base, num_slots, offsets_e.numel(),
            F=num_features, ROW=kept.shape[1], BLOCK_F=block_f, COLUMNS=columns, LIMIT=activation.limit,
            ALPHA=activation.alpha, UP_OFFSET=activation.up_offset, num_warps=max(block_f // 512, 1),
        )  # fmt: skip
    return active_RF, scales, kept
