"""The expert MLP in fp8: `fused_mlp.py` with operands in e4m3.

S rows · R expert slots, sorted by expert · e experts that the rank computes · D width of a row · F hidden width

Physics: the GEMMs have twice the rate of bf16; what stands beside them are passes over S·D elements to quantise rows,
over R·F to quantise activations and gradients, and over R·(2·D + 3·F) bytes to transpose what the gradients of weights
sum. Kept for backward are rows and pre-activations in e4m3, S·D + 2·R·F bytes, half of bf16's. The reference is the
composite of composite_mlp.py with emulated GEMMs. Here scales are powers of two; with scales of rows, gradients of
weights have one scale an expert (transposed.py), and with scales of blocks their factors are rounded twice
(requantized.py).
"""

from collections.abc import Iterable
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.utils.flop_counter import register_flop_formula

from titan_moe.kernels.delayed_weight_grads import Delay
from titan_moe.kernels.experts.composite_mlp import ExpertMLP
from titan_moe.kernels.experts.fp8 import stages
from titan_moe.kernels.experts.fp8.packed import BLOCK, CODES, WHOLE_ROW, codes_width, num_scales, packed_width
from titan_moe.kernels.experts.fp8.rows import RESULTS, quantize_rows
from titan_moe.kernels.experts.fp8.stages import HiddenGradients, QuantizedExperts
from titan_moe.kernels.experts.fp8.weights import WeightCodes, new_codes, quantize_one_way, quantize_weight
from titan_moe.kernels.experts.slot_sum import slot_sum
from titan_moe.kernels.experts.slots import ExpertSlots
from titan_moe.kernels.experts.tiles import Tiles, plan_tiles
from titan_moe.kernels.experts.up import TILE_ROWS
from titan_moe.kernels.experts.weights import MATRICES, ExpertWeights, Tensors

NUM_PARAMETERS = len(MATRICES)


def _tiles(slots: ExpertSlots) -> Tiles:
    return plan_tiles(slots.offsets_e, slots.rows_R.numel(), TILE_ROWS)


@torch.library.custom_op("titan_moe::fp8_expert_mlp", mutates_args=())
def _forward(x_SD: Tensor, slots: Tensors, quantized: Tensors) -> tuple[Tensor, Tensor, Tensor]:
    """y_SD, and the packed rows and pre-activations that backward needs."""
    at, of = ExpertSlots(*slots), QuantizedExperts.of(quantized)
    tiles, x = _tiles(at), quantize_rows(x_SD, of.columns)
    active, kept = stages.up(x, at, of, tiles)
    return slot_sum(stages.down(active, of, tiles), at.slots_SK), x, kept


@_forward.register_fake
def _(x_SD: Tensor, slots: Tensors, quantized: Tensors) -> tuple[Tensor, Tensor, Tensor]:
    of, (num_rows, width) = QuantizedExperts.of(quantized), x_SD.shape
    x = x_SD.new_empty(num_rows, packed_width(width, of.columns), dtype=CODES)
    kept_width = packed_width(of.gate_up.codes.shape[1], of.columns)
    kept = x_SD.new_empty(ExpertSlots(*slots).rows_R.shape[0], kept_width, dtype=CODES)
    return x_SD.new_empty(x_SD.shape, dtype=RESULTS), x, kept


@torch.library.custom_op("titan_moe::fp8_expert_mlp_dx", mutates_args=())
def _backward(
    dy_SD: Tensor, x: Tensor, slots: Tensors, quantized: Tensors, kept: Tensor, rounds: bool
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """dx_SD, dscores_R, packed dy and `HiddenGradients`; `rounds`: weight gradients are in fp8."""
    at, of = ExpertSlots(*slots), QuantizedExperts.of(quantized)
    tiles, dy = _tiles(at), quantize_rows(dy_SD, of.columns)
    gradients, dscores_R = stages.d_down(dy, x, at, of, kept, tiles, rounds_weight_gradients=rounds)
    return slot_sum(stages.d_up(gradients, of, tiles), at.slots_SK), dscores_R, dy, *gradients


@_backward.register_fake
def _(dy_SD: Tensor, x: Tensor, slots: Tensors, quantized: Any, kept: Tensor, rounds: bool) -> tuple[Tensor, ...]:
    scores_R, num_slots = ExpertSlots(*slots).scores_R, kept.shape[0]
    of = QuantizedExperts.of(quantized)
    both, columns = of.gate_up.codes.shape[2], of.columns
    gradients = (
        kept.new_empty(num_slots, both),
        scores_R.new_empty(num_slots, num_scales(both, columns)) if columns else torch.empty_like(scores_R),
        dy_SD.new_empty(0 if rounds else num_slots, both // 2, dtype=RESULTS),
        kept.new_empty(num_slots if rounds else 0, both // 2),
        scores_R.new_empty(num_slots, num_scales(both // 2, columns) if columns else 2),
    )
    dx_SD = dy_SD.new_empty(dy_SD.shape, dtype=RESULTS)
    return dx_SD, torch.empty_like(scores_R), torch.empty_like(x), *gradients


@torch.library.custom_op("titan_moe::fp8_expert_mlp_dw", mutates_args=())
def _dw(dy: Tensor, x: Tensor, slots: Tensors, gradients: Tensors, kept: Tensor, rounds: bool) -> tuple[Tensor, Tensor]:
    at, of_hidden = ExpertSlots(*slots), HiddenGradients(*gradients)
    if not rounds:
        return stages.plain_dw(dy, x, at, of_hidden, kept)
    return stages.dw(dy, x, at, of_hidden, _tiles(at))


@_dw.register_fake
def _(dy: Tensor, x: Tensor, slots: Tensors, gradients: Tensors, kept: Tensor, rounds: bool) -> tuple[Tensor, Tensor]:
    num_experts, of_hidden = ExpertSlots(*slots).offsets_e.shape[0], HiddenGradients(*gradients)
    dactive_RF = of_hidden.dactive_RF
    hidden, width = dactive_RF.shape[1], codes_width(x.shape[1], of_hidden.columns)
    return dactive_RF.new_empty(num_experts, 2, hidden, width), dactive_RF.new_empty(num_experts, width, hidden)


def quantize_experts(gate_up: Tensor, down: Tensor, is_bf16: bool) -> list[Tensor]:
    """Codes and scales of own experts, [e, 2, F, D] and [e, D, F], as operations take them: those for forward, then
    those for backward. With `is_bf16`, weights are rounded to bf16 first, as other layouts gather them."""
    return _quantize_experts(gate_up, down, is_bf16, WHOLE_ROW)  # a function, which a copied model can share


def quantize_experts_in_blocks(gate_up: Tensor, down: Tensor, is_bf16: bool) -> list[Tensor]:
    """The same, with scales of blocks of 128 x 128."""
    return _quantize_experts(gate_up, down, is_bf16, BLOCK)


@torch.library.custom_op("titan_moe::quantize_experts", mutates_args=())
def _quantize_experts(gate_up: Tensor, down: Tensor, is_bf16: bool, columns: int) -> list[Tensor]:
    dtype = torch.bfloat16 if is_bf16 else gate_up.dtype
    return _by_direction(quantize_weight(weight, dtype, columns) for weight in (gate_up.flatten(1, 2), down))


@_quantize_experts.register_fake
def _(gate_up: Tensor, down: Tensor, is_bf16: bool, columns: int) -> list[Tensor]:
    weights = gate_up.flatten(1, 2), down
    return _by_direction([new_codes(weight, columns, transposed=way) for way in (False, True)] for weight in weights)


def _by_direction(ways: Iterable[list[WeightCodes]]) -> list[Tensor]:
    """Both weights as stored, and both transposed."""
    return [tensor for both in zip(*ways, strict=True) for tensor in QuantizedExperts(*both).tensors()]


@torch.library.custom_op("titan_moe::quantize_experts_one_way", mutates_args=())
def _quantize_one_way(gate_up: Tensor, down: Tensor, columns: int, transposed: bool) -> list[Tensor]:
    both = (quantize_one_way(weight, columns, transposed=transposed) for weight in (gate_up.flatten(1, 2), down))
    return QuantizedExperts(*both).tensors()


@_quantize_one_way.register_fake
def _(gate_up: Tensor, down: Tensor, columns: int, transposed: bool) -> list[Tensor]:
    both = (new_codes(weight, columns, transposed=transposed) for weight in (gate_up.flatten(1, 2), down))
    return QuantizedExperts(*both).tensors()


def operands(weights: ExpertWeights, columns: int = WHOLE_ROW) -> list[Tensor]:
    """What the operations take of weights: own ones, for their gradients, and their codes if they were made before.

    Raises: ValueError for experts with biases or clones, or whose widths are no multiples of a block's columns.
    """
    if columns and any(width % columns for width in weights.down.own.shape[1:]):
        width, hidden = weights.down.own.shape[1:]
        raise ValueError(
            f"experts in fp8_blockwise need widths that are multiples of {columns}, not {width} and {hidden}; take "
            'precision.experts = "fp8_rowwise", or precision.backend = "emulated"'
        )
    if weights.names() != MATRICES or weights.gate_up.clones is not None:
        raise ValueError('experts in fp8 have no biases and no clones; take precision.experts = "compute"')
    return [weights.gate_up.own, weights.down.own, *weights.codes]


def codes_of(weights: Tensors, columns: int = WHOLE_ROW, *, for_backward: bool = False) -> Tensors:
    """The codes of what `operands` returns, for one direction. Where they were not made before, they are made for each
    use: so autograd keeps the parameters, which FSDP frees after forward and gathers again, and no codes of all
    layers."""
    own, codes = weights[:NUM_PARAMETERS], weights[NUM_PARAMETERS:]
    if codes:
        half = len(codes) // 2
        return codes[half:] if for_backward else codes[:half]
    return _quantize_one_way(own[0].detach(), own[1].detach(), columns, for_backward)


class _Fp8ExpertMLP(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, columns: int, rounds_weight_gradients: bool, delay: Delay | None, *tensors: Tensor) -> Tensor:
        # few parameters and the rest, as in fused_mlp.py
        x_SD, *slots = tensors[:5]
        weights = tensors[5:]
        ctx.columns, ctx.rounds_weight_gradients, ctx.delay = columns, rounds_weight_gradients, delay
        y_SD, x, kept = _forward(x_SD, slots, codes_of(weights, columns))
        ctx.save_for_backward(x, kept, *slots, *weights)
        return y_SD

    @staticmethod
    def backward(ctx: Any, dy_SD: Tensor) -> tuple[Tensor | None, ...]:
        x, kept, *saved = ctx.saved_tensors
        slots, weights = saved[:4], saved[4:]
        codes = codes_of(weights, ctx.columns, for_backward=True)
        dx_SD, dscores_R, dy, *gradients = _backward(
            dy_SD.contiguous(), x, slots, codes, kept, ctx.rounds_weight_gradients
        )
        del codes
        grads: tuple[Tensor | None, ...] = (None, None)
        if any(ctx.needs_input_grad[8:10]):
            operands = dy, x, slots, gradients, kept, ctx.rounds_weight_gradients
            if ctx.delay is None:
                grads = _dw(*operands)
            else:
                ctx.delay(partial(_dw, *operands))
        return None, None, None, dx_SD, None, None, dscores_R, None, *grads, *(None,) * (len(weights) - NUM_PARAMETERS)


def fp8_expert_mlp(x_SD: Tensor, slots: ExpertSlots, weights: ExpertWeights, delay: Delay | None = None) -> Tensor:
    """The MLP with operands in e4m3, sums in fp32 and results in bf16, on a GPU. Weights with codes are not read.
    `delay` as in fused_mlp.py.

    Raises: ValueError for experts with biases or clones.
    """
    return _run(x_SD, slots, weights, delay, WHOLE_ROW, rounds_weight_gradients=True)


def fp8_expert_mlp_with_plain_weight_gradients(
    x_SD: Tensor, slots: ExpertSlots, weights: ExpertWeights, delay: Delay | None = None
) -> Tensor:
    """The same, with weight gradients by GEMMs in bf16.

    Raises: ValueError for experts with biases or clones.
    """
    return _run(x_SD, slots, weights, delay, WHOLE_ROW, rounds_weight_gradients=False)


def fp8_blockwise_expert_mlp(
    x_SD: Tensor, slots: ExpertSlots, weights: ExpertWeights, delay: Delay | None = None
) -> Tensor:
    """`fp8_expert_mlp` with scales of 128 columns of rows and slots, and of 128 x 128 of weights. Products of 128 leave
    the matrix units and are added in fp32 (arXiv:2412.19437, section 3.3.2).

    Raises: ValueError for experts with biases or clones, or with widths that are no multiples of 128.
    """
    return _run(x_SD, slots, weights, delay, BLOCK, rounds_weight_gradients=True)


def fp8_blockwise_expert_mlp_with_plain_weight_gradients(
    x_SD: Tensor, slots: ExpertSlots, weights: ExpertWeights, delay: Delay | None = None
) -> Tensor:
    """The same, with weight gradients by GEMMs in bf16.

    Raises: ValueError for experts with biases or clones, or with widths that are no multiples of 128.
    """
    return _run(x_SD, slots, weights, delay, BLOCK, rounds_weight_gradients=False)


def _run(
    x_SD: Tensor,
    slots: ExpertSlots,
    weights: ExpertWeights,
    delay: Delay | None,
    columns: int,
    *,
    rounds_weight_gradients: bool,
) -> Tensor:
    slots, of_weights = slots._replace(scores_R=slots.scores_R.contiguous()), operands(weights, columns)
    return _Fp8ExpertMLP.apply(columns, rounds_weight_gradients, delay, x_SD.contiguous(), *slots, *of_weights)


ROWWISE_MLPS: tuple[ExpertMLP, ...] = (fp8_expert_mlp, fp8_expert_mlp_with_plain_weight_gradients)
BLOCKWISE_MLPS: tuple[ExpertMLP, ...] = (
    fp8_blockwise_expert_mlp,
    fp8_blockwise_expert_mlp_with_plain_weight_gradients,
)
FP8_MLPS = (*ROWWISE_MLPS, *BLOCKWISE_MLPS)
"""Those whose rows and pre-activations are in fp8."""


def scale_columns(mlp: ExpertMLP) -> int | None:
    """Columns of a scale of an MLP's rows (packed.py); None where they are not in fp8."""
    if mlp not in FP8_MLPS:
        return None
    return BLOCK if mlp in BLOCKWISE_MLPS else WHOLE_ROW


@register_flop_formula(torch.ops.titan_moe.fp8_expert_mlp)
def _count(x: Any, slots: Any, quantized: Any, **_: Any) -> int:
    _, both, width = quantized[0]
    return 2 * ExpertSlots(*slots).rows_R[0] * (both + both // 2) * width


@register_flop_formula(torch.ops.titan_moe.fp8_expert_mlp_dx)
def _count_dx(dy: Any, x: Any, slots: Any, quantized: Any, *_: Any, **__: Any) -> int:
    _, width, both = quantized[0]
    return 2 * ExpertSlots(*slots).rows_R[0] * (both + both // 2) * width


@register_flop_formula(torch.ops.titan_moe.fp8_expert_mlp_dw)
def _count_dw(dy: Any, x: Any, slots: Any, gradients: Any, *_: Any, **__: Any) -> int:
    of_hidden = HiddenGradients(*gradients)
    width = codes_width(x[1], BLOCK if len(of_hidden.scales) == 2 else WHOLE_ROW)
    return 2 * slots[0][0] * 3 * of_hidden.dactive_RF[1] * width
