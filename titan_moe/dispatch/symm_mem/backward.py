"""The backward of the expert MLP over symmetric memory (mlp.py), and its wiring to autograd.

P ranks of the group · T tokens on each of them · K choices · S rows that a rank has room for · R expert slots ·
D width · F hidden width

It is one operation that computes weight gradients before its last barrier, while other ranks may be late. Or, where a
schedule delays weight gradients, it is two: gradients of rows and scores, with both exchanges, and gradients of
weights, which exchanges nothing. In between, gradients of received results and of activations are kept, in an arena if
there is one (kernels/experts/arena.py). The arena must keep rows too: where backward would get them again, weight
gradients are not delayed.
"""

from collections.abc import Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils.flop_counter import register_flop_formula

from titan_moe.dispatch.symm_mem.mlp import NUM_OF_KEPT, NUM_OF_PLAN, Kept, Peers, Sizes, forward, peers_of
from titan_moe.kernels.delayed_weight_grads import DelayedWeightGrads
from titan_moe.kernels.experts.arena import Arena
from titan_moe.kernels.experts.format import Passes, Work
from titan_moe.kernels.experts.formats import FORMATS
from titan_moe.kernels.experts.fused_mlp import Keep
from titan_moe.kernels.experts.passes import flops_of_a_pass
from titan_moe.kernels.experts.slots import ExpertSlots
from titan_moe.kernels.experts.tiles import plan_tiles
from titan_moe.kernels.experts.up import TILE_ROWS
from titan_moe.kernels.experts.weights import Tensors
from titan_moe.kernels.permute.counting_sort import scores_of_slots
from titan_moe.kernels.symm_mem.assignments import pick_scores, put_scores
from titan_moe.kernels.symm_mem.rows import get_rows, sum_partial_results


class Delayed(NamedTuple):
    """What weight gradients need of a backward."""

    dy_SW: Tensor  # in an arena its gradients of results
    dactive: Tensor | None  # in an arena its gradients of activations; None if nothing is delayed
    base: Tensor | None  # in an arena int64 [2], as `Arena.delay` returns it


class Backward(NamedTuple):
    """The operands of a backward."""

    passes: Passes
    peers: Peers
    work: Work
    rows: Kept

    @staticmethod
    def of(
        plan: Tensors, weights: Tensors, kept: Tensors, memory: Tensor, peer_ptrs_P: Tensor, rank: int, format: str,
        sizes: Sequence[int], like_TD: Tensor,
    ) -> "Backward":  # fmt: skip
        x_SW, hidden, base, *of_slots = kept
        peers = peers_of(plan, memory, peer_ptrs_P, rank, FORMATS[format], Sizes(*sizes), like_TD)
        needs = peers.sizes
        rows = Kept(x_SW, hidden, None)
        if (arena := needs.kept_in()) is not None:
            rows = Kept(arena.rows_AW, arena.hidden_BH, base)
            arena.verify(base)
        if needs.keeps == Keep.NOTHING:
            rows = rows._replace(x_SW=x_SW.new_empty(needs.max_rows, x_SW.shape[1]))
        if needs.keeps < Keep.ALL:
            rows = rows._replace(hidden=peers.new_hidden(weights[1].shape[2]))
        work = peers.schedule(ExpertSlots(*of_slots))
        return Backward(peers.format.passes(weights), peers, work, rows)

    def put_gradients(self, dy_TD: Tensor, delayed: Delayed | None = None) -> tuple[Tensor, Any]:
        """Get gradients of results, and put those of rows and scores. Returns what weight gradients need, the first of
        it in `delayed`, if it is given."""
        (passes, peers, work, rows), sizes = self, self.peers.sizes
        dy_TW = peers.format.pack(dy_TD)
        peers.barrier()
        peers.offer(dy_TW)
        peers.barrier()
        if delayed is None:
            delayed = Delayed(dy_TW.new_empty(sizes.max_rows, dy_TW.shape[1]), None, None)
        dy_SW, dactive, base = delayed
        if work.schedule is None:
            get_rows(peers.plan, peers.sent, peers.rank, sizes.max_rows, out=dy_SW, base=base)
        gradients, dscores_R = passes.d_down(dy_SW, rows.x_SW, work, rows.hidden, rows.base, dactive, base)
        peers.barrier()
        put_scores(scores_of_slots(dscores_R, work.slots.slots_SK), peers.plan, peers.arrays.scores, peers.rank)
        peers.put_sums(partial(passes.d_up, gradients), work)
        return dy_SW, gradients


def _sum_gradients(peers: Peers) -> tuple[Tensor, Tensor]:
    """Gradients of this rank's rows and scores, from what all ranks have put."""
    peers.barrier()
    sent_mask_TP = peers.plan.sent_mask_TP
    dx_TD = sum_partial_results(sent_mask_TP, peers.arrays.rows)
    ids_TK, num_local_experts = peers.ids_TK.contiguous(), peers.sizes.num_local_experts
    return dx_TD, pick_scores(ids_TK, sent_mask_TP, peers.arrays.scores, num_local_experts)


@torch.library.custom_op("titan_moe::expert_mlp_over_symm_mem_backward", mutates_args=())
def backward(
    dy_TD: Tensor, x_TD: Tensor, plan: Tensors, weights: Tensors, kept: Tensors,
    memory: Tensor, peer_ptrs_P: Tensor, rank: int, format: str, sizes: Sequence[int], is_trained: bool,
) -> list[Tensor]:  # fmt: skip
    """Gradients of rows, scores, and joined weights (none unless `is_trained`)."""
    run = Backward.of(plan, weights, kept, memory, peer_ptrs_P, rank, format, sizes, dy_TD)
    passes, peers, work, rows = run
    arena, keeps = peers.sizes.kept_in(), peers.sizes.keeps
    if keeps == Keep.NOTHING or (arena is not None and arena.backward_recomputes):
        x_TW = peers.format.pack(x_TD)
        peers.barrier()
        peers.offer(x_TW)
        peers.barrier()
        peers.up(passes, weights[1].shape[2], work, rows)
    elif keeps < Keep.ALL:
        passes.up(rows.x_SW, Work(work.slots, work.tiles), rows.hidden, rows.base)
    dy_SW, gradients = run.put_gradients(dy_TD)
    x_SW, base, hidden = rows.x_SW, rows.base, rows.hidden if peers.format.dw_reads_hidden else None
    del run, rows  # and with them hidden states that were made again
    grads: Tensors = []
    if is_trained:
        grads = peers.format.dw(dy_SW, x_SW, work.slots, work.tiles, gradients, hidden, base)
    return [*_sum_gradients(peers), *grads]


@backward.register_fake
def _(dy_TD: Tensor, x_TD: Any, plan: Tensors, weights: Tensors, kept: Tensors, *rest: Any) -> list[Tensor]:
    (*_, scores_R, _), (*_, format, sizes, is_trained) = kept, rest
    shape = [Sizes(*sizes).num_local_experts, *weights[0].shape[1:]]
    grads = FORMATS[format].new_weight_grads(dy_TD, shape) if is_trained else []
    return [dy_TD.new_empty(dy_TD.shape), scores_R.new_empty(plan[0].shape), *grads]


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
        assert arena.can_delay and run.rows.base is not None, "who gives a handle of `Sizes.delay` says so"
        base = arena.delay(run.rows.base)
        delayed = Delayed(arena.dy_CW, arena.dactive_GF, base)
    run.put_gradients(dy_TD, delayed)
    dx_TD, dscores_TK = _sum_gradients(run.peers)
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
) -> list[Tensor]:
    """Gradients of gate_up, which has this shape, down and biases, from what `forward` and `backward_input` have kept.
    Nothing is exchanged."""
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
    return list(FORMATS[format].delayed_dw(dy_SW, x_SW, slots, tiles, dactive, hidden, *bases))


@backward_weight.register_fake
def _(kept: Tensors, delayed: Tensors, shape: Sequence[int], *rest: Any) -> list[Tensor]:
    return FORMATS[rest[-2]].new_weight_grads(delayed[1], shape)


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    ctx.set_materialize_grads(False)
    # the memory must not be a saved tensor: offloading would copy all of it
    x_TD, _, plan, weights, *ctx.shared = inputs
    _, overflowed, *kept = output
    # with an arena backward may have to send the rows again; the router keeps them in any case
    of = Sizes(*ctx.shared[-1])
    sent = x_TD if of.uses_arena or of.keeps == Keep.NOTHING else x_TD.new_empty(0)
    ctx.save_for_backward(sent, *plan, *kept, *weights)
    ctx.mark_non_differentiable(overflowed, *kept)


def _autograd_backward(ctx: Any, dy_TD: Tensor | None, *_: Any) -> tuple[Any, ...]:
    of_weights, are_trained = [None] * len(ctx.needs_input_grad[3]), any(ctx.needs_input_grad[3])
    if dy_TD is None:
        return None, None, [None] * 4, of_weights, *(None,) * 5
    (x_TD, *saved), (_, peer_ptrs_P, rank, format, sizes) = ctx.saved_tensors, ctx.shared
    end = NUM_OF_PLAN + NUM_OF_KEPT
    plan, kept, weights = saved[:NUM_OF_PLAN], saved[NUM_OF_PLAN:end], saved[end:]
    dy_TD, delay = dy_TD.contiguous(), DelayedWeightGrads.of(Sizes(*sizes).delay)
    if delay is None:
        dx_TD, dscores_TK, *grads = backward(dy_TD, x_TD, plan, weights, kept, *ctx.shared, are_trained)
        of_weights = FORMATS[format].split(weights, grads) if are_trained else of_weights
    else:
        dx_TD, dscores_TK, *delayed = backward_input(dy_TD, plan, weights, kept, *ctx.shared)
        of_ranks = rank, peer_ptrs_P.numel(), format, sizes
        delay(partial(backward_weight, kept, delayed, [*weights[0].shape], *of_ranks))
    return dx_TD, dscores_TK, [None] * 4, of_weights, *(None,) * 5


forward.register_autograd(_autograd_backward, setup_context=_save)


def run_mlp(*args: Any) -> tuple[Tensor, Tensor, Tensor]:
    """`forward`, differentiable: results, whether slots overflowed, and the running ends of each expert's slots."""
    y_TD, overflowed, *_, offsets_e = forward(*args)
    return y_TD, overflowed, offsets_e


@register_flop_formula(torch.ops.titan_moe.expert_mlp_over_symm_mem_dx)
def _count_input(dy: Any, plan: Any, weights: Any, *rest: Any, **_: Any) -> int:
    return flops_of_a_pass(Sizes(*rest[-1]).num_slots, weights[0])


@register_flop_formula(torch.ops.titan_moe.expert_mlp_over_symm_mem_dw)
def _count_weight(kept: Any, delayed: Any, shape: Any, *rest: Any, **_: Any) -> int:
    return flops_of_a_pass(Sizes(*rest[-1]).num_slots, shape)


@register_flop_formula(torch.ops.titan_moe.expert_mlp_over_symm_mem_backward)
def _count_backward(dy: Any, x: Any, plan: Any, weights: Any, kept: Any, *rest: Any, **_: Any) -> int:
    sizes, is_trained = rest[-2:]
    return (1 + is_trained) * flops_of_a_pass(Sizes(*sizes).num_slots, weights[0])
