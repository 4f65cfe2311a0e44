"""Each row goes once to each rank that wants it, written by the device into the memory of its peers: no host read.

P ranks of the group · T tokens on each of them · K choices · S rows that a rank has room for · D width

The bytes of `alltoall` without its host read: counts are exchanged and read on the devices, sizes are those of the
worst case, P·T rows, or up to a bound over what random routing sends. What kernels do in each phase of an exchange, and
why two barriers make its memory free for the next, is in kernels/symm_dispatch.py.

Each operation here is one whole exchange, barriers included. Its memory outlives it as scratch: what it leaves there
nobody reads. So to a compiler it is a function of its other arguments, which may be dropped where no rank needs its
result, or moved, as long as all ranks run the same exchanges in the same order, as with collectives. A layer's
exchanges wait for each other's results, so there is one order for them; layers follow each other, and every rank
compiles the same graph.

Used alone, with a process group `group` of the GPUs of one node and this rank's `experts`:

    num_bytes = symm_bytes(group.size(), most_tokens, width, top_k, torch.bfloat16)
    memory = open_symm_memory(num_bytes, group, torch.device("cuda", local_rank))
    dispatcher = SymmMemDispatcher(num_experts, memory)  # one a layer, or one for all: they share the memory
    routed = dispatcher.dispatch(x_TD, topk_ids_TK, topk_scores_TK)  # in every rank, with as many tokens
    y_TD = dispatcher.combine(experts(routed), routed)
    close_symm_memory(group)  # before any rank lets its memory go

Has not run on several GPUs yet.
"""

import socket
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
from titan_moe.plan.floor import visit_probability


class SymmMemory(NamedTuple):
    """Memory that all ranks of a group reach. Serves one stream, and any number of layers on it.

    Streams that wait for each other wherever one launches an exchange count as one: a step's recording and the warm-ups
    before it do.
    """

    local: Tensor
    """uint8, this rank's own; it began as zeros. It keeps the peers' parts in reach as long as it lives."""
    at_P: Tensor
    """int64, where this rank finds everyone's."""
    rank: int

    def __deepcopy__(self, memo: Any) -> "SymmMemory":
        """A copied model goes on in the same memory: peers would not find a copy's."""
        return self


class SymmMemExchange(NamedTuple):
    """Where the copies of this rank's tokens lie."""

    ids_TK: Tensor
    scores_TK: Tensor
    places_TP: Tensor
    """int32, token -> its row on each rank, -1 for none."""
    num_rows: Tensor
    """int32 scalar on the device: rows that come to this rank."""


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
    distances = _tell_everyone(local.data_ptr() - handle.buffer_ptrs[handle.rank], group)
    addresses = [piece + distance for piece, distance in zip(handle.buffer_ptrs, distances, strict=True)]
    return SymmMemory(local, torch.tensor(addresses, dtype=torch.int64, device=device), handle.rank)


def close_symm_memory(group: dist.ProcessGroup) -> None:
    """Wait until no rank of the group reads or writes its peers' memory any more: then each may let its own go."""
    torch.cuda.synchronize()
    _tell_everyone(None, group)


def _refuse_other_hosts(group: dist.ProcessGroup) -> None:
    hosts = sorted(set(_tell_everyone(socket.gethostname(), group)))
    if len(hosts) > 1:
        raise ValueError(
            f"symmetric memory joins GPUs of one node, and the {group.size()} ranks of this group are on "
            f'{len(hosts)}: {", ".join(hosts)}; take a smaller parallel.ep, or parallel.dispatcher = "alltoall"'
        )


def _tell_everyone(word: Any, group: dist.ProcessGroup) -> list[Any]:
    """Everyone's words, by rank; nobody has them before all have spoken."""
    words = [None] * group.size()
    dist.all_gather_object(words, word, group=group)
    return words


class SymmMemDispatcher(TokenDispatcher):
    """Push rows to the ranks of their experts, pull the results. Every rank must bring the same number of tokens."""

    reads_host = False

    def __init__(
        self,
        num_experts: int,
        memory: SymmMemory,
        lay_out: LayOut = lay_out_slots,
        bound: SlotBound | None = None,
        num_chosen_from: int | None = None,
    ) -> None:
        """`num_experts` is the layer's total; `memory` is shared by the ranks that have them; `bound` bounds rows and
        slots, over what is expected where tokens choose among `num_chosen_from` (fewer, if some places are spare)."""
        super().__init__(lay_out)
        self.memory = memory
        self.bound = bound or SlotBound()
        self.num_chosen_from = num_chosen_from or num_experts
        self.num_ranks = memory.at_P.numel()
        self.num_local_experts = num_experts // self.num_ranks

    def prepare(self, topk_ids_TK: Tensor, topk_scores_TK: Tensor) -> SymmMemExchange:
        max_rows = self._max_rows(*topk_ids_TK.shape)
        places_TP, num_rows, overflowed = _plan(topk_ids_TK, *self.memory, self.num_local_experts, max_rows)
        if self.bound.can_overflow:
            self.bound.book(overflowed)
        return SymmMemExchange(topk_ids_TK, topk_scores_TK, places_TP, num_rows)

    def start_send(self, x_TD: Tensor, exchange: SymmMemExchange) -> tuple[Tensor, Tensor, Tensor]:
        ids_TK, scores_TK, places_TP, num_rows = exchange
        return _send(
            x_TD, scores_TK, ids_TK, places_TP, num_rows, *self.memory, self.num_local_experts,
            self._max_rows(*ids_TK.shape),
        )  # fmt: skip

    def receive(self, sent: tuple[Tensor, Tensor, Tensor], exchange: SymmMemExchange) -> Routed:
        x_SD, scores_SK, ids_SK = sent
        num_slots = self.bound.num_slots(
            balanced=exchange.ids_TK.numel(), worst=x_SD.shape[0] * min(ids_SK.shape[1], self.num_local_experts)
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

    def _max_rows(self, num_tokens: int, num_choices: int) -> int:
        """Rows that every rank has room for, when all bring as many tokens."""
        worst = self.num_ranks * num_tokens
        share = visit_probability(self.num_chosen_from, self.num_chosen_from // self.num_ranks, num_choices)
        return self.bound.num_rows(expected=share * worst, worst=worst)


def _row_arrays(memory: Tensor, at_P: Tensor, num_rows: int, width: int, dtype: torch.dtype) -> SymmArrays:
    """The arrays of an exchange that moves rows alone."""
    return symm_arrays(memory, at_P, num_rows, width, 0, dtype)


@torch.library.custom_op("titan_moe::symm_plan", mutates_args=())
def _plan(
    ids_TK: Tensor, memory: Tensor, at_P: Tensor, rank: int, num_local_experts: int, max_rows: int
) -> tuple[Tensor, Tensor, Tensor]:
    ids_TK = ids_TK.contiguous()
    arrays = _row_arrays(memory, at_P, 0, 0, torch.float32)
    symm_barrier(arrays.signals, rank)
    starts_Pb = count_copies(ids_TK, arrays.counts, rank, num_local_experts)
    symm_barrier(arrays.signals, rank)
    return place_copies(ids_TK, starts_Pb, arrays.counts, rank, num_local_experts, max_rows)


@_plan.register_fake
def _(
    ids_TK: Tensor, memory: Tensor, at_P: Tensor, rank: int, num_local_experts: int, max_rows: int
) -> tuple[Tensor, Tensor, Tensor]:
    num_rows, overflowed = (ids_TK.new_empty((), dtype=torch.int32) for _ in range(2))
    return ids_TK.new_empty(len(ids_TK), at_P.numel(), dtype=torch.int32), num_rows, overflowed


@torch.library.custom_op("titan_moe::symm_send", mutates_args=())
def _send(
    x_TD: Tensor, scores_TK: Tensor, ids_TK: Tensor, places_TP: Tensor, num_rows: Tensor,
    memory: Tensor, at_P: Tensor, rank: int, num_local_experts: int, max_rows: int,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    num_choices, width = ids_TK.shape[1], x_TD.shape[1]
    arrays = symm_arrays(memory, at_P, max_rows, width, num_choices, x_TD.dtype, scores_TK.dtype)
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
    memory: Tensor, at_P: Tensor, rank: int, num_local_experts: int, max_rows: int,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    shape = (max_rows, ids_TK.shape[1])
    x_SD = x_TD.new_empty(max_rows, x_TD.shape[1])
    return x_SD, scores_TK.new_empty(shape), ids_TK.new_empty(shape, dtype=torch.int32)


@torch.library.custom_op("titan_moe::symm_bring_home", mutates_args=())
def _bring_home(
    dx_SD: Tensor, dscores_SK: Tensor, ids_TK: Tensor, places_TP: Tensor, num_rows: Tensor,
    memory: Tensor, at_P: Tensor, rank: int, num_local_experts: int,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    num_choices, width = ids_TK.shape[1], dx_SD.shape[1]
    arrays = symm_arrays(memory, at_P, len(dx_SD), width, num_choices, dx_SD.dtype, dscores_SK.dtype)
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
    arrays = _row_arrays(memory, at_P, y_SD.shape[0], y_SD.shape[1], y_SD.dtype)
    symm_barrier(arrays.signals, rank)
    copy_rows(y_SD.contiguous(), arrays.rows.local, num_rows)
    symm_barrier(arrays.signals, rank)
    return pull_rows(places_TP, arrays.rows)


@_pull.register_fake
def _(y_SD: Tensor, places_TP: Tensor, num_rows: Tensor, memory: Tensor, at_P: Tensor, rank: int) -> Tensor:
    return y_SD.new_empty(len(places_TP), y_SD.shape[1])


@torch.library.custom_op("titan_moe::symm_push", mutates_args=())
def _push(
    dy_TD: Tensor, places_TP: Tensor, num_rows: Tensor, memory: Tensor, at_P: Tensor, rank: int, max_rows: int
) -> Tensor:
    arrays = _row_arrays(memory, at_P, max_rows, dy_TD.shape[1], dy_TD.dtype)
    symm_barrier(arrays.signals, rank)
    push_rows(dy_TD.contiguous(), places_TP, arrays.rows, rank)
    symm_barrier(arrays.signals, rank)
    dy_SD = torch.empty_like(arrays.rows.local)
    copy_rows(arrays.rows.local, dy_SD, num_rows)
    return dy_SD


@_push.register_fake
def _(
    dy_TD: Tensor, places_TP: Tensor, num_rows: Tensor, memory: Tensor, at_P: Tensor, rank: int, max_rows: int
) -> Tensor:
    return dy_TD.new_empty(max_rows, dy_TD.shape[1])


def _save_send(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    # the memory is no saved tensor: whoever offloads those would copy all of it
    _, _, *saved, ctx.memory, ctx.at_P, ctx.rank, ctx.num_local_experts, _ = inputs
    ctx.save_for_backward(*saved)
    ctx.mark_non_differentiable(output[2])


def _send_backward(ctx: Any, dx_SD: Tensor, dscores_SK: Tensor, _: Any) -> tuple[Tensor | None, ...]:
    grads = _bring_home(dx_SD, dscores_SK, *ctx.saved_tensors, ctx.memory, ctx.at_P, ctx.rank, ctx.num_local_experts)
    return *grads, *(None,) * 8


def _save_pull(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    y_SD, *saved, ctx.memory, ctx.at_P, ctx.rank = inputs
    ctx.max_rows = y_SD.shape[0]
    ctx.save_for_backward(*saved)


def _pull_backward(ctx: Any, dy_TD: Tensor) -> tuple[Tensor | None, ...]:
    return _push(dy_TD, *ctx.saved_tensors, ctx.memory, ctx.at_P, ctx.rank, ctx.max_rows), *(None,) * 5


_send.register_autograd(_send_backward, setup_context=_save_send)
_pull.register_autograd(_pull_backward, setup_context=_save_pull)
