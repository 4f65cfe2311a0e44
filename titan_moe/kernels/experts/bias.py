"""Add to each slot the bias of its expert, times the slot's score.

R expert slots, sorted by expert · e experts that the rank computes · O width of a bias

Physics: memory-bound, reads and writes R·O elements. Backward sums the gradients of an expert's slots as a product with
a matrix of scores and zeros, 2·e·R·O FLOPs: e / I of the GEMM of input width I before it, and deterministic. Gradients
of slots past the last expert are undefined and masked. Backward keeps all arguments but y. Plain PyTorch: a compiled
region fuses forward with the next operation.
"""

from typing import Any

import torch
from torch import Tensor

from titan_moe.kernels.registry import Kernel, register


class _AddBias(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, y_RO: Tensor, bias_eO: Tensor, scores_R: Tensor, offsets_e: Tensor) -> Tensor:
        ctx.save_for_backward(bias_eO, scores_R, offsets_e)
        bias_RO = bias_eO[_experts_of_slots(offsets_e, len(y_RO))]
        # a copy: compiled torch 2.11 loses the gradient of a Function that returns an alias of what it computed
        return (y_RO + bias_RO * scores_R[:, None]).to(y_RO.dtype, copy=True)

    @staticmethod
    def backward(ctx: Any, grad_RO: Tensor) -> tuple[Tensor | None, ...]:
        bias_eO, scores_R, offsets_e = ctx.saved_tensors
        experts_R = _experts_of_slots(offsets_e, len(grad_RO))
        is_slot_R = torch.arange(len(grad_RO), device=offsets_e.device) < offsets_e[-1]
        slot_grad_RO = torch.where(is_slot_R[:, None], grad_RO, 0)
        dbias_eO, dscores_R = None, None
        if ctx.needs_input_grad[1]:
            is_own_eR = torch.arange(len(bias_eO), device=offsets_e.device)[:, None] == experts_R
            weight_eR = torch.where(is_own_eR & is_slot_R, scores_R, 0)
            dbias_eO = (weight_eR.to(grad_RO.dtype) @ slot_grad_RO).to(bias_eO.dtype)
        if ctx.needs_input_grad[2]:
            dscores_R = (slot_grad_RO.to(scores_R.dtype) * bias_eO[experts_R]).sum(1)
        return grad_RO, dbias_eO, dscores_R, None


def _experts_of_slots(offsets_e: Tensor, num_slots: int) -> Tensor:
    """The expert of each slot; the last expert for slots past its end."""
    slots_R = torch.arange(num_slots, device=offsets_e.device, dtype=offsets_e.dtype)
    return torch.searchsorted(offsets_e, slots_R, right=True).clamp(max=len(offsets_e) - 1)


def add_bias(y_RO: Tensor, bias_eO: Tensor, scores_R: Tensor, offsets_e: Tensor) -> Tensor:
    """-> [R, O] in y's dtype, rounded once; slots past the last expert are undefined."""
    return _AddBias.apply(y_RO, bias_eO, scores_R, offsets_e)


def add_bias_reference(y_RO: Tensor, bias_eO: Tensor, scores_R: Tensor, offsets_e: Tensor) -> Tensor:
    """The definition, expert by expert on the host."""
    parts, begin = [], 0
    for bias_O, end in zip(bias_eO, offsets_e.tolist(), strict=True):
        parts.append(y_RO[begin:end] + bias_O * scores_R[begin:end, None])
        begin = end
    return torch.cat([*parts, y_RO[begin:]])


register(Kernel("add_bias", add_bias, add_bias_reference))
