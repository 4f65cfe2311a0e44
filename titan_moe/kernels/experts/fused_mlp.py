"""The expert MLP in Triton, around grouped GEMMs.

S rows · R expert slots, sorted by expert · K choices a row · e experts that the rank computes · D width of a row ·
F hidden width

Physics: 6·R·D·F FLOPs forward and twice that backward. Unfused, six to eight passes over R·D or R·F elements stand
beside the GEMMs. Here rows are gathered inside the GEMMs that read them, SwiGLU is the epilogue of the first, and what
remains are the two gather-sums and one pass back through SwiGLU. Kept for backward are x and the pre-activation,
2·S·D + 4·R·F bytes in bf16; no permuted row, no activation, no expert output. After SonicMoE (arXiv:2512.14080) and
Megatron's memory-efficient permutation (arXiv:2603.07685 section 4.1.2). The reference is the composite of
composite_mlp.py, the sequence of passes.py.

The operations take named tuples as lists of their tensors.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from enum import IntEnum
from functools import cache, partial
from typing import Any

import torch
from torch import Tensor
from torch.utils.flop_counter import register_flop_formula

from titan_moe.config.swiglu import PLAIN_SWIGLU, SwiGLU
from titan_moe.kernels.delayed_weight_grads import Delay, WeightGradQueue
from titan_moe.kernels.device import refuse_cpu
from titan_moe.kernels.experts.composite_mlp import CompositeMLP, ExpertMLP
from titan_moe.kernels.experts.format import ExpertFormat, Work
from titan_moe.kernels.experts.formats import FORMATS
from titan_moe.kernels.experts.fp8.format import FORMATS as FP8_FORMATS
from titan_moe.kernels.experts.grouped_mm import grouped_mm_reference
from titan_moe.kernels.experts.passes import flops_of_a_pass
from titan_moe.kernels.experts.plain import BIASED, PLAIN
from titan_moe.kernels.experts.slot_sum import slot_sum
from titan_moe.kernels.experts.slots import ExpertSlots
from titan_moe.kernels.experts.tiles import Tiles, plan_tiles
from titan_moe.kernels.experts.up import TILE_ROWS
from titan_moe.kernels.experts.weights import ExpertParameter, ExpertWeights, Tensors
from titan_moe.kernels.permute.rows import place_scores
from titan_moe.kernels.registry import Kernel, register


class Keep(IntEnum):
    """What an MLP keeps of a forward for backward. Rows that are its input are kept by whatever has them."""

    NOTHING = 0
    ROWS = 1
    ALL = 2  # rows and pre-activations


def _tiles(slots: ExpertSlots) -> Tiles:
    return plan_tiles(slots.offsets_e, slots.rows_R.numel(), TILE_ROWS)


@torch.library.custom_op("titan_moe::expert_mlp", mutates_args=())
def _forward(x_SD: Tensor, slots: Tensors, weights: Tensors, format: str) -> tuple[Tensor, Tensor, Tensor]:
    """y_SD, and what backward needs: packed rows (empty where they are as given), and the pre-activation."""
    refuse_cpu(x_SD, "experts", "fused", "grouped_mm")
    of, at = FORMATS[format], ExpertSlots(*slots)
    passes = of.passes(weights, "forward")
    work, x = Work(at, _tiles(at)), of.pack(x_SD)
    hidden = of.new_hidden(x_SD, at.rows_R.numel(), weights[1].shape[2])
    y_SD = slot_sum(passes.down(passes.up(x, work, hidden), work), at.slots_SK)
    return y_SD, x if of.is_rounded else x_SD.new_empty(0), hidden


@_forward.register_fake
def _(x_SD: Tensor, slots: Tensors, weights: Tensors, format: str) -> tuple[Tensor, Tensor, Tensor]:
    y_SD, x = _new_results(x_SD, FORMATS[format])
    return y_SD, x, FORMATS[format].new_hidden(x_SD, slots[0].shape[0], weights[1].shape[2])


def _new_results(like_SD: Tensor, format: ExpertFormat) -> tuple[Tensor, Tensor]:
    """Memory for results or gradients of rows, and for packed rows."""
    num_rows, width = like_SD.shape
    packed = [num_rows, format.row_width(width, like_SD.dtype)] if format.is_rounded else [0]
    return like_SD.new_empty(like_SD.shape, dtype=format.result_dtype(like_SD.dtype)), like_SD.new_empty(packed)


@torch.library.custom_op("titan_moe::expert_mlp_hidden", mutates_args=())
def _hidden(x: Tensor, slots: Tensors, weights: Tensors, format: str) -> Tensor:
    """The pre-activation again, from packed rows."""
    of, at = FORMATS[format], ExpertSlots(*slots)
    hidden = of.new_hidden(x, at.rows_R.numel(), weights[1].shape[2])
    of.passes(weights, "forward").up(x, Work(at, _tiles(at)), hidden)
    return hidden


@_hidden.register_fake
def _(x: Tensor, slots: Tensors, weights: Tensors, format: str) -> Tensor:
    return FORMATS[format].new_hidden(x, slots[0].shape[0], weights[1].shape[2])


@torch.library.custom_op("titan_moe::expert_mlp_dx", mutates_args=())
def _backward(dy_SD: Tensor, x: Tensor, slots: Tensors, weights: Tensors, hidden: Tensor, format: str) -> list[Tensor]:
    """dx_SD, dscores_R, packed gradients of results (empty where they are as given), and what `dw` needs."""
    of, at = FORMATS[format], ExpertSlots(*slots)
    passes = of.passes(weights, "backward")
    work, dy = Work(at, _tiles(at)), of.pack(dy_SD)
    gradients, dscores_R = passes.d_down(dy, x, work, hidden)
    dx_SD = slot_sum(passes.d_up(gradients, work), at.slots_SK)
    return [dx_SD, dscores_R, dy if of.is_rounded else dy_SD.new_empty(0), *gradients]


@_backward.register_fake
def _(dy_SD: Tensor, x: Any, slots: Tensors, weights: Tensors, hidden: Any, format: str) -> list[Tensor]:
    (dx_SD, dy), scores_R = _new_results(dy_SD, FORMATS[format]), slots[2]
    gradients = FORMATS[format].new_gradients(dy_SD, scores_R.shape[0], weights[1].shape[2])
    return [dx_SD, torch.empty_like(scores_R), dy, *gradients]


@torch.library.custom_op("titan_moe::expert_mlp_dw", mutates_args=())
def _dw(
    dy: Tensor, x: Tensor, slots: Tensors, gradients: Tensors, hidden: Tensor | None, shape: Sequence[int], format: str
) -> list[Tensor]:
    """Gradients of gate_up, of this shape, down and biases. An operation of its own, so that a schedule may run it
    later."""
    of, at = FORMATS[format], ExpertSlots(*slots)
    return list(of.dw(dy, x, at, _tiles(at) if of.rounds_weight_grads else None, gradients, hidden))


@_dw.register_fake
def _(dy: Any, x: Tensor, slots: Any, gradients: Any, hidden: Any, shape: Sequence[int], format: str) -> list[Tensor]:
    return FORMATS[format].new_weight_grads(x, shape)


class _FusedMLP(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, format: str, delay: Delay | None, keeps_hidden: bool, *tensors: Tensor) -> Tensor:
        # few parameters and the rest: Dynamo of torch 2.11 drops `ctx` where it counts as many arguments as parameters
        x_SD, *slots = tensors[:5]
        weights = tensors[5:]
        y_SD, x, hidden = _forward(x_SD, slots, weights, format)
        ctx.format, ctx.delay = format, delay
        kept = hidden if keeps_hidden else hidden.new_empty(0)
        ctx.save_for_backward(x if FORMATS[format].is_rounded else x_SD, kept, *slots, *weights)
        return y_SD

    @staticmethod
    def backward(ctx: Any, dy_SD: Tensor) -> tuple[Tensor | None, ...]:
        (x, hidden, *saved), format = ctx.saved_tensors, FORMATS[ctx.format]
        slots, weights, dy_SD = saved[:4], saved[4:], dy_SD.contiguous()
        if hidden.ndim == 1:
            hidden = _hidden(x, slots, weights, ctx.format)
        dx_SD, dscores_R, dy, *gradients = _backward(dy_SD, x, slots, weights, hidden, ctx.format)
        grads: list[Tensor | None] = [None] * len(weights)
        if any(ctx.needs_input_grad[8:]):
            rows = dy if format.is_rounded else dy_SD, x.detach()  # without its graph
            shape = [slots[3].shape[0], *weights[0].shape[1:]]  # with clones
            operands = *rows, slots, gradients, hidden if format.dw_reads_hidden else None, shape, ctx.format
            if ctx.delay is None:
                grads = format.split(weights, _dw(*operands))
            else:
                ctx.delay(partial(_dw, *operands))
        return None, None, None, dx_SD, None, None, dscores_R, None, *grads


@dataclass(frozen=True)
class FusedMLP:
    """The MLP in Triton, on a GPU or in the interpreter, on rows that this rank has."""

    format: ExpertFormat
    queue: WeightGradQueue | None = None
    """Inside its `delaying`, weight gradients are delayed."""
    keeps: Keep = Keep.ALL
    """What backward has of forward; the rest it computes again, or gets again from peers."""

    def __call__(self, x_SD: Tensor, slots: ExpertSlots, weights: ExpertWeights, delay: Delay | None = None) -> Tensor:
        """-> y_SD. `delay`, if given, takes over the computation of the weight gradients in backward, whose results are
        None; weights have no clones then.

        Raises: ValueError for experts that the format does not take: with biases or without, in fp8 also with codes and
            clones.
        """
        if delay is None:
            weights, delay = self.delay(weights)
        slots, operands = slots._replace(scores_R=slots.scores_R.contiguous()), self.format.operands(weights)
        return _FusedMLP.apply(self.format.name, delay, self.keeps is Keep.ALL, x_SD.contiguous(), *slots, *operands)

    def delay(self, weights: ExpertWeights) -> tuple[ExpertWeights, Delay | None]:
        """For an operation that reads these weights: stand-ins to read, and what takes over their gradients; the
        weights and None where the operation computes them."""
        pending = None if self.queue is None else self.queue.pending
        if pending is None:
            return weights, None
        tensors, delay = pending.delay(*weights.tensors())
        return weights.with_tensors(tensors), delay

    def __deepcopy__(self, memo: object) -> "FusedMLP":
        """A copied layer has the same MLP."""
        return self


fused_expert_mlp, biased_expert_mlp = FusedMLP(PLAIN), FusedMLP(BIASED)
FUSED_MLPS = {format.gemms: FusedMLP(format) for format in FP8_FORMATS} | {PLAIN.gemms: fused_expert_mlp}
"""By the formats of their GEMMs."""


@cache
def with_activation(mlp: FusedMLP, activation: SwiGLU) -> FusedMLP:
    """The same MLP, one for all layers, with another activation."""
    return mlp if activation == PLAIN_SWIGLU else replace(mlp, format=replace(mlp.format, activation=activation))


def format_of(mlp: ExpertMLP) -> ExpertFormat:
    """The format of the rows and weights that an MLP takes. One of GEMMs rounds them, if at all, for itself."""
    return mlp.format if isinstance(mlp, FusedMLP) else PLAIN


@register_flop_formula(torch.ops.titan_moe.expert_mlp)
def _count(x: Any, slots: Any, weights: Any, *_: Any, **__: Any) -> int:
    return flops_of_a_pass(slots[0][0], weights[0])


@register_flop_formula(torch.ops.titan_moe.expert_mlp_hidden)
def _count_hidden(x: Any, slots: Any, weights: Any, *_: Any, **__: Any) -> int:
    return 2 * flops_of_a_pass(slots[0][0], weights[0]) // 3


@register_flop_formula(torch.ops.titan_moe.expert_mlp_dx)
def _count_dx(dy: Any, x: Any, slots: Any, weights: Any, *_: Any, **__: Any) -> int:
    return flops_of_a_pass(slots[0][0], weights[0])


@register_flop_formula(torch.ops.titan_moe.expert_mlp_dw)
def _count_dw(dy: Any, x: Any, slots: Any, gradients: Any, hidden: Any, shape: Any, *_: Any, **__: Any) -> int:
    return flops_of_a_pass(slots[0][0], shape)


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
