"""Delayed weight gradients of the expert MLP in Triton: computed while gradients of rows are sent, or after a backward.

Half of the FLOPs of an expert's backward are weight gradients, for which nothing in backward waits (zero-bubble
schedules, arXiv:2401.10241; Megatron's delayed weight gradients, arXiv:2603.07685). Autograd runs in reverse order. So
weights that pass through `delay_weight_grads` before the rows arrive get their gradients after those of rows are sent:
the operations of fused_mlp.py in another order, bit for bit. Where a schedule splits a backward, they are computed
after it (kernels/delayed_weight_grads.py).

Physics: a thread block of Triton's weight gradients leaves room on its multiprocessor for one that sends rows, and ends
soon (tools/results). PyTorch's kernels, used for wide experts, have one thread block a multiprocessor until the GEMM
ends, and may hide nothing.
"""

from typing import Any, NamedTuple

import torch
from torch import Tensor

from titan_moe.kernels.delayed_weight_grads import Delay, DelayedWeightGrads, WeightGradQueue
from titan_moe.kernels.experts.composite_mlp import ExpertMLP
from titan_moe.kernels.experts.fp8.mlp import FP8_MLPS
from titan_moe.kernels.experts.fused_mlp import fused_expert_mlp, matrices
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

    def mlp(self, x_SD: Tensor, slots: ExpertSlots, weights: ExpertWeights) -> Tensor:
        """`fused_expert_mlp` with these weights.

        A backward that stops at the rows does not compute their gradients, and keeps their inputs with the graph.

        Raises: RuntimeError at the second use.
        """
        if self.grads.is_used:
            raise RuntimeError("delayed weights can be used once: call delay_weight_grads again for other rows")
        self.grads.is_used = True
        return fused_expert_mlp(x_SD, slots, weights, self.grads.delay)


def can_delay(mlp: ExpertMLP) -> bool:
    """Whether an MLP has weight gradients of its own to delay."""
    return mlp is fused_expert_mlp


def delay_weight_grads(weights: ExpertWeights) -> DelayedWeights:
    """Delay the gradients of these weights, which must not include clones."""
    grads = DelayedWeightGrads()
    return DelayedWeights(ExpertWeights.of(_Delayed.apply(grads, *matrices(weights))), grads)


class QueuedMLP:
    """An MLP in Triton, in compute's dtype or in fp8, whose weight gradients are delayed inside
    `WeightGradQueue.delaying`."""

    def __init__(self, mlp: ExpertMLP, queue: WeightGradQueue) -> None:
        """Raises: ValueError for another MLP."""
        if not can_queue(mlp):
            raise ValueError("only experts in Triton have weight gradients of their own to delay")
        self.mlp: Any = mlp
        self.queue = queue

    def __call__(self, x_SD: Tensor, slots: ExpertSlots, weights: ExpertWeights) -> Tensor:
        weights, delay = self.delay(weights)
        return self.mlp(x_SD, slots, weights, delay)

    def delay(self, weights: ExpertWeights) -> tuple[ExpertWeights, Delay | None]:
        """For an operation that reads these weights: stand-ins to read, and what takes over their gradients; the
        weights and None where the operation computes them."""
        pending = self.queue.pending
        if pending is None:
            return weights, None
        tensors, delay = pending.delay(*weights.tensors())
        return ExpertWeights.of(tensors, weights.names())._replace(codes=weights.codes), delay


def can_queue(mlp: ExpertMLP) -> bool:
    """Whether `QueuedMLP` takes an MLP."""
    return can_delay(mlp) or mlp in FP8_MLPS
