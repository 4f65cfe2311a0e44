"""The expert MLP in Triton of frozen weights, with low-rank factors beside them (LoRA, arXiv:2106.09685).

S rows · R expert slots, sorted by expert · e experts that the rank computes · D width of a row · F hidden width ·
r rank

Physics: the passes of passes.py without `dw`, and 18·R·r·(D + F) FLOPs, bound by memory. Products with the first
factors, and gradients of factors, read rows and activations or their gradients once each (low_rank.py), or are made
where these are (low_rank_backward.py). Rows are gathered while they are read, 2·R·D bytes that mostly come from the L2
cache. Products with the second factors are added to the sums of the GEMMs of weights, so neither pre-activations,
results of slots nor gradients are written or read for them. Kept for backward are x, the pre-activation and a slot's
products with A, 2·S·D + 2·R·(2·F + 3·r) bytes in bf16. Weights may be codes with scales: the numbers of one are made
for its product (kernels/formats/stored.py). The host reads nothing, and sizes are static. The reference is
adapted_mlp.py with GEMMs of grouped_mm.py.
"""

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.flop_counter import register_flop_formula

from titan_moe.kernels.device import refuse_cpu
from titan_moe.kernels.experts.format import ExpertFormat
from titan_moe.kernels.experts.formats import FORMATS
from titan_moe.kernels.experts.gather_mm import gather_mm
from titan_moe.kernels.experts.low_rank import low_products, low_weight_grads
from titan_moe.kernels.experts.low_rank_backward import swiglu_backward_with_factors
from titan_moe.kernels.experts.passes import flops_of_a_pass
from titan_moe.kernels.experts.slot_mm import slot_mm
from titan_moe.kernels.experts.slot_sum import slot_sum
from titan_moe.kernels.experts.slots import ExpertSlots
from titan_moe.kernels.experts.swiglu_backward import swiglu_backward
from titan_moe.kernels.experts.tiles import plan_tiles
from titan_moe.kernels.experts.up import TILE_ROWS, expert_up
from titan_moe.kernels.experts.weights import MATRICES, ExpertWeights, Tensors
from titan_moe.kernels.formats.stored import numbers_of


def _number(weights: Tensors, index: int, dtype: torch.dtype) -> Tensor:
    """Gate and up, or down, in compute's dtype; of codes for one product."""
    if len(weights) == len(MATRICES):
        return weights[index]
    return numbers_of(weights[index], weights[index + len(MATRICES)], dtype)


@torch.library.custom_op("titan_moe::adapted_mlp", mutates_args=())
def _forward(
    x_SD: Tensor, slots: Tensors, weights: Tensors, factors: Tensors, scale: float, format: str
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """y_SD, the pre-activation, and products with A of gate and up, and of down, times the scale (empty without
    factors)."""
    refuse_cpu(x_SD, "experts", "fused", "grouped_mm")
    rows_R, slots_SK, scores_R, offsets_e = slots
    tiles, activation = plan_tiles(offsets_e, rows_R.numel(), TILE_ROWS), FORMATS[format].activation
    low_up, low_down = (x_SD.new_empty(rows_R.numel(), 0) for _ in range(2))
    if factors:
        low_up = low_products(x_SD, _side_by_side(factors[0]), tiles, scale, rows_R=rows_R)
    hidden, active_RF = expert_up(
        x_SD, rows_R, scores_R, _number(weights, 0, x_SD.dtype), tiles,
        low=(low_up, factors[1]) if factors else None, activation=activation,
    )  # fmt: skip
    if factors:
        low_down = low_products(active_RF, _side_by_side(factors[2]), tiles, scale)
        down = _number(weights, 1, x_SD.dtype).mT
        y_RD = slot_mm(active_RF, down, tiles, low=(low_down, factors[3].mT))
    else:
        y_RD = F.grouped_mm(active_RF, _number(weights, 1, x_SD.dtype).mT, offs=offsets_e)
    return slot_sum(y_RD, slots_SK), hidden, low_up, low_down


def _side_by_side(a: Tensor) -> Tensor:
    """A of one or several matrices as one of a row, [e, 1, I, M·r]."""
    return a.flatten(1, -2)[:, None].mT


@_forward.register_fake
def _(
    x_SD: Tensor, slots: Tensors, weights: Tensors, factors: Tensors, scale: float, format: str
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    num_slots, rank = slots[0].shape[0], factors[3].shape[-1] if factors else 0
    sizes = 2 * weights[1].shape[2], 2 * rank, rank
    hidden, low_up, low_down = (x_SD.new_empty(num_slots, size) for size in sizes)
    return torch.empty_like(x_SD), hidden, low_up, low_down


@torch.library.custom_op("titan_moe::adapted_mlp_backward", mutates_args=())
def _backward(
    dy_SD: Tensor, x_SD: Tensor, slots: Tensors, weights: Tensors, factors: Tensors, hidden: Tensor, low_up: Tensor,
    low_down: Tensor, scale: float, format: str,
) -> list[Tensor]:  # fmt: skip
    """dx_SD, dscores_R, and the gradients of factors."""
    rows_R, slots_SK, scores_R, offsets_e = slots
    tiles, activation = plan_tiles(offsets_e, rows_R.numel(), TILE_ROWS), FORMATS[format].activation
    if not factors:
        dactive_RF = gather_mm(dy_SD, rows_R, _number(weights, 1, dy_SD.dtype), tiles)
        dhidden, _, dscores_R = swiglu_backward(dactive_RF, hidden, scores_R, offsets_e, activation=activation)
        dx_RD = F.grouped_mm(dhidden, _number(weights, 0, dy_SD.dtype).flatten(1, 2), offs=offsets_e)
        assert dscores_R is not None, "slots are routed"
        return [slot_sum(dx_RD, slots_SK), dscores_R]
    a_up, b_up, a_down, b_down = factors
    dlow_down = low_products(dy_SD, b_down[:, None], tiles, scale, rows_R=rows_R)
    dactive_RF = gather_mm(dy_SD, rows_R, _number(weights, 1, dy_SD.dtype), tiles, low=(dlow_down, a_down))
    dhidden, dscores_R, da_down, db_up = swiglu_backward_with_factors(
        dactive_RF, hidden, scores_R, offsets_e, dlow_down, low_up, activation
    )
    del dactive_RF
    dlow_up = low_products(dhidden, b_up, tiles, scale)
    da_up = low_weight_grads(dlow_up, x_SD, _side_by_side(a_up), offsets_e, rows_R=rows_R).mT.view_as(a_up)
    db_down = low_weight_grads(low_down, dy_SD, b_down[:, None], offsets_e, rows_R=rows_R).view_as(b_down)
    gate_up = _number(weights, 0, dy_SD.dtype).flatten(1, 2)
    dx_RD = slot_mm(dhidden, gate_up, tiles, low=(dlow_up, a_up.flatten(1, 2)))
    return [slot_sum(dx_RD, slots_SK), dscores_R, da_up, db_up, da_down, db_down]


@_backward.register_fake
def _(
    dy_SD: Tensor, x_SD: Tensor, slots: Tensors, weights: Any, factors: Tensors, hidden: Any, low_up: Any,
    low_down: Any, scale: float, format: str,
) -> list[Tensor]:  # fmt: skip
    return [torch.empty_like(x_SD), torch.empty_like(slots[2]), *map(torch.empty_like, factors)]


class _AdaptedFusedMLP(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, format: str, scale: float, num_weights: int, *tensors: Tensor) -> Tensor:
        x_SD, *slots = tensors[:5]
        weights, factors = tensors[5 : 5 + num_weights], tensors[5 + num_weights :]
        y_SD, *kept = _forward(x_SD, slots, weights, factors, scale, format)
        ctx.format, ctx.scale, ctx.num_weights = format, scale, num_weights
        ctx.save_for_backward(*kept, *tensors)
        return y_SD

    @staticmethod
    def backward(ctx: Any, dy_SD: Tensor) -> tuple[Tensor | None, ...]:
        hidden, low_up, low_down, x_SD, *tensors = ctx.saved_tensors
        slots, weights, factors = tensors[:4], tensors[4 : 4 + ctx.num_weights], tensors[4 + ctx.num_weights :]
        operands = dy_SD.contiguous(), x_SD, slots, weights, factors, hidden, low_up, low_down
        dx_SD, dscores_R, *grads = _backward(*operands, ctx.scale, ctx.format)
        return None, None, None, dx_SD, None, None, dscores_R, None, *[None] * ctx.num_weights, *grads


@dataclass(frozen=True)
class AdaptedFusedMLP:
    """The MLP in Triton of frozen weights without biases, in compute's dtype or as codes with `scales`, perhaps with
    factors as in adapted_mlp.py."""

    format: ExpertFormat
    """That of compute, with an activation."""
    scale: float = 1.0

    def __call__(self, x_SD: Tensor, slots: ExpertSlots, weights: ExpertWeights) -> Tensor:
        """-> y_SD.

        Raises: ValueError for experts with biases or clones.
        """
        if weights.names() != MATRICES or weights.gate_up.clones is not None:
            raise ValueError('fused experts with frozen weights have neither biases nor clones; take "grouped_mm"')
        slots = slots._replace(scores_R=slots.scores_R.contiguous())
        frozen = [weight.detach().contiguous() for weight in (*weights.tensors(), *weights.scales)]
        factors = [factor.contiguous() for factor in weights.factors]
        return _AdaptedFusedMLP.apply(
            self.format.name, self.scale, len(frozen), x_SD.contiguous(), *slots, *frozen, *factors
        )

    def __deepcopy__(self, memo: object) -> "AdaptedFusedMLP":
        """A copied layer has the same MLP."""
        return self


@register_flop_formula(torch.ops.titan_moe.adapted_mlp)
def _count(x: Any, slots: Any, weights: Any, factors: Any, *_: Any, **__: Any) -> int:
    (num_slots,), (_, _, hidden, width) = slots[0], weights[0]
    rank = factors[3][-1] if factors else 0
    return flops_of_a_pass(num_slots, weights[0]) + 2 * num_slots * rank * 3 * (width + hidden)


@register_flop_formula(torch.ops.titan_moe.adapted_mlp_backward)
def _count_backward(dy: Any, x: Any, slots: Any, weights: Any, factors: Any, *_: Any, **__: Any) -> int:
    (num_slots,), (_, _, hidden, width) = slots[0], weights[0]
    rank = factors[3][-1] if factors else 0
    return flops_of_a_pass(num_slots, weights[0]) + 2 * num_slots * rank * 6 * (width + hidden)
