"""One grouped GEMM of experts in fp8, for MLPs that are composed of GEMMs: with biases, scores on the input, or
low-rank factors beside the weights.

R expert slots, sorted by expert · I input width · O output width · e own experts · c clones

Physics: the GEMMs, casts and weight gradients are those of the fused MLP, on slots that were gathered before: a pass
over R·I elements more, and one that quantises each operand. Kept for backward are codes of slots, or the slots where
weight gradients are not rounded. Weights are quantised for each use. The reference is the emulated GEMM of
kernels/formats/grouped.py, with scales that are powers of two.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils.flop_counter import register_flop_formula

from titan_moe.kernels.experts.fp8.format import FORMATS, Fp8Format
from titan_moe.kernels.experts.fp8.packed import CODES, num_scales
from titan_moe.kernels.experts.fp8.passes import sum_over_slots, times_weight
from titan_moe.kernels.experts.fp8.requantized import requantized_slots
from titan_moe.kernels.experts.fp8.rows import RESULTS, quantize_apart
from titan_moe.kernels.experts.fp8.transposed import expert_scales, transposed_slots
from titan_moe.kernels.experts.fp8.weight_grad import weight_grad
from titan_moe.kernels.experts.fp8.weights import quantize_one_way
from titan_moe.kernels.experts.grouped_mm import grouped_mm_dw
from titan_moe.kernels.experts.tiles import Tiles, plan_tiles
from titan_moe.kernels.experts.up import TILE_ROWS
from titan_moe.kernels.experts.weights import ExpertParameter

BY_NAME = {format.name: format for format in FORMATS}


def _tiles(offsets_e: Tensor, num_slots: int) -> Tiles:
    return plan_tiles(offsets_e, num_slots, TILE_ROWS)


@torch.library.custom_op("titan_moe::fp8_grouped_mm", mutates_args=())
def _times_weights(
    x_RI: Tensor, own_eOI: Tensor, clones_cOI: Tensor | None, offsets_e: Tensor, format: str, is_transposed: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """Results of slots, [R, O], and codes and scales of x. With `is_transposed` weights are [e, I, O]."""
    columns, num_slots = BY_NAME[format].columns, len(x_RI)
    slots = quantize_apart(x_RI.contiguous(), columns)
    if not num_slots:
        return x_RI.new_empty(0, own_eOI.shape[2 if is_transposed else 1], dtype=RESULTS), *slots
    weight = quantize_one_way(ExpertParameter(own_eOI, clones_cOI).join(), columns, transposed=is_transposed)
    return times_weight(slots, weight, _tiles(offsets_e, num_slots)), *slots


@_times_weights.register_fake
def _(
    x_RI: Tensor, own_eOI: Tensor, clones_cOI: Any, offsets_e: Any, format: str, is_transposed: bool
) -> tuple[Tensor, Tensor, Tensor]:
    columns, (num_slots, width) = BY_NAME[format].columns, x_RI.shape
    shape = (num_slots, num_scales(width, columns)) if columns else (num_slots,)
    y_RO = x_RI.new_empty(num_slots, own_eOI.shape[2 if is_transposed else 1], dtype=RESULTS)
    return y_RO, x_RI.new_empty(x_RI.shape, dtype=CODES), x_RI.new_empty(shape, dtype=torch.float32)


@torch.library.custom_op("titan_moe::fp8_grouped_mm_dw", mutates_args=())
def _dw(dy_RO: Tensor, dy_scales: Tensor, x_RI: Tensor, x_scales: Tensor, offsets_e: Tensor) -> Tensor:
    """The gradient of weights, [e + c, O, I], from codes and scales of slots."""
    if not len(x_RI):
        return x_RI.new_zeros(len(offsets_e), dy_RO.shape[1], x_RI.shape[1], dtype=RESULTS)
    tiles = _tiles(offsets_e, len(x_RI))
    if x_scales.ndim == 2:
        dy, x = (requantized_slots(*slots, tiles) for slots in ((dy_RO, dy_scales), (x_RI, x_scales)))
        return sum_over_slots(dy, x, offsets_e)
    # both scales of a slot move to the first factor
    factors_R2 = torch.stack([dy_scales * x_scales, torch.ones_like(x_scales)], dim=1)
    scales_e2 = expert_scales(factors_R2, offsets_e)
    dy = transposed_slots(dy_RO, factors_R2, scales_e2, 0, tiles)
    x = transposed_slots(x_RI, factors_R2, scales_e2, 1, tiles)
    return weight_grad(dy, x, offsets_e, scales_e2[:, 0], tiles.rows)


@_dw.register_fake
def _(dy_RO: Tensor, dy_scales: Any, x_RI: Tensor, x_scales: Any, offsets_e: Tensor) -> Tensor:
    return x_RI.new_empty(len(offsets_e), dy_RO.shape[1], x_RI.shape[1], dtype=RESULTS)


class _GroupedMM(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, format: str, *tensors: Tensor) -> Tensor:
        # few parameters and the rest: for Dynamo of torch 2.11, as in kernels/experts/fused_mlp.py
        x_RI, offsets_e, *weights = tensors
        y_RO, codes_RI, scales = _times_weights(x_RI, *_both(weights), offsets_e, format, False)
        ctx.format = format
        ctx.save_for_backward(codes_RI if BY_NAME[format].rounds_weight_grads else x_RI, scales, offsets_e, *weights)
        return y_RO

    @staticmethod
    def backward(ctx: Any, dy_RO: Tensor) -> tuple[Tensor | None, ...]:
        x_RI, x_scales, offsets_e, *weights = ctx.saved_tensors
        dy_RO, grads = dy_RO.contiguous(), [None] * len(weights)
        dx_RI, *slots = _times_weights(dy_RO, *_both(weights), offsets_e, ctx.format, True)
        if any(ctx.needs_input_grad[3:]):
            is_rounded = BY_NAME[ctx.format].rounds_weight_grads
            dweight = _dw(*slots, x_RI, x_scales, offsets_e) if is_rounded else grouped_mm_dw(dy_RO, x_RI, offsets_e)
            grads = dweight.split([len(weight) for weight in weights])
        return None, dx_RI, None, *grads


def _both(weights: list[Tensor]) -> tuple[Tensor, Tensor | None]:
    return weights[0], weights[1] if len(weights) > 1 else None


@dataclass(frozen=True)
class Fp8GroupedMM:
    """`grouped_mm` with operands in a format; equal ones compute alike."""

    format: Fp8Format

    def __call__(self, x_RI: Tensor, own_eOI: Tensor, clones_cOI: Tensor | None, offsets_e: Tensor) -> Tensor:
        weights = [own_eOI] if clones_cOI is None else [own_eOI, clones_cOI]
        return _GroupedMM.apply(self.format.name, x_RI, offsets_e, *weights)


FP8_GROUPED_MMS: dict[Any, Callable[..., Tensor]] = {format.gemms: Fp8GroupedMM(format) for format in FORMATS}
"""By the formats of their GEMMs."""


@register_flop_formula(torch.ops.titan_moe.fp8_grouped_mm)
def _count(x_shape: tuple[int, int], own_shape: tuple[int, int, int], *_: Any, **__: Any) -> int:
    return 2 * x_shape[0] * own_shape[1] * own_shape[2]


@register_flop_formula(torch.ops.titan_moe.fp8_grouped_mm_dw)
def _count_dw(dy_shape: tuple[int, int], dy_scales: Any, x_shape: tuple[int, int], *_: Any, **__: Any) -> int:
    return 2 * dy_shape[0] * dy_shape[1] * x_shape[1]
