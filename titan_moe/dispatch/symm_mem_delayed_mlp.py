"""The expert MLP between two exchanges over symmetric memory, with weight gradients that a schedule delays.

P ranks of the group · T tokens on each of them · K choices · S rows that a rank has room for · R expert slots ·
D width · F hidden width

The backward of symm_mem_mlp.py as two operations: gradients of rows and scores, with both exchanges, and gradients of
weights, which exchanges nothing. In between, gradients of received results and of activations are kept, in an arena if
there is one (kernels/experts/arena.py). The arena must keep rows too: where backward would get them again, weight
gradients are not delayed.
"""

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.utils.flop_counter import register_flop_formula

from titan_moe.dispatch.symm_mem_mlp import NUM_OF_KEPT, NUM_OF_PLAN, Backward, Delayed, Sizes, forward
from titan_moe.kernels.delayed_weight_grads import Delay
from titan_moe.kernels.experts.arena import Arena
from titan_moe.kernels.experts.formats import FORMATS
from titan_moe.kernels.experts.slots import ExpertSlots
from titan_moe.kernels.experts.stages import flops_of_a_pass
from titan_moe.kernels.experts.tiles import plan_tiles
from titan_moe.kernels.experts.up import TILE_ROWS
from titan_moe.kernels.experts.weights import Tensors


@torch.library.custom_op("titan_moe::expert_mlp_over_symm_mem_dx", mutates_args=())
def backward_input(
    dy_TD: Tensor, plan: Tensors, weights: Tensors, kept: Tensors,
    memory: Tensor, peer_ptrs_P: Tensor, rank: int, format: str, sizes: Sequence[int],
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """Gradients of rows and scores, and what `backward_weight` needs beside `kept`: gradients of received results and
    of activations, and base. With an arena, which must keep rows, the former two are empty, and base is int64 [2]."""
    of = Sizes(*sizes)
    run, arena = Backward.of(plan, weights, kept, memory, peer_ptrs_P, rank, format, sizes, dy_TD), Arena.of(of.arena)
    if arena is None:
        dtype = FORMATS[format].result_dtype(dy_TD.dtype)
        dactive = dy_TD.new_empty(of.num_slots, weights[1].shape[2], dtype=dtype)
        dy_SW, base = dy_TD.new_empty(of.max_rows, run.rows.x_SW.shape[1]), dy_TD.new_empty(0, dtype=torch.int64)
        delayed = Delayed(dy_SW, dactive, None)
    else:
        assert arena.can_delay and run.rows.base is not None, "run_mlp says so"
        base = arena.delay(run.rows.base)
        delayed = Delayed(arena.dy_CW, arena.dactive_GF, base)
    run.put_gradients(dy_TD, delayed)
    dx_TD, dscores_TK = run.sum_gradients()
    if arena is not None:
        dy_SW, dactive = (tensor.new_empty(0, tensor.shape[1]) for tensor in (arena.dy_CW, arena.dactive_GF))
    return dx_TD, dscores_TK, dy_SW, dactive, base


@backward_input.register_fake
def _(dy_TD: Tensor, plan: Tensors, weights: Tensors, kept: Tensors, *rest: Any) -> tuple[Tensor, ...]:
    (*_, scores_R, _), format, of = kept, FORMATS[rest[-2]], Sizes(*rest[-1])
    num_rows, num_slots = (0, 0) if of.arena else (of.max_rows, of.num_slots)
    dy_SW = dy_TD.new_empty(num_rows, format.row_width(dy_TD.shape[1], dy_TD.dtype))
    dactive = dy_TD.new_empty(num_slots, weights[1].shape[2], dtype=format.result_dtype(dy_TD.dtype))
    base = dy_TD.new_empty(2 if of.arena else 0, dtype=torch.int64)
    return dy_TD.new_empty(dy_TD.shape), scores_R.new_empty(plan[0].shape), dy_SW, dactive, base


@torch.library.custom_op("titan_moe::expert_mlp_over_symm_mem_dw", mutates_args=())
def backward_weight(
    kept: Tensors,
    delayed: Tensors,
    shape: Sequence[int],
    rank: int,
    num_ranks: int,
    format: str,
    sizes: Sequence[int],
) -> tuple[Tensor, Tensor]:
    """Gradients of gate_up, which has this shape, and down, from what `forward` and `backward_input` have kept. Nothing
    is exchanged."""
    of = Sizes(*sizes)
    x_SW, hidden, base, *of_slots = kept
    slots, arena = ExpertSlots(*of_slots), Arena.of(of.arena)
    dy_SW, dactive, delayed_base = delayed
    bases = None, None
    if arena is not None:
        arena.verify(base)
        x_SW, hidden, dy_SW, dactive = arena.buffers
        bases = base, delayed_base
    tiles = None
    if FORMATS[format].rounds_weight_grads:  # by tile: those of the backward
        tiles = plan_tiles(slots.offsets_e, slots.rows_R.numel(), TILE_ROWS, rank, num_ranks, of.usual_slots)
    return FORMATS[format].delayed_dw(dy_SW, x_SW, slots, tiles, dactive, hidden, *bases)


@backward_weight.register_fake
def _(kept: Tensors, delayed: Tensors, shape: Sequence[int], *rest: Any) -> tuple[Tensor, Tensor]:
    (num_experts, _, hidden, width), dactive = shape, delayed[1]
    return dactive.new_empty(shape), dactive.new_empty(num_experts, width, hidden)


class _QueuedMLP(torch.autograd.Function):
    """`forward`, whose weight gradients are computed when a queue asks for them."""

    @staticmethod
    def forward(ctx: Any, delay: Delay, shared: tuple[Any, ...], sizes: Sizes, *tensors: Tensor) -> tuple[Tensor, ...]:
        # few parameters and the rest, as in fused_mlp.py
        x_TD, scores_TK = tensors[:2]
        plan, weights = tensors[2 : 2 + NUM_OF_PLAN], tensors[2 + NUM_OF_PLAN :]
        ctx.set_materialize_grads(False)
        ctx.delay, ctx.shared, ctx.sizes = delay, shared, sizes
        y_TD, overflowed, *kept = forward(x_TD, scores_TK, plan, weights, *shared, [*sizes])
        offsets_e = kept[-1]
        ctx.save_for_backward(*plan, *kept, *weights)
        ctx.mark_non_differentiable(overflowed, offsets_e)
        return y_TD, overflowed, offsets_e

    @staticmethod
    def backward(ctx: Any, dy_TD: Tensor | None, *_: Any) -> tuple[Tensor | None, ...]:
        saved, (_, peer_ptrs_P, rank, format) = ctx.saved_tensors, ctx.shared
        end = NUM_OF_PLAN + NUM_OF_KEPT
        plan, kept, weights = saved[:NUM_OF_PLAN], saved[NUM_OF_PLAN:end], saved[end:]
        rest = (None,) * (NUM_OF_PLAN + len(weights))
        if dy_TD is None:
            return *(None,) * 5, *rest
        dx_TD, dscores_TK, *delayed = backward_input(dy_TD.contiguous(), plan, weights, kept, *ctx.shared, [*ctx.sizes])
        of_ranks = rank, peer_ptrs_P.numel(), format, [*ctx.sizes]
        ctx.delay(partial(backward_weight, kept, delayed, [*weights[0].shape], *of_ranks))
        return None, None, None, dx_TD, dscores_TK, *rest


def run_mlp(
    x_TD: Tensor, scores_TK: Tensor, plan: Tensors, weights: Tensors,
    memory: Tensor, peer_ptrs_P: Tensor, rank: int, format: str, sizes: Sizes,
    delay: Delay | None = None,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """Results, whether slots overflowed, and the running ends of each expert's slots. Arguments are those of `forward`.

    `delay`, if given, takes over the computation of the weight gradients in backward; weights have no clones then, and
    the arena, if there is one, can delay.
    """
    shared = memory, peer_ptrs_P, rank, format
    if delay is not None:
        return _QueuedMLP.apply(delay, shared, sizes, x_TD, scores_TK, *plan, *weights)
    y_TD, overflowed, *_, offsets_e = forward(x_TD, scores_TK, plan, weights, *shared, [*sizes])
    return y_TD, overflowed, offsets_e


@register_flop_formula(torch.ops.titan_moe.expert_mlp_over_symm_mem_dx)
def _count_input(dy: Any, plan: Any, weights: Any, *rest: Any, **_: Any) -> int:
    return flops_of_a_pass(Sizes(*rest[-1]).num_slots, weights[0])


@register_flop_formula(torch.ops.titan_moe.expert_mlp_over_symm_mem_dw)
def _count_weight(kept: Any, delayed: Any, shape: Any, *rest: Any, **_: Any) -> int:
    return flops_of_a_pass(Sizes(*rest[-1]).num_slots, shape)
