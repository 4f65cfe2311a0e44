"""The expert MLP in Triton, around grouped GEMMs.

S rows · R expert slots, sorted by expert · K choices a row · e experts that the rank computes · D width of a row ·
F hidden width

Physics: 6·R·D·F FLOPs forward and twice that backward. Unfused, six to eight passes over R·D or R·F elements stand
beside the GEMMs. Here rows are gathered inside the GEMMs that read them, SwiGLU is the epilogue of the first, and what
remains are the two gather-sums and one pass back through SwiGLU. Kept for backward are x and the pre-activation,
2·S·D + 4·R·F bytes in bf16; no permuted row, no activation, no expert output. After SonicMoE (arXiv:2512.14080) and
Megatron's memory-efficient permutation (arXiv:2603.07685 section 4.1.2). The reference is the composite of
composite_mlp.py, the sequence of stages.py.

The operations take named tuples as lists of their tensors.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.utils.flop_counter import register_flop_formula

from titan_moe.kernels.delayed_weight_grads import Delay
from titan_moe.kernels.device import refuse_cpu
from titan_moe.kernels.experts import stages
from titan_moe.kernels.experts.composite_mlp import CompositeMLP, ExpertMLP
from titan_moe.kernels.experts.grouped_mm import grouped_mm_reference
from titan_moe.kernels.experts.slot_sum import slot_sum
from titan_moe.kernels.experts.slots import ExpertSlots
from titan_moe.kernels.experts.tiles import plan_tiles
from titan_moe.kernels.experts.up import TILE_ROWS
from titan_moe.kernels.experts.weights import MATRICES, ExpertParameter, ExpertWeights, Tensors
from titan_moe.kernels.permute.rows import place_scores
from titan_moe.kernels.registry import Kernel, register


@torch.library.custom_op("titan_moe::expert_mlp", mutates_args=())
def _forward(x_SD: Tensor, slots: Tensors, weights: Tensors) -> tuple[Tensor, Tensor]:
    """y_SD, and the pre-activation that backward needs."""
    refuse_cpu(x_SD, "experts", "fused", "grouped_mm")
    at, of = ExpertSlots(*slots), ExpertWeights.of(weights)
    tiles = plan_tiles(at.offsets_e, at.rows_R.numel(), TILE_ROWS)
    hidden_R2F, active_RF = stages.up(x_SD, at, of, tiles)
    return slot_sum(stages.down(active_RF, at, of), at.slots_SK), hidden_R2F


@_forward.register_fake
def _(x_SD: Tensor, slots: Tensors, weights: Tensors) -> tuple[Tensor, Tensor]:
    num_slots, hidden = ExpertSlots(*slots).rows_R.shape[0], ExpertWeights.of(weights).down.own.shape[2]
    return torch.empty_like(x_SD), x_SD.new_empty(num_slots, 2 * hidden)


@torch.library.custom_op("titan_moe::expert_mlp_dx", mutates_args=())
def _backward(
    dy_SD: Tensor, slots: Tensors, weights: Tensors, hidden_R2F: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """dx_SD, dscores_R, and what the weight gradients need: dhidden_R2F, active_RF."""
    at, of = ExpertSlots(*slots), ExpertWeights.of(weights)
    tiles = plan_tiles(at.offsets_e, at.rows_R.numel(), TILE_ROWS)
    dhidden_R2F, active_RF, dscores_R = stages.d_down(dy_SD, at, of, hidden_R2F, tiles)
    return slot_sum(stages.d_up(dhidden_R2F, at, of), at.slots_SK), dscores_R, dhidden_R2F, active_RF


@_backward.register_fake
def _(dy_SD: Tensor, slots: Tensors, weights: Any, hidden_R2F: Tensor) -> tuple[Tensor, ...]:
    active_RF = hidden_R2F.new_empty(hidden_R2F.shape[0], hidden_R2F.shape[1] // 2)
    dscores_R = torch.empty_like(ExpertSlots(*slots).scores_R)
    return torch.empty_like(dy_SD), dscores_R, torch.empty_like(hidden_R2F), active_RF


_dw = torch.library.custom_op("titan_moe::expert_mlp_dw", stages.dw, mutates_args=())
"""An operation of its own, so that a schedule may run it later."""


@_dw.register_fake
def _(
    dy_SD: Tensor, x_SD: Tensor, rows_R: Any, offsets_e: Tensor, _: Any, active_RF: Tensor, *bases: Any
) -> tuple[Tensor, ...]:
    num_experts, hidden, width = offsets_e.shape[0], active_RF.shape[1], x_SD.shape[1]
    return x_SD.new_empty(num_experts, 2, hidden, width), x_SD.new_empty(num_experts, width, hidden)


class _FusedExpertMLP(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, delay: Delay | None, *tensors: Tensor) -> Tensor:
        # two parameters and the rest: Dynamo of torch 2.11 drops `ctx` where it counts as many arguments as parameters
        x_SD, rows_R, slots_SK, scores_R, offsets_e, *weights = tensors
        slots = [rows_R, slots_SK, scores_R, offsets_e]
        y_SD, hidden_R2F = _forward(x_SD, slots, weights)
        ctx.delay = delay
        ctx.save_for_backward(x_SD, hidden_R2F, *slots, *weights)
        return y_SD

    @staticmethod
    def backward(ctx: Any, dy_SD: Tensor) -> tuple[Tensor | None, ...]:
        x_SD, hidden_R2F, rows_R, slots_SK, scores_R, offsets_e, *weights = ctx.saved_tensors
        slots, dy_SD = [rows_R, slots_SK, scores_R, offsets_e], dy_SD.contiguous()
        dx_SD, dscores_R, dhidden_R2F, active_RF = _backward(dy_SD, slots, weights, hidden_R2F)
        grads: list[Tensor | None] = [None] * len(weights)
        if any(ctx.needs_input_grad[6:]):
            operands = dy_SD, x_SD.detach(), rows_R, offsets_e, dhidden_R2F, active_RF  # without x's graph
            if ctx.delay is None:
                grads[:] = ExpertWeights.of(weights).split(_dw(*operands))
            else:
                ctx.delay(partial(_dw, *operands))
        return None, dx_SD, None, None, dscores_R, None, *grads


def fused_expert_mlp(x_SD: Tensor, slots: ExpertSlots, weights: ExpertWeights, delay: Delay | None = None) -> Tensor:
    """The MLP in Triton: bf16 on a GPU (fp32 in the interpreter).

    `delay`, if given, takes over the computation of the weight gradients in backward, whose results are None; weights
    have no clones then.

    Raises: ValueError for experts with biases.
    """
    slots = slots._replace(scores_R=slots.scores_R.contiguous())
    return _FusedExpertMLP.apply(delay, x_SD.contiguous(), *slots, *matrices(weights))


def matrices(weights: ExpertWeights) -> list[Tensor]:
    """What the operations take of weights.

    Raises: ValueError for experts with biases.
    """
    if weights.names() != MATRICES:
        raise ValueError(f'fused experts have no parameters but {MATRICES}, not {weights.names()}; take "grouped_mm"')
    own, clones = weights.tensors()[:2], weights.tensors()[2:]  # which are joined anyway
    return [*(weight.contiguous() for weight in own), *clones]


@register_flop_formula([torch.ops.titan_moe.expert_mlp, torch.ops.titan_moe.expert_mlp_dx])
def _count(rows: Any, slots: Any, weights: Any, *_: Any, **__: Any) -> int:
    return stages.flops_of_a_pass(ExpertSlots(*slots).rows_R[0], ExpertWeights.of(weights).gate_up.own)


@register_flop_formula(torch.ops.titan_moe.expert_mlp_dw)
def _count_dw(dy: Any, x: Any, rows: Any, offsets: Any, dhidden: Any, active: Any, *_: Any, **__: Any) -> int:
    return stages.flops_of_a_pass(rows[0], (offsets[0], 2, active[1], x[1]))


def with_scores_first(expert_mlp: ExpertMLP) -> Callable[..., Tensor]:
    """The MLP of loose tensors, the differentiable ones first, scores as a router gives them."""

    def op(x_SD: Tensor, scores_SK: Tensor, gate_up: Tensor, down: Tensor, *plan: Tensor) -> Tensor:
        rows_R, slots_SK, offsets_e = plan
        scores_R = place_scores(scores_SK, slots_SK, rows_R.numel())
        slots = ExpertSlots(rows_R, slots_SK, scores_R, offsets_e)
        return expert_mlp(x_SD, slots, ExpertWeights(ExpertParameter(gate_up), ExpertParameter(down)))

    return op


register(
    Kernel(
        "fused_expert_mlp",
        with_scores_first(fused_expert_mlp),
        with_scores_first(CompositeMLP(grouped_mm_reference)),
        needs_triton=True,
    )
)
