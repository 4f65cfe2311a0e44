"""Weight gradients of the fused expert MLP that are computed when autograd comes to the weights, not to the rows.

Half of the FLOPs of an expert's backward make weight gradients, which nothing in backward waits for, while the
gradients of rows still have to be sent (after zero-bubble schedules, arXiv:2401.10241, and Megatron's delayed weight
gradients, arXiv:2603.07685). Autograd takes up first what was made last. So weights that are passed through
`delay_weight_grads` before the rows have arrived come up in backward after the gradients of rows have been sent: the
same operations on the same numbers as in fused_mlp.py, in another order.

Physics: kernels that move rows find room beside Triton's of weight gradients. As compiled for an H200, a thread block
of these takes 47,000 of a multiprocessor's 65,536 registers, of those 8,000 to 12,000 and no shared memory; and these
end after 0.1 to 0.2 ms, where kernels of one thread block a multiprocessor end with the GEMM: weight gradients of wide
experts, which are PyTorch's, may hide nothing.
"""

from typing import Any, NamedTuple

import torch
from torch import Tensor

from titan_moe.kernels.experts.composite_mlp import ExpertMLP
from titan_moe.kernels.experts.fused_mlp import WeightGrads, fused_expert_mlp, matrices
from titan_moe.kernels.experts.slots import ExpertSlots
from titan_moe.kernels.experts.weights import ExpertWeights


class DelayedWeightGrads:
    """Weight gradients that are still to be computed."""

    def __init__(self) -> None:
        self.pending: WeightGrads | None = None
        self.is_used = False

    def delay(self, weight_grads: WeightGrads) -> None:
        """Take them over from the backward of the MLP."""
        self.pending = weight_grads

    def compute(self) -> tuple[Tensor, Tensor]:
        """Compute them, and free what they were kept for."""
        weight_grads, self.pending = self.pending, None
        assert weight_grads is not None, "the rows' backward comes before the weights'"
        return weight_grads()


class _Delayed(torch.autograd.Function):
    """Identity, whose backward computes the gradients that the MLP has left."""

    @staticmethod
    def forward(ctx: Any, grads: DelayedWeightGrads, *weights: Tensor) -> tuple[Tensor, ...]:
        ctx.grads = grads
        return tuple(weight.view_as(weight) for weight in weights)

    @staticmethod
    def backward(ctx: Any, *unread: Tensor) -> tuple[Tensor | None, ...]:
        return None, *ctx.grads.compute()


class DelayedWeights(NamedTuple):
    """Weights for one use. Their gradients are computed after those of all that is made later than they are."""

    weights: ExpertWeights
    grads: DelayedWeightGrads

    def mlp(self, x_SD: Tensor, slots: ExpertSlots, weights: ExpertWeights) -> Tensor:
        """`fused_expert_mlp` with these weights.

        A backward that stops at the rows leaves their gradients uncomputed, and what they need until the graph is gone.

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
    """Pass the weights of own experts, without clones, through autograd at the time that counts."""
    grads = DelayedWeightGrads()
    return DelayedWeights(ExpertWeights.of(_Delayed.apply(grads, *matrices(weights))), grads)
