"""Back through SwiGLU and the score, and the activation anew, in one pass.

R slots · F hidden width

Physics: memory-bound, reads 3·R·F elements and writes 3·R·F. A thread block computes whole slots, so the gradient of a
score, ⟨dA, silu(gate)·up⟩, is complete where it is computed; the expert's output is never needed for it. Thread blocks
take slots in turn and stop after the last expert's, so that room for more slots is free.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from titan_moe.config.swiglu import PLAIN_SWIGLU, SwiGLU
from titan_moe.kernels.experts.activation import backward, forward
from titan_moe.kernels.experts.tiles import MAX_PROGRAMS, SLACK


@triton.jit(do_not_specialize=["num_slots"])
def _swiglu_backward_kernel(
    dactive_ptr, hidden_ptr, scores_ptr, offsets_ptr, dhidden_ptr, active_ptr, dscores_ptr, num_slots, num_experts,
    base_ptr, dactive_base_ptr, F: tl.constexpr, BLOCK_F: tl.constexpr, IS_ROUTED: tl.constexpr, SLACK: tl.constexpr,
    LIMIT: tl.constexpr, ALPHA: tl.constexpr, UP_OFFSET: tl.constexpr,
):  # fmt: skip
    if base_ptr is not None:  # products with a width keep their alignment
        hidden_ptr += tl.load(base_ptr + 1) * (2 * F)
    if dactive_base_ptr is not None:
        dactive_ptr += tl.load(dactive_base_ptr + 1) * F
    end = num_slots
    if IS_ROUTED:
        end = tl.load(offsets_ptr + num_experts - 1)
        num_slots = tl.minimum(num_slots, end + SLACK)
    for index in range(tl.program_id(0), num_slots, tl.num_programs(0)):
        slot = tl.cast(index, tl.int64)
        dhidden_ptrs, active_ptrs = dhidden_ptr + slot * 2 * F, active_ptr + slot * F
        if index < end:
            _swiglu_backward_slot(
                slot, dactive_ptr + slot * F, hidden_ptr + slot * 2 * F, scores_ptr, dhidden_ptrs, active_ptrs,
                dscores_ptr, F, BLOCK_F, IS_ROUTED, LIMIT, ALPHA, UP_OFFSET,
            )  # fmt: skip
        else:
            _clear(dhidden_ptrs, 2 * F, BLOCK_F)
            _clear(active_ptrs, F, BLOCK_F)


@triton.jit
def _swiglu_backward_slot(
    slot, dactive_ptr, hidden_ptr, scores_ptr, dhidden_ptr, active_ptr, dscores_ptr,
    F: tl.constexpr, BLOCK_F: tl.constexpr, IS_ROUTED: tl.constexpr,
    LIMIT: tl.constexpr, ALPHA: tl.constexpr, UP_OFFSET: tl.constexpr,
):  # fmt: skip
    score = 1.0
    if IS_ROUTED:
        score = tl.load(scores_ptr + slot)
    dscore = 0.0
    for first in range(0, F, BLOCK_F):
        features = first + tl.arange(0, BLOCK_F)
        keep = features < F
        gate = tl.load(hidden_ptr + features, mask=keep, other=0.0).to(tl.float32)
        up = tl.load(hidden_ptr + F + features, mask=keep, other=0.0).to(tl.float32)
        dactive = tl.load(dactive_ptr + features, mask=keep, other=0.0).to(tl.float32)
        silu, factor = forward(gate, up, LIMIT, ALPHA, UP_OFFSET)
        dscore += tl.sum(dactive * silu * factor, axis=0)
        tl.store(active_ptr + features, (silu * factor * score).to(active_ptr.dtype.element_ty), mask=keep)
        dgate, dup = backward(gate, up, dactive * score, LIMIT, ALPHA, UP_OFFSET)
        tl.store(dhidden_ptr + features, dgate.to(dhidden_ptr.dtype.element_ty), mask=keep)
        tl.store(dhidden_ptr + F + features, dup.to(dhidden_ptr.dtype.element_ty), mask=keep)
    if IS_ROUTED:
        tl.store(dscores_ptr + slot, dscore)


@triton.jit
def _clear(ptr, size: tl.constexpr, BLOCK: tl.constexpr):
    for first in range(0, size, BLOCK):
        features = first + tl.arange(0, BLOCK)
        tl.store(ptr + features, tl.zeros((BLOCK,), ptr.dtype.element_ty), mask=features < size)


def swiglu_backward(
    dactive_RF: Tensor,
    hidden_R2F: Tensor,
    scores_R: Tensor | None = None,
    offsets_e: Tensor | None = None,
    base: Tensor | None = None,
    dactive_base: Tensor | None = None,
    activation: SwiGLU = PLAIN_SWIGLU,
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Gradient of the pre-activation [R, 2F], weighted activation [R, F], gradient of the scores [R].

    Slots past the last expert are not written, but for zeros in the first `SLACK` of the first two. Without scores and
    offsets, rows are not routed: all are slots of score 1.

    With `base`, int64 [2] on the device, the pre-activation is that of several layers; this layer's begins at slot
    base[1]. `dactive_base` is the same of gradients of activations.
    """
    num_features = dactive_RF.shape[1]
    num_slots = len(dactive_RF) if scores_R is None else scores_R.numel()
    dhidden_R2F = hidden_R2F.new_empty(num_slots, 2 * num_features)
    active_RF = dactive_RF.new_empty(num_slots, num_features)
    dscores_R = None if scores_R is None else torch.empty_like(scores_R)
    if num_slots:
        _swiglu_backward_kernel[(min(num_slots, MAX_PROGRAMS),)](
            dactive_RF, hidden_R2F, scores_R, offsets_e, dhidden_R2F, active_RF, dscores_R,
            num_slots, 0 if offsets_e is None else offsets_e.numel(), base, dactive_base,
            F=num_features, BLOCK_F=min(triton.next_power_of_2(num_features), 1024), IS_ROUTED=offsets_e is not None,
            SLACK=SLACK, LIMIT=activation.limit, ALPHA=activation.alpha, UP_OFFSET=activation.up_offset, num_warps=4,
        )  # fmt: skip
    return dhidden_R2F, active_RF, dscores_R
