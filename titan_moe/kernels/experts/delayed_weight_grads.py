"""Delayed weight gradients of the expert MLP in Triton: computed while gradients of rows are sent, or after a backward.

Half of the FLOPs of an expert's backward are weight gradients, for which nothing in backward waits (zero-bubble
schedules, arXiv:2401.10241; Megatron's delayed weight gradients, arXiv:2603.07685). Autograd runs in reverse order. So
weights that pass through `delay_weight_grads` before the rows arrive get their gradients after those of rows are sent:
the operations of fused_mlp.py in another order, bit for bit. Where a schedule splits a backward, they are computed
after it (`FusedMLP.queue`).

Physics: a thread block of Triton's weight gradients leaves room on its multiprocessor for one that sends rows, and ends
soon (tools/results). PyTorch's kernels, used for wide experts, have one thread block a multiprocessor until the GEMM
ends, and may hide nothing.
"""

from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from titan_moe.kernels.delayed_weight_grads import DelayedWeightGrads
from titan_moe.kernels.experts.composite_mlp import ExpertMLP
from titan_moe.kernels.experts.fused_mlp import FusedMLP, fused_expert_mlp
from titan_moe.kernels.experts.plain import PLAIN, PlainFormat
from titan_moe.kernels.experts.slots import ExpertSlots
from titan_moe.kernels.experts.weights import ExpertWeights


class _Delayed(torch.autograd.Function):
    """Identity, whose backward computes the pending gradients."""

    @staticmethod
    def forward(ctx: Any, grads: DelayedWeightGrads, *weights: Tensor) -> tuple[Tensor, ...]:
        ctx.grads = grads
        ctx.set_materialize_grads(False)  # the MLP returns None
        return tuple(weight.view_as(weight) for weight in weights)

    @staticmethod
    def backward(ctx: Any, *unread: None) -> tuple[Tensor | None, ...]:
        return None, *ctx.grads.compute()


class DelayedWeights(NamedTuple):
    """Weights for one use, whose gradients are computed after those of everything created later."""

    weights: ExpertWeights
    grads: DelayedWeightGrads
    fused: FusedMLP

    def mlp(self, x_SD: Tensor, slots: ExpertSlots, weights: ExpertWeights) -> Tensor:
        """The fused MLP with these weights.

        A backward that stops at the rows does not compute their gradients, and keeps their inputs with the graph.

        Raises: RuntimeError at the second use.
        """
        if self.grads.is_used:
            raise RuntimeError("delayed weights can be used once: call delay_weight_grads again for other rows")
        self.grads.is_used = True
        return self.fused(x_SD, slots, weights, self.grads)


def can_delay(mlp: ExpertMLP) -> bool:
    """Whether an MLP has weight gradients of its own to delay."""
    if not isinstance(mlp, FusedMLP) or not isinstance(mlp.format, PlainFormat):
        return False
    return replace(mlp, format=PLAIN) == fused_expert_mlp


def delay_weight_grads(weights: ExpertWeights, mlp: ExpertMLP = fused_expert_mlp) -> DelayedWeights:
    """Delay the gradients of these weights of an MLP that can, which must not include clones."""
    assert isinstance(mlp, FusedMLP)
    grads = DelayedWeightGrads()
    tensors = _Delayed.apply(grads, *mlp.format.operands(weights))
    return DelayedWeights(weights.with_tensors(tensors), grads, mlp)
