"""The products of one grouped GEMM of experts in fp8, for MLPs that are composed of GEMMs: with biases, scores on the
input, or low-rank factors beside the weights. Their operation is kernels/experts/grouped_mm.py.

R expert slots, sorted by expert · I input width · O output width · e experts that the rank computes

Physics: GEMMs and casts are those of the fused MLP, on slots that were gathered before: a pass over R·I elements more,
and one that quantises each operand of each product. Kept for backward are slots in bf16; weights are quantised for each
use. The reference is the emulated GEMM of kernels/formats/grouped.py, with scales that are powers of two.
"""

import torch
from torch import Tensor

from titan_moe.kernels.experts.fp8.packed import WHOLE_ROW
from titan_moe.kernels.experts.fp8.passes import sum_over_slots, times_weight
from titan_moe.kernels.experts.fp8.requantized import requantized_slots
from titan_moe.kernels.experts.fp8.rows import quantize_apart
from titan_moe.kernels.experts.fp8.transposed import expert_scales, transposed_slots
from titan_moe.kernels.experts.fp8.weight_grad import weight_grad
from titan_moe.kernels.experts.fp8.weights import quantize_one_way
from titan_moe.kernels.experts.tiles import plan_tiles
from titan_moe.kernels.experts.up import TILE_ROWS


def multiply_slots(x_RI: Tensor, weight_eOI: Tensor, offsets_e: Tensor, columns: int = WHOLE_ROW) -> Tensor:
    """Results of slots, [R, O]. Weights are contiguous, or the transpose of what is."""
    if not len(x_RI):
        return x_RI.new_empty(0, weight_eOI.shape[1])
    is_transposed = weight_eOI.stride(-1) != 1
    weight = quantize_one_way(weight_eOI.mT if is_transposed else weight_eOI, columns, transposed=is_transposed)
    return times_weight(quantize_apart(x_RI.contiguous(), columns), weight, plan_tiles(offsets_e, len(x_RI), TILE_ROWS))


def grad_of_weights(dy_RO: Tensor, x_RI: Tensor, offsets_e: Tensor, columns: int = WHOLE_ROW) -> Tensor:
    """The gradients of weights, [e, O, I]."""
    if not len(x_RI):
        return x_RI.new_zeros(len(offsets_e), dy_RO.shape[1], x_RI.shape[1])
    tiles = plan_tiles(offsets_e, len(x_RI), TILE_ROWS)
    dy, x = (quantize_apart(slots.contiguous(), columns) for slots in (dy_RO, x_RI))
    if columns:
        return sum_over_slots(requantized_slots(*dy, tiles), requantized_slots(*x, tiles), offsets_e)
    (dy_RO, dy_scales_R), (x_RI, x_scales_R) = dy, x
    # both scales of a slot move to the first factor
    factors_R2 = torch.stack([dy_scales_R * x_scales_R, torch.ones_like(x_scales_R)], dim=1)
    scales_e2 = expert_scales(factors_R2, offsets_e)
    dy_columns, x_columns = (
        transposed_slots(it, factors_R2, scales_e2, i, tiles) for i, it in enumerate((dy_RO, x_RI))
    )
    return weight_grad(dy_columns, x_columns, offsets_e, scales_e2[:, 0], tiles.rows)
