"""Symmetric-memory dispatcher: rows are sent once a rank, by kernels that access peers' memory; no host read.

P ranks of the group · T tokens on each rank · K experts a token · S rows that a rank has room for · D width

It moves the bytes of `alltoall` without its host read: counts are exchanged and read on the device, and sizes are those
of the worst case, P·T rows, or of random routing times a capacity factor. Only while that bound is lifted, as for a
step that has overflowed, the host reads sizes: the worst case of a large model exceeds the memory.
kernels/symm_mem/arrays.py explains the phases of an exchange, and why two barriers make its memory free for the next.

Each custom op here is a complete exchange, barriers included; so are those of clones (clones/weights.py). The contents
of the symmetric memory are not read after an exchange. So to the compiler an op is a function of its other arguments.
It may be removed if no rank needs its result, or moved, as long as all ranks run the same exchanges in the same order,
as with collectives. Exchanges of a layer depend on each other's results, which fixes their order on every rank, and
layers depend on each other. The pieces of a layer (fused.py) do not: they must run eagerly, forward in the order of the
calls and backward in autograd's, which follows from that of the calls and so is the same on all ranks.

Used alone, with a process group `group` of the GPUs of one node and this rank's `experts`:

    num_bytes = symm_bytes(group.size(), most_tokens, width, top_k, torch.bfloat16)
    memory = open_symm_memory(num_bytes, group, torch.device("cuda", local_rank))
    dispatcher = SymmMemDispatcher(num_experts, memory)  # one a layer, or one for all: they share the memory
    routed = dispatcher.dispatch(x_TD, topk_ids_TK, topk_scores_TK)  # on every rank, with equal T
    y_TD = dispatcher.combine(experts(routed), routed)
    close_symm_memory(group)  # before any rank frees its memory
"""

from typing import Any, NamedTuple

import torch
from torch import Tensor

from titan_moe.config.dispatchers import SYMM_MEM
from titan_moe.dispatch.base import ExpertInputs, Pending, TokenDispatcher, routed
from titan_moe.dispatch.capacity import ExpertCapacity
from titan_moe.dispatch.symm_mem.memory import SymmMemory
from titan_moe.kernels.experts.formats import COMPUTE, FORMATS
from titan_moe.kernels.permute.permutation import Permute, sort_by_expert
from titan_moe.kernels.symm_mem.arrays import SymmArray, SymmArrays, narrower, symm_arrays
from titan_moe.kernels.symm_mem.assignments import get_assignments, own_scores, pick_scores, put_scores
from titan_moe.kernels.symm_mem.barrier import symm_barrier
from titan_moe.kernels.symm_mem.row_plan import RowPlan, exchange_counts, plan_rows
from titan_moe.kernels.symm_mem.rows import get_rows, own_rows, put_rows, sum_partial_results
from titan_moe.plan.cost.loads import visit_probability


class SymmMemExchange(NamedTuple):
    """The routing and the plan of an exchange."""

    ids_TK: Tensor
    scores_TK: Tensor
    plan: RowPlan
    max_rows: int
    """Number of rows that this rank has room for."""


class SymmMemDispatcher(TokenDispatcher):
    """Get rows from the ranks of their tokens, put the results back. Every rank must have the same number of tokens."""

    facts = SYMM_MEM

    def __init__(
        self,
        num_experts: int,
        memory: SymmMemory,
        permute: Permute = sort_by_expert,
        capacity: ExpertCapacity | None = None,
        num_routed_experts: int | None = None,
        row_format: str = COMPUTE,
    ) -> None:
        """`num_experts` is the layer's total, divided among the ranks of `memory`; `capacity` bounds rows and slots.
        `num_routed_experts` is the router's number of experts, for the expected number of rows; it is smaller if
        `num_experts` counts replica slots. `row_format`: how rows and gradients of results are sent (`FORMATS`)."""
        super().__init__(permute, capacity)
        self.memory, self.row_format = memory, row_format
        self.num_routed_experts = num_routed_experts or num_experts
        self.num_ranks = memory.peer_ptrs_P.numel()
        self.num_local_experts = num_experts // self.num_ranks

    def prepare(self, topk_ids_TK: Tensor, topk_scores_TK: Tensor) -> SymmMemExchange:
        max_rows = self.capacity.num_rows(self.expected_rows(topk_ids_TK), worst=self.num_ranks * len(topk_ids_TK))
        plan = RowPlan(*symm_plan(topk_ids_TK, *self.memory, self.num_local_experts, max_rows))
        if self.capacity.reads_sizes_on_host:
            max_rows = int(plan.recv_offsets_Q[-1])
        return SymmMemExchange(topk_ids_TK, topk_scores_TK, plan, max_rows)

    def expected_rows(self, ids_TK: Tensor) -> float:
        """The rows that a rank receives under random routing."""
        num_tokens, top_k = ids_TK.shape
        visits = visit_probability(self.num_routed_experts, self.num_routed_experts // self.num_ranks, top_k)
        return visits * self.num_ranks * num_tokens

    def record_rows(self, exchange: SymmMemExchange) -> None:
        """Record the rows of an exchange, and whether they fit."""
        plan = exchange.plan
        self.capacity.record_load(plan.recv_offsets_Q[-1], self.expected_rows(exchange.ids_TK), plan.overflowed)

    def start_dispatch(self, x_TD: Tensor, exchange: SymmMemExchange) -> Pending:
        ids_TK, scores_TK, plan, max_rows = exchange
        return symm_get(
            x_TD, scores_TK, ids_TK, *plan[:3], *self.memory, self.num_local_experts, self.row_format, max_rows
        )

    def finish_dispatch(self, pending: Pending, exchange: SymmMemExchange) -> ExpertInputs:
        x_SD, scores_SK, ids_SK = pending
        worst = len(x_SD) * min(ids_SK.shape[1], self.num_local_experts)
        worst = self.most_slots(worst, len(exchange.ids_TK), self.num_ranks, self.num_local_experts)
        num_slots = self.capacity.num_slots(ids_SK, balanced=exchange.ids_TK.numel(), worst=worst)
        slots = self.permute(ids_SK, scores_SK, self.num_local_experts, num_slots)
        self.record_rows(exchange)
        self.capacity.record_load(slots.offsets_e[-1], exchange.ids_TK.numel(), slots.overflowed)
        return routed(x_SD, slots, exchange)

    def start_combine(self, y_SD: Tensor, exchange: SymmMemExchange) -> Pending:
        # includes the sum of a token's partial results, which all ranks put into its entries
        return symm_put(y_SD, *exchange.plan[:3], *self.memory, self.row_format)

    def finish_combine(self, pending: Pending, exchange: SymmMemExchange) -> Tensor:
        return pending


def _as_sent(rows: SymmArray, row_format: str) -> SymmArray:
    """The array of rows as they are sent."""
    return narrower(rows, FORMATS[row_format].row_width(rows.local.shape[2], rows.local.dtype))


def _row_arrays(memory: Tensor, peer_ptrs_P: Tensor, num_tokens: int, like_ND: Tensor) -> SymmArrays:
    """The arrays of an exchange of rows alone."""
    return symm_arrays(memory, peer_ptrs_P, num_tokens, like_ND.shape[1], 0, like_ND.dtype)


@torch.library.custom_op("titan_moe::symm_plan", mutates_args=())
def symm_plan(
    ids_TK: Tensor, memory: Tensor, peer_ptrs_P: Tensor, rank: int, num_local_experts: int, max_rows: int
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    ids_TK = ids_TK.contiguous()
    arrays = symm_arrays(memory, peer_ptrs_P, len(ids_TK), 0, 0, torch.float32)
    symm_barrier(arrays.signals, rank)
    starts_Pb = exchange_counts(ids_TK, arrays, rank, num_local_experts)
    symm_barrier(arrays.signals, rank)
    return tuple(plan_rows(ids_TK, starts_Pb, arrays, rank, num_local_experts, max_rows))


@symm_plan.register_fake
def _(ids_TK: Tensor, memory: Tensor, peer_ptrs_P: Tensor, *_: int) -> tuple[Tensor, ...]:
    num_ranks, num_tokens = peer_ptrs_P.numel(), len(ids_TK)
    shapes = (num_ranks, num_tokens), (num_ranks + 1,), ()
    sent_mask_TP = ids_TK.new_empty(num_tokens, num_ranks, dtype=torch.bool)
    return sent_mask_TP, *(ids_TK.new_empty(shape, dtype=torch.int32) for shape in shapes)


def known_plan(sent_mask_TP: Tensor, recv_tokens_PT: Tensor, recv_offsets_Q: Tensor) -> RowPlan:
    """The plan of these maps, without an overflow flag."""
    return RowPlan(sent_mask_TP, recv_tokens_PT, recv_offsets_Q, recv_offsets_Q.new_empty(0))


@torch.library.custom_op("titan_moe::symm_get", mutates_args=())
def symm_get(
    x_TD: Tensor, scores_TK: Tensor, ids_TK: Tensor,
    sent_mask_TP: Tensor, recv_tokens_PT: Tensor, recv_offsets_Q: Tensor,
    memory: Tensor, peer_ptrs_P: Tensor, rank: int, num_local_experts: int, row_format: str, max_rows: int,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    plan = known_plan(sent_mask_TP, recv_tokens_PT, recv_offsets_Q)
    arrays = symm_arrays(memory, peer_ptrs_P, len(x_TD), x_TD.shape[1], ids_TK.shape[1], x_TD.dtype, scores_TK.dtype)
    sent, x_TW = _as_sent(arrays.rows, row_format), FORMATS[row_format].pack(x_TD)
    symm_barrier(arrays.signals, rank)
    own_rows(sent).copy_(x_TW)
    arrays.ids.local.copy_(ids_TK)
    own_scores(arrays.scores).copy_(scores_TK)
    symm_barrier(arrays.signals, rank)
    x_SD = FORMATS[row_format].unpack(get_rows(plan, sent, rank, max_rows), recv_offsets_Q[-1:])
    ids_SK, scores_SK = get_assignments(plan, arrays, rank, num_local_experts, max_rows)
    return x_SD, scores_SK, ids_SK


@symm_get.register_fake
def _(x_TD: Tensor, scores_TK: Tensor, ids_TK: Tensor, *rest: Any) -> tuple[Tensor, Tensor, Tensor]:
    max_rows, top_k = rest[-1], ids_TK.shape[1]
    ids_SK = ids_TK.new_empty(max_rows, top_k, dtype=torch.int32)
    return x_TD.new_empty(max_rows, x_TD.shape[1]), scores_TK.new_empty(max_rows, top_k), ids_SK


@torch.library.custom_op("titan_moe::symm_put_gradients", mutates_args=())
def _put_gradients(
    dx_SD: Tensor, dscores_SK: Tensor, ids_TK: Tensor,
    sent_mask_TP: Tensor, recv_tokens_PT: Tensor, recv_offsets_Q: Tensor,
    memory: Tensor, peer_ptrs_P: Tensor, rank: int, num_local_experts: int,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    plan, (num_tokens, top_k) = known_plan(sent_mask_TP, recv_tokens_PT, recv_offsets_Q), ids_TK.shape
    arrays = symm_arrays(memory, peer_ptrs_P, num_tokens, dx_SD.shape[1], top_k, dx_SD.dtype, dscores_SK.dtype)
    symm_barrier(arrays.signals, rank)
    put_rows(dx_SD.contiguous(), plan, arrays.rows, rank)
    put_scores(dscores_SK.contiguous(), plan, arrays.scores, rank)
    symm_barrier(arrays.signals, rank)
    dx_TD = sum_partial_results(sent_mask_TP, arrays.rows)
    return dx_TD, pick_scores(ids_TK.contiguous(), sent_mask_TP, arrays.scores, num_local_experts)


@_put_gradients.register_fake
def _(dx_SD: Tensor, dscores_SK: Tensor, ids_TK: Tensor, *_: Any) -> tuple[Tensor, Tensor]:
    return dx_SD.new_empty(len(ids_TK), dx_SD.shape[1]), dscores_SK.new_empty(ids_TK.shape)


@torch.library.custom_op("titan_moe::symm_put", mutates_args=())
def symm_put(
    y_SD: Tensor, sent_mask_TP: Tensor, recv_tokens_PT: Tensor, recv_offsets_Q: Tensor,
    memory: Tensor, peer_ptrs_P: Tensor, rank: int, gradient_format: str,
) -> Tensor:  # fmt: skip
    arrays = _row_arrays(memory, peer_ptrs_P, len(sent_mask_TP), y_SD)
    symm_barrier(arrays.signals, rank)
    put_rows(y_SD.contiguous(), known_plan(sent_mask_TP, recv_tokens_PT, recv_offsets_Q), arrays.rows, rank)
    symm_barrier(arrays.signals, rank)
    return sum_partial_results(sent_mask_TP, arrays.rows)


symm_put.register_fake(lambda y_SD, sent_mask_TP, *_: y_SD.new_empty(len(sent_mask_TP), y_SD.shape[1]))


@torch.library.custom_op("titan_moe::symm_get_gradients", mutates_args=())
def _get_gradients(
    dy_TD: Tensor, sent_mask_TP: Tensor, recv_tokens_PT: Tensor, recv_offsets_Q: Tensor,
    memory: Tensor, peer_ptrs_P: Tensor, rank: int, row_format: str, max_rows: int,
) -> Tensor:  # fmt: skip
    arrays = _row_arrays(memory, peer_ptrs_P, len(dy_TD), dy_TD)
    sent, dy_TW = _as_sent(arrays.rows, row_format), FORMATS[row_format].pack(dy_TD)
    symm_barrier(arrays.signals, rank)
    own_rows(sent).copy_(dy_TW)
    symm_barrier(arrays.signals, rank)
    plan = known_plan(sent_mask_TP, recv_tokens_PT, recv_offsets_Q)
    return FORMATS[row_format].unpack(get_rows(plan, sent, rank, max_rows), recv_offsets_Q[-1:])


_get_gradients.register_fake(lambda dy_TD, *rest: dy_TD.new_empty(rest[-1], dy_TD.shape[1]))


def _save_get(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    # the memory must not be a saved tensor: offloading would copy all of it
    _, _, *saved, ctx.memory, ctx.peer_ptrs_P, ctx.rank, ctx.num_local_experts, _, _ = inputs
    ctx.save_for_backward(*saved)
    ctx.mark_non_differentiable(output[2])


def _get_backward(ctx: Any, dx_SD: Tensor, dscores_SK: Tensor, _: Any) -> tuple[Tensor | None, ...]:
    memory = (ctx.memory, ctx.peer_ptrs_P, ctx.rank)
    grads = _put_gradients(dx_SD, dscores_SK, *ctx.saved_tensors, *memory, ctx.num_local_experts)
    return *grads, *(None,) * 10


def _save_put(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    y_SD, *saved, ctx.memory, ctx.peer_ptrs_P, ctx.rank, ctx.row_format = inputs
    ctx.max_rows = y_SD.shape[0]
    ctx.save_for_backward(*saved)


def _put_backward(ctx: Any, dy_TD: Tensor) -> tuple[Tensor | None, ...]:
    memory = (ctx.memory, ctx.peer_ptrs_P, ctx.rank)
    return _get_gradients(dy_TD, *ctx.saved_tensors, *memory, ctx.row_format, ctx.max_rows), *(None,) * 7


symm_get.register_autograd(_get_backward, setup_context=_save_get)
symm_put.register_autograd(_put_backward, setup_context=_save_put)
