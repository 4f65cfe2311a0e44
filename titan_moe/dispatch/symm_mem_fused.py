"""Symmetric-memory dispatcher with fused communication: copy blocks get and put rows beside the experts' GEMMs.

P ranks of the group · T tokens on each of them · K choices · S rows that a rank has room for · R expert slots ·
e experts on this rank · D width · F hidden width

Thread blocks of the experts' first GEMM get rows in the order in which its tiles need them. Sums of the last GEMM are
put as soon as their slots are done, or after it if rows have many slots (MAX_SLOTS_PER_ROW_OVERLAPPED). Backward gets
gradients of results and puts those of rows beside its two GEMMs in the same way. Exposed are the plan, the assignments,
the first tiles' rows and the last tiles' sums. After COMET, arXiv:2502.19811, and FlashDMoE, arXiv:2506.04667, where
thread blocks of one kernel do both kinds of work.

Results are bit for bit those of `SymmMemDispatcher` and the fused experts, except for the GEMMs before the sums: here
they are Triton's, which can signal completion, there PyTorch's.

Each operation is two whole exchanges with the experts between them, barriers included, on the current stream: nothing
is pending when it returns. Backward computes weight gradients before its last barrier, while other ranks may be late.
Operations take named tuples as lists of their tensors.

Used alone, with memory and calls as in symm_mem.py:

    experts = GroupedExperts(num_local_experts, width, hidden, choose_expert_mlp("fused", "activation"))
    dispatcher = SymmMemFusedDispatcher(num_experts, memory)
    inputs = dispatcher.dispatch(x_TD, topk_ids_TK, topk_scores_TK)
    y_TD = dispatcher.combine(experts(inputs), inputs)
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils.flop_counter import register_flop_formula

from titan_moe.dispatch.base import Exchange, ExpertInputs, Pending
from titan_moe.dispatch.symm_mem import SymmMemDispatcher, SymmMemExchange, SymmMemory, known_plan
from titan_moe.kernels.experts import stages
from titan_moe.kernels.experts.composite_mlp import ExpertMLP
from titan_moe.kernels.experts.fused_mlp import fused_expert_mlp, matrices
from titan_moe.kernels.experts.slot_mm import slot_mm
from titan_moe.kernels.experts.slot_sum import slot_sum
from titan_moe.kernels.experts.slots import ExpertSlots
from titan_moe.kernels.experts.tiles import Tiles, plan_tiles
from titan_moe.kernels.experts.up import TILE_ROWS
from titan_moe.kernels.experts.weights import ExpertWeights, Tensors
from titan_moe.kernels.permute.counting_sort import scores_of_slots, sort_assignments
from titan_moe.kernels.symm_mem.arrays import SymmArrays, symm_arrays
from titan_moe.kernels.symm_mem.assignments import get_assignments, own_scores, pick_scores, put_scores
from titan_moe.kernels.symm_mem.barrier import symm_barrier
from titan_moe.kernels.symm_mem.row_plan import RowPlan
from titan_moe.kernels.symm_mem.rows import own_rows, put_rows, sum_partial_results
from titan_moe.kernels.symm_mem.tile_schedule import TileSchedule, clear_rows_without_slots, schedule_tiles
from titan_moe.plan.roofline import visit_probability

MAX_SLOTS_PER_ROW_OVERLAPPED = 3.0
"""Up to so many on average, sums are put beside the last GEMM. With more, few rows are done before its end, and all
multiprocessors sum faster afterwards (measured: beside is a sixth faster at 1.7, 8 % at 2.1, 10-16 % slower at 4)."""


class CombinedOutput(NamedTuple):
    """Results on the ranks of their tokens."""

    y_TD: Tensor
    overflowed: Tensor
    """int32 scalar, 1 if slots overflowed."""


class Sizes(NamedTuple):
    """Sizes known on the host."""

    num_local_experts: int
    max_rows: int
    num_slots: int


class PeerTokens(NamedTuple):
    """`ExpertInputs` before rows are exchanged: this rank's own, which peers will get."""

    x_TD: Tensor
    sent: SymmMemExchange
    memory: SymmMemory
    num_local_experts: int
    num_slots: int
    exchange: Exchange

    @property
    def rows(self) -> Tensor:
        return self.x_TD

    @property
    def sizes(self) -> tuple[int, int]:
        return self.x_TD.shape[0], self.num_slots

    def run_mlp(self, mlp: ExpertMLP, rows: Tensor, weights: ExpertWeights) -> CombinedOutput:
        """Get rows, compute their slots, and combine the results.

        Raises: ValueError for experts with another MLP than the fused one.
        """
        if mlp is not fused_expert_mlp:
            raise ValueError('experts get their rows only where they are fused; take perf.kernels = "fused"')
        ids_TK, scores_TK, plan, max_rows = self.sent
        sizes = Sizes(self.num_local_experts, max_rows, self.num_slots)
        y_TD, overflowed, *_ = _forward(rows, scores_TK, [ids_TK, *plan[:3]], matrices(weights), *self.memory, [*sizes])
        return CombinedOutput(y_TD, overflowed)

    def with_exchange(self, exchange: Exchange) -> "PeerTokens":
        return self._replace(exchange=exchange)


class SymmMemFusedDispatcher(SymmMemDispatcher):
    """The experts get rows and put results. A step that is repeated at sizes that the host reads runs as in the
    parent."""

    def start_dispatch(self, x_TD: Tensor, exchange: SymmMemExchange) -> Pending:
        return super().start_dispatch(x_TD, exchange) if self.capacity.reads_sizes_on_host else x_TD

    def finish_dispatch(self, sent: Pending, exchange: SymmMemExchange) -> ExpertInputs:
        if self.capacity.reads_sizes_on_host:
            return super().finish_dispatch(sent, exchange)
        ids_TK = exchange.ids_TK
        self.capacity.record_overflow(exchange.plan.overflowed)
        worst = exchange.max_rows * min(ids_TK.shape[1], self.num_local_experts)
        num_slots = self.capacity.num_slots(ids_TK, balanced=ids_TK.numel(), worst=worst)
        return PeerTokens(sent, exchange, self.memory, self.num_local_experts, num_slots, exchange)

    def start_combine(self, y: Any, exchange: SymmMemExchange) -> Pending:
        if not isinstance(y, CombinedOutput):
            return super().start_combine(y, exchange)
        self.capacity.record_overflow(y.overflowed)
        return y.y_TD


class _Peers(NamedTuple):
    """This rank's part of an exchange."""

    plan: RowPlan
    arrays: SymmArrays
    rank: int
    ids_TK: Tensor
    num_local_experts: int

    def barrier(self) -> None:
        symm_barrier(self.arrays.signals, self.rank)

    def schedule(self, slots: ExpertSlots) -> tuple[Tiles, TileSchedule]:
        """The order of tiles and rows in both GEMMs: an expert's tiles begin where its rows are this rank's own."""
        rows_R, slots_SK, _, offsets_e = slots
        tiles = plan_tiles(offsets_e, rows_R.numel(), TILE_ROWS, self.rank, self.arrays.rows.peer_ptrs_P.numel())
        return tiles, schedule_tiles(rows_R, slots_SK, tiles, self.plan, self.arrays.rows, self.rank)

    def overlaps_put(self) -> bool:
        """Whether sums are put beside the GEMM, by the expected number of slots of a row under random routing."""
        num_ranks, num_choices = self.plan.sent_mask_TP.shape[1], self.ids_TK.shape[1]
        visits = num_ranks * visit_probability(num_ranks * self.num_local_experts, self.num_local_experts, num_choices)
        return num_choices <= MAX_SLOTS_PER_ROW_OVERLAPPED * visits

    def put_sums(
        self, stage: Callable[[stages.SlotGemm], Tensor], slots: ExpertSlots, tiles: Tiles, schedule: TileSchedule
    ) -> None:
        """Run a stage that computes slots, and put each row's sum of them, beside the stage's GEMM or after it."""
        num_rows, num_choices = slots.slots_SK.shape
        if not self.overlaps_put():
            y_RD = stage(lambda x_RI, weight_eIO, offs: slot_mm(x_RI, weight_eIO, tiles))
            put_rows(slot_sum(y_RD, slots.slots_SK), self.plan, self.arrays.rows, self.rank)
            return
        stage(lambda x_RI, weight_eIO, offs: slot_mm(x_RI, weight_eIO, tiles, schedule=schedule))
        if slots.rows_R.numel() < num_rows * min(num_choices, self.num_local_experts):
            # a row may have overflowed: its step is skipped, but its result must be finite
            clear_rows_without_slots(slots.slots_SK, self.plan, self.arrays.rows, self.rank)


def _peers(
    plan: Tensors, memory: Tensor, peer_ptrs_P: Tensor, rank: int, num_local_experts: int, like_TD: Tensor
) -> _Peers:
    """View the arrays, whose layout is the same for a layer's rows and its gradients."""
    ids_TK, *of_rows = plan
    (num_tokens, width), num_choices = like_TD.shape, ids_TK.shape[1]
    scores = torch.promote_types(like_TD.dtype, torch.float32)
    arrays = symm_arrays(memory, peer_ptrs_P, num_tokens, width, num_choices, like_TD.dtype, scores)
    return _Peers(known_plan(*of_rows), arrays, rank, ids_TK, num_local_experts)


@torch.library.custom_op("titan_moe::expert_mlp_over_symm_mem", mutates_args=())
def _forward(
    x_TD: Tensor, scores_TK: Tensor, plan: Tensors, weights: Tensors,
    memory: Tensor, peer_ptrs_P: Tensor, rank: int, sizes: Sequence[int],
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """Results, whether slots overflowed, and what backward needs: x_SD, hidden_R2F, and slots.

    `plan` is ids_TK and the first three of a `RowPlan`, `sizes` are `Sizes`.
    """
    num_local_experts, max_rows, num_slots = sizes
    peers = _peers(plan, memory, peer_ptrs_P, rank, num_local_experts, x_TD)
    peers.barrier()
    own_rows(peers.arrays.rows).copy_(x_TD)
    peers.arrays.ids.local.copy_(peers.ids_TK)
    own_scores(peers.arrays.scores).copy_(scores_TK)
    peers.barrier()
    ids_SK, scores_SK = get_assignments(peers.plan, peers.arrays, rank, num_local_experts, max_rows)
    *of_slots, overflowed = sort_assignments(ids_SK, scores_SK, num_local_experts, num_slots)
    slots = ExpertSlots(*of_slots)
    tiles, schedule = peers.schedule(slots)
    x_SD = x_TD.new_empty(max_rows, x_TD.shape[1])
    joined = ExpertWeights.of(weights).join()
    hidden_R2F, active_RF = stages.up(x_SD, slots, joined, tiles, schedule)
    peers.barrier()
    peers.put_sums(lambda gemm: stages.down(active_RF, slots, joined, gemm), slots, tiles, schedule)
    peers.barrier()
    return sum_partial_results(peers.plan.sent_mask_TP, peers.arrays.rows), overflowed, x_SD, hidden_R2F, *slots


@_forward.register_fake
def _(x_TD: Tensor, scores_TK: Tensor, plan: Any, weights: Tensors, *rest: Any) -> tuple[Tensor, ...]:
    def index(*shape: int) -> Tensor:
        return x_TD.new_empty(shape, dtype=torch.int32)

    num_local_experts, max_rows, num_slots = rest[-1]
    x_SD = x_TD.new_empty(max_rows, x_TD.shape[1])
    hidden_R2F = x_TD.new_empty(num_slots, 2 * ExpertWeights.of(weights).down.own.shape[2])
    slots = (index(num_slots), index(max_rows, scores_TK.shape[1]), scores_TK.new_empty(num_slots))
    return x_TD.new_empty(x_TD.shape), index(), x_SD, hidden_R2F, *slots, index(num_local_experts)


@torch.library.custom_op("titan_moe::expert_mlp_over_symm_mem_backward", mutates_args=())
def _backward(
    dy_TD: Tensor, plan: Tensors, weights: Tensors, kept: Tensors,
    memory: Tensor, peer_ptrs_P: Tensor, rank: int, num_local_experts: int, is_trained: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """Gradients of rows, scores, and joined weights (empty unless `is_trained`)."""
    x_SD, hidden_R2F, *of_slots = kept
    slots = ExpertSlots(*of_slots)
    peers = _peers(plan, memory, peer_ptrs_P, rank, num_local_experts, dy_TD)
    peers.barrier()
    own_rows(peers.arrays.rows).copy_(dy_TD)
    tiles, schedule = peers.schedule(slots)
    peers.barrier()
    dy_SD = torch.empty_like(x_SD)
    joined = ExpertWeights.of(weights).join()
    dhidden_R2F, active_RF, dscores_R = stages.d_down(dy_SD, slots, joined, hidden_R2F, tiles, schedule)
    peers.barrier()
    put_scores(scores_of_slots(dscores_R, slots.slots_SK), peers.plan, peers.arrays.scores, rank)
    peers.put_sums(lambda gemm: stages.d_up(dhidden_R2F, slots, joined, gemm), slots, tiles, schedule)
    if is_trained:
        grads = stages.dw(dy_SD, x_SD, slots.rows_R, slots.offsets_e, dhidden_R2F, active_RF)
    else:
        grads = x_SD.new_empty(0), x_SD.new_empty(0)
    peers.barrier()
    sent_mask_TP = peers.plan.sent_mask_TP
    dx_TD = sum_partial_results(sent_mask_TP, peers.arrays.rows)
    dscores_TK = pick_scores(peers.ids_TK.contiguous(), sent_mask_TP, peers.arrays.scores, num_local_experts)
    return dx_TD, dscores_TK, *grads


@_backward.register_fake
def _(dy_TD: Tensor, plan: Tensors, weights: Tensors, kept: Any, *rest: Any) -> tuple[Tensor, ...]:
    (_, _, *of_slots), (*_, num_local_experts, is_trained) = kept, rest
    grads = (w.new_empty((num_local_experts, *w.shape[1:]) if is_trained else 0) for w in weights[:2])
    return dy_TD.new_empty(dy_TD.shape), ExpertSlots(*of_slots).scores_R.new_empty(plan[0].shape), *grads


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    ctx.set_materialize_grads(False)
    # the memory must not be a saved tensor: offloading would copy all of it
    _, _, plan, weights, ctx.memory, ctx.peer_ptrs_P, ctx.rank, ctx.sizes = inputs
    _, overflowed, *kept = output
    ctx.save_for_backward(*plan, *kept, *weights)
    ctx.mark_non_differentiable(overflowed, *kept)


def _autograd_backward(ctx: Any, dy_TD: Tensor | None, *_: Any) -> tuple[Any, ...]:
    are_trained = ctx.needs_input_grad[3]
    if dy_TD is None:
        return None, None, [None] * 4, [None] * len(are_trained), *(None,) * 4
    saved = ctx.saved_tensors
    plan, kept, weights = saved[:4], saved[4:10], saved[10:]
    is_trained, num_local_experts = any(are_trained), Sizes(*ctx.sizes).num_local_experts
    dx_TD, dscores_TK, *grads = _backward(
        dy_TD.contiguous(), plan, weights, kept, ctx.memory, ctx.peer_ptrs_P, ctx.rank, num_local_experts, is_trained
    )
    of_weights = ExpertWeights.of(weights).split(grads) if is_trained else [None] * len(weights)
    return dx_TD, dscores_TK, [None] * 4, of_weights, *(None,) * 4


_forward.register_autograd(_autograd_backward, setup_context=_save)


@register_flop_formula(torch.ops.titan_moe.expert_mlp_over_symm_mem)
def _count(x: Any, scores: Any, plan: Any, weights: Any, *rest: Any, **_: Any) -> int:
    return stages.flops_of_a_pass(Sizes(*rest[-1]).num_slots, ExpertWeights.of(weights).gate_up.own)


@register_flop_formula(torch.ops.titan_moe.expert_mlp_over_symm_mem_backward)
def _count_backward(dy: Any, plan: Any, weights: Any, kept: Any, *rest: Any, **_: Any) -> int:
    is_trained, hidden = rest[-1], kept[1]
    return (1 + is_trained) * stages.flops_of_a_pass(hidden[0], ExpertWeights.of(weights).gate_up.own)
