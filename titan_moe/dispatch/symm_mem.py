"""Each row goes once to each rank that wants it, written by the device into the memory of its peers: no host read.

P ranks of the group · T tokens on each of them · K choices · S rows that a rank can receive, P·T · D width

The bytes of `alltoall` without its host read: counts are exchanged and read on the devices, sizes are those of the
worst case. What kernels do in each phase of an exchange, and why two barriers make its memory free for the next, is in
kernels/symm_dispatch.py. Each operation here is one whole exchange, barriers included, whose memory outlives it as
scratch: a graph need not know that it is written, only keep the exchanges in one order on every rank, as it must with
collectives.

Has not run on several GPUs yet, so no recipe offers it.
"""

from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from titan_moe.dispatch.base import Routed, TokenDispatcher, routed
from titan_moe.dispatch.bound import SlotBound
from titan_moe.kernels.slots import LayOut, lay_out_slots
from titan_moe.kernels.symm_barrier import symm_barrier
from titan_moe.kernels.symm_dispatch import SymmArrays, symm_arrays
from titan_moe.kernels.symm_dispatch_choices import pull_scores, push_choices, take_choices
from titan_moe.kernels.symm_dispatch_plan import count_copies, place_copies
from titan_moe.kernels.symm_dispatch_rows import copy_rows, pull_rows, push_rows


class SymmMemory(NamedTuple):
    """Memory that all ranks of a group reach. Serves one stream, and any number of layers on it."""

    local: Tensor
    """uint8, this rank's own; it began as zeros."""
    at_P: Tensor
    """int64, where this rank finds everyone's."""
    rank: int


class SymmMemExchange(NamedTuple):
    """Where the copies of this rank's tokens lie."""

    ids_TK: Tensor
    scores_TK: Tensor
    places_TP: Tensor
    """int32, token -> its row on each rank, -1 for none."""
    num_rows: Tensor
    """int32 scalar on the device: rows that come to this rank."""


def open_symm_memory(num_bytes: int, group: dist.ProcessGroup, device: torch.device) -> SymmMemory:
    """Allocate memory that the GPUs of one node share; all ranks of the group must come.

    `kernels.symm_dispatch.symm_bytes` says how much a microbatch takes.
    """
    import torch.distributed._symmetric_memory as symmetric

    local = symmetric.empty(num_bytes, dtype=torch.uint8, device=device)
    handle = symmetric.rendezvous(local, group)
    local.zero_()
    # memory may come out of a larger piece: a peer's address is that of its piece, and how far its memory is into it
    distances: list[int] = [0] * group.size()
    dist.all_gather_object(distances, local.data_ptr() - handle.buffer_ptrs[handle.rank], group=group)
    addresses = [piece + distance for piece, distance in zip(handle.buffer_ptrs, distances, strict=True)]
    at_P = torch.tensor(addresses, dtype=torch.int64, device=device)
    torch.cuda.synchronize(device)
    dist.barrier(group)  # no signal may be overwritten by a late zero
    return SymmMemory(local, at_P, handle.rank)


class SymmMemDispatcher(TokenDispatcher):
    """Push rows to the ranks of their experts, pull the results. Every rank must bring the same number of tokens."""

    reads_host = False

    def __init__(
        self, num_experts: int, memory: SymmMemory, lay_out: LayOut = lay_out_slots, bound: SlotBound | None = None
    ) -> None:
        """`num_experts` is the layer's total; `memory` is shared by the ranks that have them; `bound` bounds slots."""
        super().__init__(lay_out)
        self.memory = memory
        self.bound = bound or SlotBound()
        self.num_ranks = memory.at_P.numel()
        self.num_local_experts = num_experts // self.num_ranks

    def prepare(self, topk_ids_TK: Tensor, topk_scores_TK: Tensor) -> SymmMemExchange:
        places_TP, num_rows = _plan(topk_ids_TK, *self.memory, self.num_local_experts)
        return SymmMemExchange(topk_ids_TK, topk_scores_TK, places_TP, num_rows)

    def start_send(self, x_TD: Tensor, exchange: SymmMemExchange) -> tuple[Tensor, Tensor, Tensor]:
        ids_TK, scores_TK, places_TP, num_rows = exchange
        return _send(x_TD, scores_TK, ids_TK, places_TP, num_rows, *self.memory, self.num_local_experts)

    def receive(self, sent: tuple[Tensor, Tensor, Tensor], exchange: SymmMemExchange) -> Routed:
        x_SD, scores_SK, ids_SK = sent
        num_slots = self.bound.num_slots(
            balanced=exchange.ids_TK.numel(), worst=len(x_SD) * min(ids_SK.shape[1], self.num_local_experts)
        )
        slots = self.lay_out(ids_SK, scores_SK, self.num_local_experts, num_slots)
        if self.bound.can_overflow:
            self.bound.book(slots.overflowed)
        return routed(x_SD, slots, exchange)

    def send_back(self, y_SD: Tensor, exchange: SymmMemExchange) -> Tensor:
        # sums on the way: a token's rank pulls its copies in one pass
        return _pull(y_SD, exchange.places_TP, exchange.num_rows, *self.memory)

    def reduce(self, y: Tensor, exchange: SymmMemExchange) -> Tensor:
        return y


def _row_arrays(memory: Tensor, at_P: Tensor, num_tokens: int, width: int, dtype: torch.dtype) -> SymmArrays:
    """The arrays of an exchange that moves rows alone."""
    return symm_arrays(memory, at_P, num_tokens, width, 0, dtype)


def _num_received(places_TP: Tensor) -> int:
    """Rows that a rank can receive when all bring as many tokens."""
    return places_TP.shape[0] * places_TP.shape[1]


@torch.library.custom_op("titan_moe::symm_plan", mutates_args=())
def _plan(ids_TK: Tensor, memory: Tensor, at_P: Tensor, rank: int, num_local_experts: int) -> tuple[Tensor, Tensor]:
    ids_TK = ids_TK.contiguous()
    arrays = _row_arrays(memory, at_P, 0, 0, torch.float32)
    symm_barrier(arrays.signals, rank)
    starts_Pb = count_copies(ids_TK, arrays.counts, rank, num_local_experts)
    symm_barrier(arrays.signals, rank)
    return place_copies(ids_TK, starts_Pb, arrays.counts, rank, num_local_experts)


@_plan.register_fake
def _(ids_TK: Tensor, memory: Tensor, at_P: Tensor, rank: int, num_local_experts: int) -> tuple[Tensor, Tensor]:
    return ids_TK.new_empty(len(ids_TK), at_P.numel(), dtype=torch.int32), ids_TK.new_empty((), dtype=torch.int32)


@torch.library.custom_op("titan_moe::symm_send", mutates_args=())
def _send(
    x_TD: Tensor, scores_TK: Tensor, ids_TK: Tensor, places_TP: Tensor, num_rows: Tensor,
    memory: Tensor, at_P: Tensor, rank: int, num_local_experts: int,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    num_tokens, width = x_TD.shape
    arrays = symm_arrays(memory, at_P, num_tokens, width, ids_TK.shape[1], x_TD.dtype, scores_TK.dtype)
    symm_barrier(arrays.signals, rank)
    push_rows(x_TD.contiguous(), places_TP, arrays.rows, rank)
    push_choices(ids_TK.contiguous(), scores_TK.contiguous(), places_TP, arrays, rank, num_local_experts)
    symm_barrier(arrays.signals, rank)
    x_SD = torch.empty_like(arrays.rows.local)
    copy_rows(arrays.rows.local, x_SD, num_rows)
    ids_SK, scores_SK = take_choices(arrays, num_rows)
    return x_SD, scores_SK, ids_SK


@_send.register_fake
def _(
    x_TD: Tensor, scores_TK: Tensor, ids_TK: Tensor, places_TP: Tensor, num_rows: Tensor,
    memory: Tensor, at_P: Tensor, rank: int, num_local_experts: int,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    shape = (_num_received(places_TP), ids_TK.shape[1])
    x_SD = x_TD.new_empty(shape[0], x_TD.shape[1])
    return x_SD, scores_TK.new_empty(shape), ids_TK.new_empty(shape, dtype=torch.int32)


@torch.library.custom_op("titan_moe::symm_bring_home", mutates_args=())
def _bring_home(
    dx_SD: Tensor, dscores_SK: Tensor, ids_TK: Tensor, places_TP: Tensor, num_rows: Tensor,
    memory: Tensor, at_P: Tensor, rank: int, num_local_experts: int,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    (num_tokens, num_choices), width = ids_TK.shape, dx_SD.shape[1]
    arrays = symm_arrays(memory, at_P, num_tokens, width, num_choices, dx_SD.dtype, dscores_SK.dtype)
    symm_barrier(arrays.signals, rank)
    copy_rows(dx_SD.contiguous(), arrays.rows.local, num_rows)
    copy_rows(dscores_SK.contiguous(), arrays.scores.local, num_rows)
    symm_barrier(arrays.signals, rank)
    dx_TD = pull_rows(places_TP, arrays.rows)
    return dx_TD, pull_scores(ids_TK.contiguous(), places_TP, arrays.scores, num_local_experts)


@_bring_home.register_fake
def _(
    dx_SD: Tensor, dscores_SK: Tensor, ids_TK: Tensor, places_TP: Tensor, num_rows: Tensor,
    memory: Tensor, at_P: Tensor, rank: int, num_local_experts: int,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    return dx_SD.new_empty(len(ids_TK), dx_SD.shape[1]), dscores_SK.new_empty(ids_TK.shape)


@torch.library.custom_op("titan_moe::symm_pull", mutates_args=())
def _pull(y_SD: Tensor, places_TP: Tensor, num_rows: Tensor, memory: Tensor, at_P: Tensor, rank: int) -> Tensor:
    arrays = _row_arrays(memory, at_P, len(places_TP), y_SD.shape[1], y_SD.dtype)
    symm_barrier(arrays.signals, rank)
    copy_rows(y_SD.contiguous(), arrays.rows.local, num_rows)
    symm_barrier(arrays.signals, rank)
    return pull_rows(places_TP, arrays.rows)


@_pull.register_fake
def _(y_SD: Tensor, places_TP: Tensor, num_rows: Tensor, memory: Tensor, at_P: Tensor, rank: int) -> Tensor:
    return y_SD.new_empty(len(places_TP), y_SD.shape[1])


@torch.library.custom_op("titan_moe::symm_push", mutates_args=())
def _push(dy_TD: Tensor, places_TP: Tensor, num_rows: Tensor, memory: Tensor, at_P: Tensor, rank: int) -> Tensor:
    arrays = _row_arrays(memory, at_P, len(places_TP), dy_TD.shape[1], dy_TD.dtype)
    symm_barrier(arrays.signals, rank)
    push_rows(dy_TD.contiguous(), places_TP, arrays.rows, rank)
    symm_barrier(arrays.signals, rank)
    dy_SD = torch.empty_like(arrays.rows.local)
    copy_rows(arrays.rows.local, dy_SD, num_rows)
    return dy_SD


@_push.register_fake
def _(dy_TD: Tensor, places_TP: Tensor, num_rows: Tensor, memory: Tensor, at_P: Tensor, rank: int) -> Tensor:
    return dy_TD.new_empty(_num_received(places_TP), dy_TD.shape[1])


def _save_send(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    # the memory is no saved tensor: whoever offloads those would copy all of it
    _, _, *saved, ctx.memory, ctx.at_P, ctx.rank, ctx.num_local_experts = inputs
    ctx.save_for_backward(*saved)
    ctx.mark_non_differentiable(output[2])


def _send_backward(ctx: Any, dx_SD: Tensor, dscores_SK: Tensor, _: Any) -> tuple[Tensor | None, ...]:
    grads = _bring_home(dx_SD, dscores_SK, *ctx.saved_tensors, ctx.memory, ctx.at_P, ctx.rank, ctx.num_local_experts)
    return *grads, *(None,) * 7


def _save_pull(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    _, *saved, ctx.memory, ctx.at_P, ctx.rank = inputs
    ctx.save_for_backward(*saved)


def _pull_backward(ctx: Any, dy_TD: Tensor) -> tuple[Tensor | None, ...]:
    return _push(dy_TD, *ctx.saved_tensors, ctx.memory, ctx.at_P, ctx.rank), *(None,) * 5


_send.register_autograd(_send_backward, setup_context=_save_send)
_pull.register_autograd(_pull_backward, setup_context=_save_pull)
