"""The fused expert MLP, with weight gradients that are computed when autograd comes to the weights, not to the rows.

S rows · R expert slots, sorted by expert · K choices a row · e local experts · D width of a row · F hidden width

Half of the FLOPs of an expert's backward make weight gradients, for which nobody waits, while the gradients of rows
have a way to go (after zero-bubble schedules, arXiv:2401.10241, and Megatron's delayed weight gradients,
arXiv:2603.07685). Autograd takes up first what was made last. So weights that are made ready before the rows have
arrived have their turn in backward after the gradients of rows have left for home, and their gradients are computed
while these travel: the same operations on the same numbers as in fused_expert_mlp.py, in another order.

Physics: kernels that move rows find room beside Triton's of weight gradients. As compiled for an H200, a program of
these takes 47,000 of a multiprocessor's 65,536 registers, of those 8,000 to 12,000 and no shared memory; and these end
after 0.1 to 0.2 ms, where kernels of one program a multiprocessor end with the GEMM: wide experts, whose weight
gradients are PyTorch's, may hide nothing. On 2 H200s, where little is sent, steps took 0.6 % less to 1 % more.
"""

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from titan_moe.kernels.experts.composite_mlp import ExpertMLP
from titan_moe.kernels.experts.fused_mlp import (
    expert_mlp_backward,
    expert_mlp_forward,
    expert_mlp_weight_grads,
    fused_expert_mlp,
)

Gradients = Callable[[], tuple[Tensor, Tensor]]
"""Computes those of gate_up and down."""


class DelayedWeightGrads:
    """Weight gradients that are still to be computed."""

    def __init__(self) -> None:
        self.compute: Gradients | None = None
        self.is_used = False

    def pay(self) -> tuple[Tensor, Tensor]:
        compute, self.compute = self.compute, None
        assert compute is not None, "the rows' backward comes before the weights'"
        return compute()


class _MakeReady(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, gate_up: Tensor, down: Tensor, debt: DelayedWeightGrads) -> tuple[Tensor, Tensor]:
        ctx.debt = debt
        return gate_up.view_as(gate_up), down.view_as(down)

    @staticmethod
    def backward(ctx: Any, *nothing: Tensor) -> tuple[Tensor, Tensor, None]:
        return *ctx.debt.pay(), None


class _ExpertMLP(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x_SD: Tensor,
        rows_R: Tensor,
        slots_SK: Tensor,
        scores_R: Tensor,
        offsets_e: Tensor,
        gate_up_e2FD: Tensor,
        down_eDF: Tensor,
        debt: DelayedWeightGrads,
    ) -> Tensor:
        args = (x_SD, rows_R, slots_SK, scores_R, offsets_e, gate_up_e2FD, down_eDF)
        y_SD, hidden_R2F = expert_mlp_forward(*args)
        ctx.debt = debt
        ctx.save_for_backward(*args, hidden_R2F)
        return y_SD

    @staticmethod
    def backward(ctx: Any, dy_SD: Tensor) -> tuple[Tensor | None, ...]:
        x_SD, rows_R, slots_SK, scores_R, offsets_e, gate_up, down, hidden_R2F = ctx.saved_tensors
        dy_SD = dy_SD.contiguous()
        dx_SD, dscores_R, dhidden_R2F, active_RF = expert_mlp_backward(
            dy_SD, rows_R, slots_SK, scores_R, offsets_e, gate_up, down, hidden_R2F
        )
        if not any(ctx.needs_input_grad[5:7]):
            return dx_SD, None, None, dscores_R, None, None, None, None
        ctx.debt.compute = partial(expert_mlp_weight_grads, dy_SD, x_SD, rows_R, offsets_e, dhidden_R2F, active_RF)
        # autograd asks for gradients of these shapes to go on; nobody reads them
        nothing = (weight.new_zeros(()).expand_as(weight) for weight in (gate_up, down))
        return dx_SD, None, None, dscores_R, None, *nothing, None


class DelayedWeights(NamedTuple):
    """Weights for one use. Their gradients are computed after those of all that is made later than they are."""

    gate_up: Tensor
    down: Tensor
    debt: DelayedWeightGrads

    def serve(self, x_SD: Tensor, rows_R: Tensor, slots_SK: Tensor, scores_R: Tensor, offsets_e: Tensor) -> Tensor:
        """`fused_expert_mlp`: -> [S, D].

        A backward that stops at the rows leaves their gradients owed, and held until the graph is gone.

        Raises: RuntimeError where they serve for the second time.
        """
        if self.debt.is_used:
            raise RuntimeError("weights that were made ready serve once: make others ready for other rows")
        self.debt.is_used = True
        return _ExpertMLP.apply(x_SD.contiguous(), rows_R, slots_SK, scores_R.contiguous(), offsets_e, *self)


def can_delay(mlp: ExpertMLP) -> bool:
    """Whether this is how experts with that MLP serve, too."""
    return mlp is fused_expert_mlp


def delay_weight_grads(gate_up: Tensor, down: Tensor) -> DelayedWeights:
    """Shapes: gate_up [e, 2, F, D], down [e, D, F]."""
    debt = DelayedWeightGrads()
    gate_up, down = _MakeReady.apply(gate_up.contiguous(), down.contiguous(), debt)
    return DelayedWeights(gate_up, down, debt)
