"""Each row goes once to each rank that wants it, moved by the devices through each other's memory: no host read.

P ranks of the group · T tokens on each of them · K choices · S rows that a rank has room for · D width

The bytes of `alltoall` without its host read: counts are exchanged and read on the devices, sizes are those of the
worst case, P·T rows, or up to a bound over what random routing sends. Only a step that met its bound, and is taken
again without it, reads its sizes on the host: the worst case of a large model fits into no memory. What kernels do in
each phase of an exchange, and why two barriers make its memory free for the next, is in kernels/symm_dispatch.py.

Each operation here is one whole exchange, barriers included; so are those of clones (clone_weights.py). Its memory
outlives it as scratch: what it leaves there nobody reads. So to a compiler it is a function of its other arguments,
which may be dropped where no rank needs its result, or moved, as long as all ranks run the same exchanges in the same
order, as with collectives. A layer's exchanges wait for each other's results, so there is one order for them, which no
compiler can change on one rank alone; and layers follow each other.

Used alone, with a process group `group` of the GPUs of one node and this rank's `experts`:

    num_bytes = symm_bytes(group.size(), most_tokens, width, top_k, torch.bfloat16)
    memory = open_symm_memory(num_bytes, group, torch.device("cuda", local_rank))
    dispatcher = SymmMemDispatcher(num_experts, memory)  # one a layer, or one for all: they share the memory
    routed = dispatcher.dispatch(x_TD, topk_ids_TK, topk_scores_TK)  # in every rank, with as many tokens
    y_TD = dispatcher.combine(experts(routed), routed)
    close_symm_memory(group)  # before any rank lets its memory go
"""

import socket
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from titan_moe.config.dispatchers import SYMM_MEM, dispatchers_that
from titan_moe.dispatch.base import ExpertInputs, Pending, TokenDispatcher, routed
from titan_moe.dispatch.capacity import ExpertCapacity
from titan_moe.kernels.permute.permutation import Permute, sort_by_expert
from titan_moe.kernels.symm_mem.arrays import SymmArrays, symm_arrays
from titan_moe.kernels.symm_mem.assignments import get_assignments, own_scores, pick_scores, put_scores
from titan_moe.kernels.symm_mem.barrier import symm_barrier
from titan_moe.kernels.symm_mem.row_plan import RowPlan, exchange_counts, plan_rows
from titan_moe.kernels.symm_mem.rows import get_rows, own_rows, put_rows, sum_partial_results
from titan_moe.plan.roofline import visit_probability


class SymmMemory(NamedTuple):
    """Memory that all ranks of a group reach. Serves one stream, and any number of layers on it.

    Streams that wait for each other wherever one launches an exchange count as one: a step's recording and the warm-ups
    before it do.
    """

    local: Tensor
    """uint8, this rank's own; it began as zeros. It keeps the peers' parts in reach as long as it lives."""
    peer_ptrs_P: Tensor
    """int64, where this rank finds everyone's."""
    rank: int

    def __deepcopy__(self, memo: Any) -> "SymmMemory":
        """A copied model goes on in the same memory: peers would not find a copy's."""
        return self


class SymmMemExchange(NamedTuple):
    """Who sends what to whom."""

    ids_TK: Tensor
    scores_TK: Tensor
    plan: RowPlan
    max_rows: int
    """Rows that this rank has room for."""


def open_symm_memory(num_bytes: int, group: dist.ProcessGroup, device: torch.device) -> SymmMemory:
    """Allocate memory that the GPUs of one node share over NVLink; all ranks of the group must come, with the same
    number.

    `kernels.symm_dispatch.symm_bytes` says how much a microbatch takes. It is the driver's, beside what PyTorch's
    allocator holds and whatever that was told about its segments.

    Raises: ValueError if the ranks are not on one node.
    """
    import torch.distributed._symmetric_memory as symmetric

    _refuse_other_hosts(group)
    if symmetric.get_backend(device) != "CUDA":  # which gives addresses that a kernel can use
        symmetric.set_backend("CUDA")
    local = symmetric.empty(num_bytes, dtype=torch.uint8, device=device)
    handle = symmetric.rendezvous(local, group)
    local.zero_()
    torch.cuda.synchronize(device)
    # memory may come out of a larger piece: a peer's address is that of its piece, and how far its memory is into it;
    # who has everyone's distance knows that everyone's zeros are written, and none can overwrite a signal
    distances = _all_gather_object(local.data_ptr() - handle.buffer_ptrs[handle.rank], group)
    addresses = [piece + distance for piece, distance in zip(handle.buffer_ptrs, distances, strict=True)]
    return SymmMemory(local, torch.tensor(addresses, dtype=torch.int64, device=device), handle.rank)


def close_symm_memory(group: dist.ProcessGroup) -> None:
    """Wait until no rank of the group reads or writes its peers' memory any more: then each may let its own go."""
    torch.cuda.synchronize()
    _all_gather_object(None, group)


def _refuse_other_hosts(group: dist.ProcessGroup) -> None:
    hosts = sorted(set(_all_gather_object(socket.gethostname(), group)))
    if len(hosts) > 1:
        raise ValueError(
            f"symmetric memory joins GPUs of one node, and the {group.size()} ranks of this group are on "
            f"{len(hosts)}: {', '.join(hosts)}; take a smaller parallel.ep, or parallel.dispatcher = "
            f"{dispatchers_that(lambda facts: facts.moves_rows and not facts.is_one_node)}"
        )


def _all_gather_object(word: Any, group: dist.ProcessGroup) -> list[Any]:
    """Everyone's words, by rank; nobody has them before all have spoken."""
    words = [None] * group.size()
    dist.all_gather_object(words, word, group=group)
    return words


class SymmMemDispatcher(TokenDispatcher):
    """Fetch rows from the ranks of their tokens, deliver the results. Every rank must bring as many tokens."""

    facts = SYMM_MEM

    def __init__(
        self,
        num_experts: int,
        memory: SymmMemory,
        permute: Permute = sort_by_expert,
        capacity: ExpertCapacity | None = None,
        num_chosen_from: int | None = None,
    ) -> None:
        """`num_experts` is the layer's total; `memory` is shared by the ranks that have them; `bound` bounds rows and
        slots, over what is expected where tokens choose among `num_chosen_from` (fewer, if some places are spare)."""
        super().__init__(permute)
        self.memory = memory
        self.capacity = capacity or ExpertCapacity()
        self.num_chosen_from = num_chosen_from or num_experts
        self.num_ranks = memory.peer_ptrs_P.numel()
        self.num_local_experts = num_experts // self.num_ranks

    def prepare(self, topk_ids_TK: Tensor, topk_scores_TK: Tensor) -> SymmMemExchange:
        num_tokens, num_choices = topk_ids_TK.shape
        worst = self.num_ranks * num_tokens
        share = visit_probability(self.num_chosen_from, self.num_chosen_from // self.num_ranks, num_choices)
        max_rows = self.capacity.num_rows(expected=share * worst, worst=worst)
        arguments = (topk_ids_TK, *self.memory, self.num_local_experts, max_rows)
        plan = RowPlan(*_plan(*arguments))
        if self.capacity.reads_sizes_on_host:
            max_rows = int(plan.recv_offsets_Q[-1])
        return SymmMemExchange(topk_ids_TK, topk_scores_TK, plan, max_rows)

    def start_dispatch(self, x_TD: Tensor, exchange: SymmMemExchange) -> Pending:
        ids_TK, scores_TK, plan, max_rows = exchange
        return _get(x_TD, scores_TK, ids_TK, *plan[:3], *self.memory, self.num_local_experts, max_rows)

    def finish_dispatch(self, sent: Pending, exchange: SymmMemExchange) -> ExpertInputs:
        x_SD, scores_SK, ids_SK = sent
        num_slots = self.capacity.num_slots(
            ids_SK, balanced=exchange.ids_TK.numel(), worst=len(x_SD) * min(ids_SK.shape[1], self.num_local_experts)
        )
        slots = self.permute(ids_SK, scores_SK, self.num_local_experts, num_slots)
        if self.capacity.is_bounded:
            self.capacity.book(exchange.plan.overflowed)
            self.capacity.book(slots.overflowed)
        return routed(x_SD, slots, exchange)

    def start_combine(self, y_SD: Tensor, exchange: SymmMemExchange) -> Pending:
        # sums on the way: what is delivered lies beside what other ranks have delivered for its token
        return _put(y_SD, *exchange.plan[:3], *self.memory)

    def finish_combine(self, y: Pending, exchange: SymmMemExchange) -> Tensor:
        return y


def _row_arrays(memory: Tensor, peer_ptrs_P: Tensor, num_tokens: int, like_ND: Tensor) -> SymmArrays:
    """The arrays of an exchange that moves rows alone."""
    return symm_arrays(memory, peer_ptrs_P, num_tokens, like_ND.shape[1], 0, like_ND.dtype)


@torch.library.custom_op("titan_moe::symm_plan", mutates_args=())
def _plan(
    ids_TK: Tensor, memory: Tensor, peer_ptrs_P: Tensor, rank: int, num_local_experts: int, max_rows: int
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    ids_TK = ids_TK.contiguous()
    arrays = symm_arrays(memory, peer_ptrs_P, len(ids_TK), 0, 0, torch.float32)
    symm_barrier(arrays.signals, rank)
    starts_Pb = exchange_counts(ids_TK, arrays, rank, num_local_experts)
    symm_barrier(arrays.signals, rank)
    return tuple(plan_rows(ids_TK, starts_Pb, arrays, rank, num_local_experts, max_rows))


@_plan.register_fake
def _(
    ids_TK: Tensor, memory: Tensor, peer_ptrs_P: Tensor, rank: int, num_local_experts: int, max_rows: int
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    num_ranks, num_tokens = peer_ptrs_P.numel(), len(ids_TK)
    return (
        ids_TK.new_empty(num_tokens, num_ranks, dtype=torch.bool),
        ids_TK.new_empty(num_ranks, num_tokens, dtype=torch.int32),
        ids_TK.new_empty(num_ranks + 1, dtype=torch.int32),
        ids_TK.new_empty((), dtype=torch.int32),
    )


def known_plan(sent_mask_TP: Tensor, recv_tokens_PT: Tensor, recv_offsets_Q: Tensor) -> RowPlan:
    """A plan that was made with room for its rows."""
    return RowPlan(sent_mask_TP, recv_tokens_PT, recv_offsets_Q, recv_offsets_Q.new_empty(0))


@torch.library.custom_op("titan_moe::symm_get", mutates_args=())
def _get(
    x_TD: Tensor, scores_TK: Tensor, ids_TK: Tensor, sent_mask_TP: Tensor, recv_tokens_PT: Tensor, recv_offsets_Q: Tensor,
    memory: Tensor, peer_ptrs_P: Tensor, rank: int, num_local_experts: int, max_rows: int,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    plan = known_plan(sent_mask_TP, recv_tokens_PT, recv_offsets_Q)
    arrays = symm_arrays(memory, peer_ptrs_P, len(x_TD), x_TD.shape[1], ids_TK.shape[1], x_TD.dtype, scores_TK.dtype)
    symm_barrier(arrays.signals, rank)
    own_rows(arrays.rows).copy_(x_TD)
    arrays.ids.local.copy_(ids_TK)
    own_scores(arrays.scores).copy_(scores_TK)
    symm_barrier(arrays.signals, rank)
    x_SD = get_rows(plan, arrays.rows, rank, max_rows)
    ids_SK, scores_SK = get_assignments(plan, arrays, rank, num_local_experts, max_rows)
    return x_SD, scores_SK, ids_SK


@_get.register_fake
def _(
    x_TD: Tensor, scores_TK: Tensor, ids_TK: Tensor, sent_mask_TP: Tensor, recv_tokens_PT: Tensor, recv_offsets_Q: Tensor,
    memory: Tensor, peer_ptrs_P: Tensor, rank: int, num_local_experts: int, max_rows: int,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    shape = (max_rows, ids_TK.shape[1])
    x_SD = x_TD.new_empty(max_rows, x_TD.shape[1])
    return x_SD, scores_TK.new_empty(shape), ids_TK.new_empty(shape, dtype=torch.int32)


@torch.library.custom_op("titan_moe::symm_put_gradients", mutates_args=())
def _put_gradients(
    dx_SD: Tensor, dscores_SK: Tensor, ids_TK: Tensor, sent_mask_TP: Tensor, recv_tokens_PT: Tensor, recv_offsets_Q: Tensor,
    memory: Tensor, peer_ptrs_P: Tensor, rank: int, num_local_experts: int,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    plan, (num_tokens, num_choices) = known_plan(sent_mask_TP, recv_tokens_PT, recv_offsets_Q), ids_TK.shape
    arrays = symm_arrays(memory, peer_ptrs_P, num_tokens, dx_SD.shape[1], num_choices, dx_SD.dtype, dscores_SK.dtype)
    symm_barrier(arrays.signals, rank)
    put_rows(dx_SD.contiguous(), plan, arrays.rows, rank)
    put_scores(dscores_SK.contiguous(), plan, arrays.scores, rank)
    symm_barrier(arrays.signals, rank)
    dx_TD = sum_partial_results(sent_mask_TP, arrays.rows)
    return dx_TD, pick_scores(ids_TK.contiguous(), sent_mask_TP, arrays.scores, num_local_experts)


@_put_gradients.register_fake
def _(
    dx_SD: Tensor, dscores_SK: Tensor, ids_TK: Tensor, sent_mask_TP: Tensor, recv_tokens_PT: Tensor, recv_offsets_Q: Tensor,
    memory: Tensor, peer_ptrs_P: Tensor, rank: int, num_local_experts: int,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    return dx_SD.new_empty(len(ids_TK), dx_SD.shape[1]), dscores_SK.new_empty(ids_TK.shape)


@torch.library.custom_op("titan_moe::symm_put", mutates_args=())
def _put(
    y_SD: Tensor, sent_mask_TP: Tensor, recv_tokens_PT: Tensor, recv_offsets_Q: Tensor, memory: Tensor, peer_ptrs_P: Tensor, rank: int
) -> Tensor:  # fmt: skip
    arrays = _row_arrays(memory, peer_ptrs_P, len(sent_mask_TP), y_SD)
    symm_barrier(arrays.signals, rank)
    put_rows(y_SD.contiguous(), known_plan(sent_mask_TP, recv_tokens_PT, recv_offsets_Q), arrays.rows, rank)
    symm_barrier(arrays.signals, rank)
    return sum_partial_results(sent_mask_TP, arrays.rows)


@_put.register_fake
def _(
    y_SD: Tensor, sent_mask_TP: Tensor, recv_tokens_PT: Tensor, recv_offsets_Q: Tensor, memory: Tensor, peer_ptrs_P: Tensor, rank: int
) -> Tensor:  # fmt: skip
    return y_SD.new_empty(len(sent_mask_TP), y_SD.shape[1])


@torch.library.custom_op("titan_moe::symm_get_gradients", mutates_args=())
def _get_gradients(
    dy_TD: Tensor, sent_mask_TP: Tensor, recv_tokens_PT: Tensor, recv_offsets_Q: Tensor, memory: Tensor, peer_ptrs_P: Tensor, rank: int,
    max_rows: int,
) -> Tensor:  # fmt: skip
    arrays = _row_arrays(memory, peer_ptrs_P, len(dy_TD), dy_TD)
    symm_barrier(arrays.signals, rank)
    own_rows(arrays.rows).copy_(dy_TD)
    symm_barrier(arrays.signals, rank)
    return get_rows(known_plan(sent_mask_TP, recv_tokens_PT, recv_offsets_Q), arrays.rows, rank, max_rows)


@_get_gradients.register_fake
def _(
    dy_TD: Tensor, sent_mask_TP: Tensor, recv_tokens_PT: Tensor, recv_offsets_Q: Tensor, memory: Tensor, peer_ptrs_P: Tensor, rank: int,
    max_rows: int,
) -> Tensor:  # fmt: skip
    return dy_TD.new_empty(max_rows, dy_TD.shape[1])


def _save_get(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    # the memory is no saved tensor: whoever offloads those would copy all of it
    _, _, *saved, ctx.memory, ctx.peer_ptrs_P, ctx.rank, ctx.num_local_experts, _ = inputs
    ctx.save_for_backward(*saved)
    ctx.mark_non_differentiable(output[2])


def _get_backward(ctx: Any, dx_SD: Tensor, dscores_SK: Tensor, _: Any) -> tuple[Tensor | None, ...]:
    memory = (ctx.memory, ctx.peer_ptrs_P, ctx.rank)
    grads = _put_gradients(dx_SD, dscores_SK, *ctx.saved_tensors, *memory, ctx.num_local_experts)
    return *grads, *(None,) * 9


def _save_put(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    y_SD, *saved, ctx.memory, ctx.peer_ptrs_P, ctx.rank = inputs
    ctx.max_rows = y_SD.shape[0]
    ctx.save_for_backward(*saved)


def _put_backward(ctx: Any, dy_TD: Tensor) -> tuple[Tensor | None, ...]:
    memory = (ctx.memory, ctx.peer_ptrs_P, ctx.rank)
    return _get_gradients(dy_TD, *ctx.saved_tensors, *memory, ctx.max_rows), *(None,) * 6


_get.register_autograd(_get_backward, setup_context=_save_get)
_put.register_autograd(_put_backward, setup_context=_save_put)
