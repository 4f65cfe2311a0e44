"""Rows that come and go beside the experts' GEMMs, tile by tile: no exchange stands before the experts or behind them.

P ranks of the group · T tokens on each of them · K choices · S rows that a rank has room for · R expert slots ·
e experts on this rank · D width · F hidden width

The first GEMM of the experts begins with the rows that are there: some of its programs fetch the others, in the order
in which its tiles want them. The last one's sums leave as soon as their slots are done. The gradients of results come
and those of rows leave in the same way, beside the two GEMMs of backward that want and make them. What stays is what no
GEMM can hide: the plan, the choices of the rows that come, the first tiles' rows and the last tiles' sums.
(kernels/travel.py; after COMET, arXiv:2502.19811, and FlashDMoE, arXiv:2506.04667, which give the programs of one
kernel these two kinds of work, too.)

The numbers are those of `SymmMemDispatcher` and the fused experts, bit for bit but for the GEMMs that make what is
summed: those are Triton's here, so that they can tell what is done, and PyTorch's there.

Each operation is two whole exchanges with the experts between them, barriers included, all on the stream of whoever
computes: nothing is on its way when it returns. Weight gradients are computed before the last barrier of a backward, so
that a rank waits with them for others that are late.

Used alone, in the place of `SymmMemDispatcher` in symm_mem.py, its memory and its calls the same:

    experts = GroupedExperts(num_local_experts, width, hidden, choose_expert_mlp("fused", "activation"))
    dispatcher = SymmMemFusedDispatcher(num_experts, memory)
    offered = dispatcher.dispatch(x_TD, topk_ids_TK, topk_scores_TK)
    y_TD = dispatcher.combine(experts(offered), offered)
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils.flop_counter import register_flop_formula

from titan_moe.dispatch.base import Exchange, Pending, Routed
from titan_moe.dispatch.symm_mem import SymmMemDispatcher, SymmMemExchange, SymmMemory, known_plan
from titan_moe.kernels.experts.composite_mlp import ExpertMLP
from titan_moe.kernels.experts.fused_mlp import fused_expert_mlp, weight_grads
from titan_moe.kernels.experts.gather_mm import gather_mm
from titan_moe.kernels.experts.grouped_mm import join
from titan_moe.kernels.experts.slot_mm import slot_mm
from titan_moe.kernels.experts.slot_sum import slot_sum
from titan_moe.kernels.experts.swiglu_backward import swiglu_backward
from titan_moe.kernels.experts.tiles import Tiles, plan_tiles
from titan_moe.kernels.experts.up import TILE_ROWS, expert_up
from titan_moe.kernels.permute.counting_sort import scores_of_slots, sort_choices
from titan_moe.kernels.symm_mem.arrays import SymmArrays, symm_arrays
from titan_moe.kernels.symm_mem.assignments import get_assignments, own_scores, pick_scores, put_scores
from titan_moe.kernels.symm_mem.barrier import symm_barrier
from titan_moe.kernels.symm_mem.row_plan import RowPlan
from titan_moe.kernels.symm_mem.rows import own_rows, put_rows, sum_partial_results
from titan_moe.kernels.symm_mem.tile_schedule import TileSchedule, clear_rows_without_slots, schedule_tiles
from titan_moe.plan.roofline import visit_probability

MAX_SLOTS_PER_ROW_OVERLAPPED = 3.0
"""Up to so many on average, sums leave beside the last GEMM. Where rows have more, few of them are done before its end,
and all multiprocessors sum faster than those that it leaves (measured: at 1.7 a sixth faster, at 2.1 8 %, at 4 slower
by 10 to 16 %)."""


class CombinedOutput(NamedTuple):
    """Results that are at home."""

    y_TD: Tensor
    overflowed: Tensor
    """int32 scalar, 1 if some choice found no slot."""


class PeerTokens(NamedTuple):
    """This rank's own rows, for peers to fetch, in the place of rows that have come (`Routed`)."""

    x_TD: Tensor
    scores_TK: Tensor
    ids_TK: Tensor
    sent_mask_TP: Tensor
    recv_tokens_PT: Tensor
    recv_offsets_Q: Tensor
    memory: SymmMemory
    num_local_experts: int
    max_rows: int
    num_slots: int
    exchange: Exchange

    @property
    def sizes(self) -> tuple[int, int]:
        """Own rows, and slots that there may be."""
        return self.x_TD.shape[0], self.num_slots

    def run_mlp(self, mlp: ExpertMLP, x_TD: Tensor, weights: Sequence[Tensor]) -> CombinedOutput:
        """Bring every row to its experts and its result home.

        Raises: ValueError for experts with another MLP than the fused one.
        """
        if mlp is not fused_expert_mlp:
            raise ValueError('experts fetch their rows only where they are fused; take perf.kernels = "fused"')
        own_and_clones = [*(weight.contiguous() for weight in weights), None, None][:4]
        plan = (self.ids_TK, self.sent_mask_TP, self.recv_tokens_PT, self.recv_offsets_Q)
        sizes = (self.num_local_experts, self.max_rows, self.num_slots)
        y_TD, overflowed, *_ = _serve(x_TD, self.scores_TK, *plan, *own_and_clones, *self.memory, *sizes)
        return CombinedOutput(y_TD, overflowed)


class SymmMemFusedDispatcher(SymmMemDispatcher):
    """Let the experts fetch rows and deliver results themselves.

    Where a step is taken again at sizes that the host reads, rows are moved before and after, as by the parent.
    """

    def start_dispatch(self, x_TD: Tensor, exchange: SymmMemExchange) -> Pending:
        return super().start_dispatch(x_TD, exchange) if self.capacity.reads_sizes_on_host else x_TD

    def finish_dispatch(self, sent: Pending, exchange: SymmMemExchange) -> Routed | PeerTokens:  # type: ignore[override]
        if self.capacity.reads_sizes_on_host:
            return super().finish_dispatch(sent, exchange)
        ids_TK, scores_TK, plan, max_rows = exchange
        if self.capacity.is_bounded:
            self.capacity.book(plan.overflowed)
        worst = max_rows * min(ids_TK.shape[1], self.num_local_experts)
        num_slots = self.capacity.num_slots(ids_TK, balanced=ids_TK.numel(), worst=worst)
        sizes = (self.num_local_experts, max_rows, num_slots)
        return PeerTokens(sent, scores_TK, ids_TK, *plan[:3], self.memory, *sizes, exchange)

    def start_combine(self, y: Any, exchange: SymmMemExchange) -> Pending:
        if not isinstance(y, CombinedOutput):
            return super().start_combine(y, exchange)
        if self.capacity.is_bounded:
            self.capacity.book(y.overflowed)
        return y.y_TD


@torch.library.custom_op("titan_moe::expert_mlp_over_symm_mem", mutates_args=())
def _serve(
    x_TD: Tensor, scores_TK: Tensor, ids_TK: Tensor, sent_mask_TP: Tensor, recv_tokens_PT: Tensor, recv_offsets_Q: Tensor,
    gate_up_e2FD: Tensor, down_eDF: Tensor, gate_up_c2FD: Tensor | None, down_cDF: Tensor | None,
    memory: Tensor, peer_ptrs_P: Tensor, rank: int, num_local_experts: int, max_rows: int, num_slots: int,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """Results, whether slots overflowed, and what backward needs: x_SD, hidden_R2F, rows_R, slots_SK, scores_R,
    offsets_e."""
    plan = known_plan(sent_mask_TP, recv_tokens_PT, recv_offsets_Q)
    arrays = _arrays_of(memory, peer_ptrs_P, x_TD, scores_TK)
    symm_barrier(arrays.signals, rank)
    own_rows(arrays.rows).copy_(x_TD)
    arrays.ids.local.copy_(ids_TK)
    own_scores(arrays.scores).copy_(scores_TK)
    symm_barrier(arrays.signals, rank)
    ids_SK, scores_SK = get_assignments(plan, arrays, rank, num_local_experts, max_rows)
    rows_R, slots_SK, scores_R, offsets_e, overflowed = sort_choices(ids_SK, scores_SK, num_local_experts, num_slots)
    tiles, schedule = _order(rows_R, slots_SK, offsets_e, plan, arrays, rank)
    x_SD = x_TD.new_empty(max_rows, x_TD.shape[1])
    gate_up, down = join(gate_up_e2FD, gate_up_c2FD), join(down_eDF, down_cDF)
    hidden_R2F, active_RF = expert_up(x_SD, rows_R, scores_R, gate_up, tiles, schedule=schedule)
    symm_barrier(arrays.signals, rank)
    if _overlaps_put(ids_TK, sent_mask_TP, num_local_experts):
        slot_mm(active_RF, down, tiles, is_transposed=True, schedule=schedule)
        _clear(rows_R, slots_SK, plan, arrays, rank, num_local_experts)
    else:
        y_SD = slot_sum(slot_mm(active_RF, down, tiles, is_transposed=True), slots_SK)
        put_rows(y_SD, plan, arrays.rows, rank)
    symm_barrier(arrays.signals, rank)
    y_TD = sum_partial_results(sent_mask_TP, arrays.rows)
    return y_TD, overflowed, x_SD, hidden_R2F, rows_R, slots_SK, scores_R, offsets_e


@_serve.register_fake
def _(
    x_TD: Tensor, scores_TK: Tensor, ids_TK: Tensor, sent_mask_TP: Tensor, recv_tokens_PT: Tensor, recv_offsets_Q: Tensor,
    gate_up_e2FD: Tensor, down_eDF: Tensor, gate_up_c2FD: Tensor | None, down_cDF: Tensor | None,
    memory: Tensor, peer_ptrs_P: Tensor, rank: int, num_local_experts: int, max_rows: int, num_slots: int,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    def index(*shape: int) -> Tensor:
        return ids_TK.new_empty(shape, dtype=torch.int32)

    x_SD, hidden_R2F = (
        x_TD.new_empty(n, w) for n, w in ((max_rows, x_TD.shape[1]), (num_slots, 2 * down_eDF.shape[2]))
    )
    slots = (index(num_slots), index(max_rows, ids_TK.shape[1]), scores_TK.new_empty(num_slots))
    return x_TD.new_empty(x_TD.shape), index(), x_SD, hidden_R2F, *slots, index(num_local_experts)


@torch.library.custom_op("titan_moe::expert_mlp_fetched_backward", mutates_args=())
def _serve_backward(
    dy_TD: Tensor, ids_TK: Tensor, sent_mask_TP: Tensor, recv_tokens_PT: Tensor, recv_offsets_Q: Tensor,
    gate_up_e2FD: Tensor, down_eDF: Tensor, gate_up_c2FD: Tensor | None, down_cDF: Tensor | None,
    x_SD: Tensor, hidden_R2F: Tensor, rows_R: Tensor, slots_SK: Tensor, scores_R: Tensor, offsets_e: Tensor,
    memory: Tensor, peer_ptrs_P: Tensor, rank: int, num_local_experts: int, is_trained: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """Gradients of the rows, of the scores, and of the weights, clones behind own experts (empty if none is wanted)."""
    plan = known_plan(sent_mask_TP, recv_tokens_PT, recv_offsets_Q)
    arrays = _arrays_of(memory, peer_ptrs_P, dy_TD, ids_TK)
    symm_barrier(arrays.signals, rank)
    own_rows(arrays.rows).copy_(dy_TD)
    tiles, schedule = _order(rows_R, slots_SK, offsets_e, plan, arrays, rank)
    symm_barrier(arrays.signals, rank)
    dy_SD = torch.empty_like(x_SD)
    gate_up, down = join(gate_up_e2FD, gate_up_c2FD), join(down_eDF, down_cDF)
    dactive_RF = gather_mm(dy_SD, rows_R, down, tiles, schedule=schedule)
    dhidden_R2F, active_RF, dscores_R = swiglu_backward(dactive_RF, hidden_R2F, scores_R, offsets_e)
    symm_barrier(arrays.signals, rank)
    put_scores(scores_of_slots(dscores_R, slots_SK), plan, arrays.scores, rank)
    if _overlaps_put(ids_TK, sent_mask_TP, num_local_experts):
        slot_mm(dhidden_R2F, gate_up.flatten(1, 2), tiles, schedule=schedule)
        _clear(rows_R, slots_SK, plan, arrays, rank, num_local_experts)
    else:
        put_rows(slot_sum(slot_mm(dhidden_R2F, gate_up.flatten(1, 2), tiles), slots_SK), plan, arrays.rows, rank)
    if is_trained:
        grads = weight_grads(dy_SD, x_SD, rows_R, offsets_e, dhidden_R2F, active_RF)
    else:
        grads = (gate_up.new_empty(0), down.new_empty(0))
    symm_barrier(arrays.signals, rank)
    dx_TD = sum_partial_results(sent_mask_TP, arrays.rows)
    return dx_TD, pick_scores(ids_TK.contiguous(), sent_mask_TP, arrays.scores, num_local_experts), *grads


@_serve_backward.register_fake
def _(
    dy_TD: Tensor, ids_TK: Tensor, sent_mask_TP: Tensor, recv_tokens_PT: Tensor, recv_offsets_Q: Tensor,
    gate_up_e2FD: Tensor, down_eDF: Tensor, gate_up_c2FD: Tensor | None, down_cDF: Tensor | None,
    x_SD: Tensor, hidden_R2F: Tensor, rows_R: Tensor, slots_SK: Tensor, scores_R: Tensor, offsets_e: Tensor,
    memory: Tensor, peer_ptrs_P: Tensor, rank: int, num_local_experts: int, is_trained: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    weights = (gate_up_e2FD, down_eDF)
    grads = (w.new_empty(num_local_experts, *w.shape[1:]) if is_trained else w.new_empty(0) for w in weights)
    return dy_TD.new_empty(dy_TD.shape), scores_R.new_empty(ids_TK.shape), *grads


def _arrays_of(memory: Tensor, peer_ptrs_P: Tensor, rows_TD: Tensor, choices_TK: Tensor) -> SymmArrays:
    """The arrays of a layer's exchanges: the same for its rows and for its gradients."""
    (num_tokens, width), num_choices = rows_TD.shape, choices_TK.shape[1]
    scores = torch.promote_types(rows_TD.dtype, torch.float32)
    return symm_arrays(memory, peer_ptrs_P, num_tokens, width, num_choices, rows_TD.dtype, scores)


def _overlaps_put(ids_TK: Tensor, sent_mask_TP: Tensor, num_local_experts: int) -> bool:
    """Whether sums leave beside the GEMM, by what random routing makes of a row on a rank that it visits."""
    num_ranks, num_choices = sent_mask_TP.shape[1], ids_TK.shape[1]
    visits = num_ranks * visit_probability(num_ranks * num_local_experts, num_local_experts, num_choices)
    return num_choices <= MAX_SLOTS_PER_ROW_OVERLAPPED * visits


def _clear(
    rows_R: Tensor, slots_SK: Tensor, plan: RowPlan, arrays: SymmArrays, rank: int, num_local_experts: int
) -> None:
    """Where slots are bounded a row may find none. Its step is void, but what reads its result must find numbers."""
    if rows_R.numel() < slots_SK.shape[0] * min(slots_SK.shape[1], num_local_experts):
        clear_rows_without_slots(slots_SK, plan, arrays.rows, rank)


def _order(
    rows_R: Tensor, slots_SK: Tensor, offsets_e: Tensor, plan: RowPlan, arrays: SymmArrays, rank: int
) -> tuple[Tiles, TileSchedule]:
    """The tiles of both GEMMs, each expert's beginning where its rows are this rank's own, and how rows come and go."""
    tiles = plan_tiles(offsets_e, rows_R.numel(), TILE_ROWS, rank, arrays.rows.peer_ptrs_P.numel())
    return tiles, schedule_tiles(rows_R, slots_SK, tiles, plan, arrays.rows, rank)


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    ctx.set_materialize_grads(False)
    # the memory is no saved tensor: whoever offloads those would copy all of it
    _, _, *saved, ctx.memory, ctx.peer_ptrs_P, ctx.rank, ctx.num_local_experts, _, _ = inputs
    ctx.save_for_backward(*saved, *output[2:])
    ctx.mark_non_differentiable(*output[1:])


def _backward(ctx: Any, dy_TD: Tensor | None, *_: Any) -> tuple[Tensor | None, ...]:
    if dy_TD is None:
        return (None,) * 16
    ids_TK, *saved = ctx.saved_tensors
    gate_up_e2FD, clones = saved[3], saved[5]
    is_trained = any(ctx.needs_input_grad[6:10])
    dx_TD, dscores_TK, *grads = _serve_backward(
        dy_TD.contiguous(), ids_TK, *saved, ctx.memory, ctx.peer_ptrs_P, ctx.rank, ctx.num_local_experts, is_trained
    )
    weights: list[Tensor | None] = [None] * 4
    if is_trained:
        num_own = len(gate_up_e2FD)
        weights[:2] = (grad[:num_own] for grad in grads)
        if clones is not None:
            weights[2:] = (grad[num_own:] for grad in grads)
    return dx_TD, dscores_TK, *(None,) * 4, *weights, *(None,) * 6


_serve.register_autograd(_backward, setup_context=_save)


@register_flop_formula(torch.ops.titan_moe.expert_mlp_over_symm_mem)
def _count(*shapes: Any, **_: Any) -> int:
    """Three products of every slot with a matrix of its expert."""
    _, _, hidden, width = shapes[6]
    return 6 * shapes[15] * hidden * width


@register_flop_formula(torch.ops.titan_moe.expert_mlp_fetched_backward)
def _count_backward(*shapes: Any, **_: Any) -> int:
    _, _, hidden, width = shapes[5]
    return (12 if shapes[19] else 6) * shapes[11][0] * hidden * width
