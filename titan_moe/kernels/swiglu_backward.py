"""Back through the score and SwiGLU, and the weighted activation anew, in one pass.

R expert slots · F hidden width

Physics: memory-bound, reads 3·R·F elements and writes 3·R·F. A program owns a whole slot, so the gradient of its score,
⟨dA, silu(gate)·up⟩, is complete where it is computed; the expert's output is never needed for it.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor


@triton.jit
def _swiglu_backward_kernel(
    dactive_ptr, hidden_ptr, scores_ptr, offsets_ptr, dhidden_ptr, active_ptr, dscores_ptr, num_experts,
    F: tl.constexpr, BLOCK_F: tl.constexpr,
):  # fmt: skip
    slot = tl.program_id(0).to(tl.int64)
    if slot >= tl.load(offsets_ptr + num_experts - 1):
        return
    score = tl.load(scores_ptr + slot)
    dscore = 0.0
    for first in range(0, F, BLOCK_F):
        features = first + tl.arange(0, BLOCK_F)
        keep = features < F
        gate = tl.load(hidden_ptr + slot * 2 * F + features, mask=keep, other=0.0).to(tl.float32)
        up = tl.load(hidden_ptr + slot * 2 * F + F + features, mask=keep, other=0.0).to(tl.float32)
        dactive = tl.load(dactive_ptr + slot * F + features, mask=keep, other=0.0).to(tl.float32)
        sigmoid = tl.sigmoid(gate)
        silu = gate * sigmoid
        dscore += tl.sum(dactive * silu * up, axis=0)
        tl.store(active_ptr + slot * F + features, (silu * up * score).to(active_ptr.dtype.element_ty), mask=keep)
        dactive *= score
        dgate = dactive * up * (sigmoid + silu * (1 - sigmoid))
        tl.store(dhidden_ptr + slot * 2 * F + features, dgate.to(dhidden_ptr.dtype.element_ty), mask=keep)
        tl.store(
            dhidden_ptr + slot * 2 * F + F + features, (dactive * silu).to(dhidden_ptr.dtype.element_ty), mask=keep
        )
    tl.store(dscores_ptr + slot, dscore)


def swiglu_backward(
    dactive_RF: Tensor, hidden_R2F: Tensor, scores_R: Tensor, offsets_e: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradient of the pre-activation [R, 2F], weighted activation [R, F], gradient of the scores [R].

    Slots past the last expert are not written.
    """
    num_slots, num_features = dactive_RF.shape
    dhidden_R2F, active_RF = torch.empty_like(hidden_R2F), torch.empty_like(dactive_RF)
    dscores_R = torch.empty_like(scores_R)
    if num_slots:
        _swiglu_backward_kernel[(num_slots,)](
            dactive_RF, hidden_R2F, scores_R, offsets_e, dhidden_R2F, active_RF, dscores_R, offsets_e.numel(),
            F=num_features, BLOCK_F=min(triton.next_power_of_2(num_features), 1024), num_warps=4,
        )  # fmt: skip
    return dhidden_R2F, active_RF, dscores_R
