"""The expert MLP in Triton of frozen weights, with low-rank factors beside them (LoRA, arXiv:2106.09685).

S rows · R expert slots, sorted by expert · e experts that the rank computes · D width of a row · F hidden width ·
r rank

Physics: the passes of passes.py without `dw`, and 2·R·r·(4·D + 5·F) FLOPs in GEMMs of a width of r or 2·r, which are
bound by memory: they read rows, activations and their gradients again. The products of gate and up are one GEMM with a
matrix of two blocks, written where pre-activations are, and `up` adds its own: so SwiGLU stays its epilogue. Results of
slots, and the gradients of activations and slots, are sums of two GEMMs, a pass of 6·R·D or 6·R·F bytes each. Kept for
backward are x, the pre-activation and a slot's products with A, 2·S·D + 4·R·(F + r) bytes in bf16. Weights may be codes
with scales: the numbers of one are made for its product (kernels/formats/stored.py). The host reads nothing, and sizes
are static. The reference is adapted_mlp.py with GEMMs of grouped_mm.py.
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
from titan_moe.kernels.experts.passes import flops_of_a_pass
from titan_moe.kernels.experts.slot_sum import slot_rows, slot_sum
from titan_moe.kernels.experts.slots import ExpertSlots
from titan_moe.kernels.experts.swiglu_backward import swiglu_backward
from titan_moe.kernels.experts.tiles import plan_tiles
from titan_moe.kernels.experts.up import TILE_ROWS, expert_up
from titan_moe.kernels.experts.weights import MATRICES, ExpertWeights, Tensors
from titan_moe.kernels.formats.stored import numbers_of

NUM_FACTORS = 4


def _number(weights: Tensors, index: int, dtype: torch.dtype) -> Tensor:
    """Gate and up, or down, in compute's dtype; of codes for one product."""
    if len(weights) == len(MATRICES):
        return weights[index]
    return numbers_of(weights[index], weights[index + len(MATRICES)], dtype)


def _times(x_RI: Tensor, weight_eOI: Tensor, offsets_e: Tensor) -> Tensor:
    return F.grouped_mm(x_RI, weight_eOI.transpose(1, 2), offs=offsets_e)


def _two_blocks(b_e2Fr: Tensor) -> Tensor:
    """B of gate and up as one matrix, [e, 2F, 2r], for the products of both with A side by side."""
    num_experts, _, hidden, rank = b_e2Fr.shape
    blocks = b_e2Fr.new_zeros(num_experts, 2, hidden, 2, rank)
    for index in range(2):
        blocks[:, index, :, index] = b_e2Fr[:, index]
    return blocks.view(num_experts, 2 * hidden, 2 * rank)


@torch.library.custom_op("titan_moe::adapted_mlp", mutates_args=())
def _forward(
    x_SD: Tensor, slots: Tensors, weights: Tensors, factors: Tensors, scale: float, format: str
) -> tuple[Tensor, Tensor, Tensor]:
    """y_SD, the pre-activation, and products with A of gate and up, times the scale (empty without factors)."""
    refuse_cpu(x_SD, "experts", "fused", "grouped_mm")
    rows_R, slots_SK, scores_R, offsets_e = slots
    hidden, low_up = None, x_SD.new_empty(rows_R.numel(), 0)
    if factors:
        x_RD = slot_rows(x_SD, rows_R, offsets_e)
        low_up = _times(x_RD, factors[0].flatten(1, 2), offsets_e).mul_(scale)
        del x_RD
        hidden = _times(low_up, _two_blocks(factors[1]), offsets_e)
    tiles, activation = plan_tiles(offsets_e, rows_R.numel(), TILE_ROWS), FORMATS[format].activation
    hidden, active_RF = expert_up(
        x_SD, rows_R, scores_R, _number(weights, 0, x_SD.dtype), tiles,
        hidden=hidden, adds=bool(factors), activation=activation,
    )  # fmt: skip
    y_RD = _times(active_RF, _number(weights, 1, x_SD.dtype), offsets_e)
    if factors:
        y_RD += _times(_times(active_RF, factors[2], offsets_e).mul_(scale), factors[3], offsets_e)
    return slot_sum(y_RD, slots_SK), hidden, low_up


@_forward.register_fake
def _(
    x_SD: Tensor, slots: Tensors, weights: Tensors, factors: Tensors, scale: float, format: str
) -> tuple[Tensor, Tensor, Tensor]:
    num_slots, rank = slots[0].shape[0], factors[3].shape[-1] if factors else 0
    hidden = x_SD.new_empty(num_slots, 2 * weights[1].shape[2])
    return torch.empty_like(x_SD), hidden, x_SD.new_empty(num_slots, 2 * rank)


@torch.library.custom_op("titan_moe::adapted_mlp_backward", mutates_args=())
def _backward(
    dy_SD: Tensor, x_SD: Tensor, slots: Tensors, weights: Tensors, factors: Tensors, hidden: Tensor, low_up: Tensor,
    scale: float, format: str,
) -> list[Tensor]:  # fmt: skip
    """dx_SD, dscores_R, and the gradients of factors."""
    rows_R, slots_SK, scores_R, offsets_e = slots
    tiles, activation = plan_tiles(offsets_e, rows_R.numel(), TILE_ROWS), FORMATS[format].activation
    dactive_RF = gather_mm(dy_SD, rows_R, _number(weights, 1, dy_SD.dtype), tiles)
    dy_RD, dlow_down, grads = None, None, []
    if factors:
        dy_RD = slot_rows(dy_SD, rows_R, offsets_e)
        dlow_down = F.grouped_mm(dy_RD, factors[3], offs=offsets_e).mul_(scale)
        dactive_RF += F.grouped_mm(dlow_down, factors[2], offs=offsets_e)
    dhidden, active_RF, dscores_R = swiglu_backward(dactive_RF, hidden, scores_R, offsets_e, activation=activation)
    assert dscores_R is not None, "slots are routed"
    dx_RD = F.grouped_mm(dhidden, _number(weights, 0, dy_SD.dtype).flatten(1, 2), offs=offsets_e)
    if dy_RD is not None and dlow_down is not None:
        low_down = _times(active_RF, factors[2], offsets_e).mul_(scale)
        of_down = [_sum_over_slots(dlow_down, active_RF, offsets_e), _sum_over_slots(dy_RD, low_down, offsets_e)]
        dlow_up = F.grouped_mm(dhidden, _two_blocks(factors[1]), offs=offsets_e).mul_(scale)
        dx_RD += F.grouped_mm(dlow_up, factors[0].flatten(1, 2), offs=offsets_e)
        x_RD = slot_rows(x_SD, rows_R, offsets_e)
        da_up = _sum_over_slots(dlow_up, x_RD, offsets_e).view_as(factors[0])
        blocks = _sum_over_slots(dhidden, low_up, offsets_e).unflatten(2, (2, -1)).unflatten(1, (2, -1))
        db_up = torch.stack([blocks[:, index, :, index] for index in range(2)], dim=1)
        grads = [da_up, db_up, *of_down]
    return [slot_sum(dx_RD, slots_SK), dscores_R, *grads]


def _sum_over_slots(left_RO: Tensor, right_RI: Tensor, offsets_e: Tensor) -> Tensor:
    """[e, O, I]."""
    if not len(left_RO):
        return left_RO.new_zeros(len(offsets_e), left_RO.shape[1], right_RI.shape[1])
    return F.grouped_mm(left_RO.T, right_RI, offs=offsets_e)


@_backward.register_fake
def _(
    dy_SD: Tensor, x_SD: Tensor, slots: Tensors, weights: Any, factors: Tensors, hidden: Any, low_up: Any,
    scale: float, format: str,
) -> list[Tensor]:  # fmt: skip
    return [torch.empty_like(x_SD), torch.empty_like(slots[2]), *map(torch.empty_like, factors)]


class _AdaptedFusedMLP(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, format: str, scale: float, num_weights: int, *tensors: Tensor) -> Tensor:
        x_SD, *slots = tensors[:5]
        weights, factors = tensors[5 : 5 + num_weights], tensors[5 + num_weights :]
        y_SD, hidden, low_up = _forward(x_SD, slots, weights, factors, scale, format)
        ctx.format, ctx.scale, ctx.num_weights = format, scale, num_weights
        ctx.save_for_backward(hidden, low_up, *tensors)
        return y_SD

    @staticmethod
    def backward(ctx: Any, dy_SD: Tensor) -> tuple[Tensor | None, ...]:
        hidden, low_up, x_SD, *tensors = ctx.saved_tensors
        slots, weights, factors = tensors[:4], tensors[4 : 4 + ctx.num_weights], tensors[4 + ctx.num_weights :]
        operands = dy_SD.contiguous(), x_SD, slots, weights, factors, hidden, low_up
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
    return flops_of_a_pass(num_slots, weights[0]) + 2 * num_slots * rank * (3 * width + 5 * hidden)


@register_flop_formula(torch.ops.titan_moe.adapted_mlp_backward)
def _count_backward(dy: Any, x: Any, slots: Any, weights: Any, factors: Any, *_: Any, **__: Any) -> int:
    (num_slots,), (_, _, hidden, width) = slots[0], weights[0]
    rank = factors[3][-1] if factors else 0
    return flops_of_a_pass(num_slots, weights[0]) + 2 * num_slots * rank * (6 * width + 11 * hidden)
