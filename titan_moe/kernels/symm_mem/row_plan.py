"""Plan on the device which rows each rank sends and receives, without a host read.

P ranks of the group · T tokens on each rank · K experts a token · e experts a rank · b blocks of tokens · S rows that a
rank has room for

A token's row is sent once to each rank that has one of its experts. A rank's received rows are ordered by source rank,
then by token: the order of `alltoall`. The order is deterministic: it comes from integer sums, not from atomics. Where
more rows are routed to a rank than it has room for, the last ones are not sent, and the rank sets a flag. Their senders
know it too, from the same counts.

Physics: latency-bound. Ids are read three times, 8 bytes each. P·P integers and each row's token cross the links, and P
bytes a token are written: a few MB for 16,384 tokens with K = 8 over 8 ranks, in four launches and two barriers.

Write phase, `exchange_counts`: the first kernel counts each block's rows for each rank. The second sums the counts over
blocks, a program a destination, and writes each total to every peer. The third uses the sums to write each block's
tokens to the list on each destination. Read phase, `plan_rows`: the totals of all ranks give the offset of every
source's rows, on this rank and on its peers.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from titan_moe.kernels.symm_mem.arrays import SymmArray, SymmArrays, peer_array

BLOCK, CHUNK = 128, 1024
SIZES = ["rank", "num_tokens", "num_blocks", "max_rows"]
"""Arguments that differ by rank and batch and must not specialise a kernel."""


class RowPlan(NamedTuple):
    """The rows that a rank sends and receives."""

    sent_mask_TP: Tensor
    """bool, whether a token's row is sent to a rank."""
    recv_tokens_PT: Tensor
    """int32, for each source rank the tokens whose rows it sends here, in ascending order; the rest is undefined."""
    recv_offsets_Q: Tensor
    """int32 [P + 1], 0 and the running ends of the rows from each rank; the last is the number of received rows."""
    overflowed: Tensor
    """int32 scalar, 1 if more rows are routed to this rank than it has room for, else 0."""


def plan_rows_reference(ids_PTK: Tensor, num_local_experts: int, max_rows: int) -> list[RowPlan]:
    """The plans of all ranks, from the ids of all ranks; the undefined rest of a list is -1."""
    num_ranks, num_tokens, _ = ids_PTK.shape
    rank_PTK = torch.where(ids_PTK < 0, -1, ids_PTK // num_local_experts)
    routed_PTP = (rank_PTK[..., None] == torch.arange(num_ranks, device=ids_PTK.device)).any(2)
    # number the rows of a destination by source and token, from 0
    index_PTP = (routed_PTP.flatten(0, 1).cumsum(0) - 1).view(routed_PTP.shape)
    sent_mask_PTP = routed_PTP & (index_PTP < max_rows)
    plans = []
    for rank in range(num_ranks):
        recv_tokens_PT = ids_PTK.new_full((num_ranks, num_tokens), -1, dtype=torch.int32)
        for source, routed_T in enumerate(routed_PTP[..., rank]):
            tokens_T = routed_T.nonzero()[:, 0]
            recv_tokens_PT[source, : len(tokens_T)] = tokens_T.int()
        ends_P = routed_PTP[..., rank].sum(1).cumsum(0)
        recv_offsets_Q = torch.cat([ends_P.new_zeros(1), ends_P.clamp(max=max_rows)]).int()
        plans.append(RowPlan(sent_mask_PTP[rank], recv_tokens_PT, recv_offsets_Q, (ends_P[-1] > max_rows).int()))
    return plans


@triton.jit
def _load_routed(ids_ptr, tokens, num_tokens, num_local_experts, K: tl.constexpr, P2: tl.constexpr):
    """1 where one of a token's experts is on a rank, else 0: [BLOCK, P2]."""
    rank = tl.arange(0, P2)[None, :]
    is_routed = (tokens[:, None] < 0) & (rank < 0)
    for k in tl.static_range(K):
        expert = tl.load(ids_ptr + tokens.to(tl.int64) * K + k, mask=tokens < num_tokens, other=-1)
        expert_rank = tl.where(expert < 0, -1, expert // num_local_experts)
        is_routed = is_routed | (expert_rank[:, None] == rank)
    return is_routed.to(tl.int32)


@triton.jit(do_not_specialize=SIZES)
def _count_kernel(
    ids_ptr, starts_ptr, num_tokens, num_blocks, num_local_experts,
    K: tl.constexpr, P: tl.constexpr, P2: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    block = tl.program_id(0)
    is_routed = _load_routed(ids_ptr, block * BLOCK + tl.arange(0, BLOCK), num_tokens, num_local_experts, K, P2)
    rank = tl.arange(0, P2)
    tl.store(starts_ptr + rank * num_blocks + block, tl.sum(is_routed, axis=0), mask=rank < P)


@triton.jit(do_not_specialize=SIZES)
def _exchange_counts_kernel(
    starts_ptr, counts_ptr, peer_ptrs_ptr, offset_bytes, rank, num_blocks,
    P: tl.constexpr, P2: tl.constexpr, CHUNK: tl.constexpr,
):  # fmt: skip
    destination = tl.program_id(0)
    starts_ptr += destination * num_blocks
    total = tl.zeros((), dtype=tl.int32)
    for first in range(0, num_blocks, CHUNK):
        block = first + tl.arange(0, CHUNK)
        count = tl.load(starts_ptr + block, mask=block < num_blocks, other=0)
        tl.store(starts_ptr + block, total + tl.cumsum(count, axis=0) - count, mask=block < num_blocks)
        total += tl.sum(count, axis=0)
    peer = tl.arange(0, P2)
    # lanes past the last peer load the last peer's address and store nothing
    count_ptrs = peer_array(peer_ptrs_ptr, tl.minimum(peer, P - 1), offset_bytes, counts_ptr)
    tl.store(count_ptrs + rank * P + destination, tl.zeros((P2,), dtype=tl.int32) + total, mask=peer < P)


@triton.jit(do_not_specialize=SIZES)
def _list_kernel(
    ids_ptr, starts_ptr, tokens_ptr, peer_ptrs_ptr, offset_bytes, rank, num_tokens, num_blocks, num_local_experts,
    K: tl.constexpr, P: tl.constexpr, P2: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    block = tl.program_id(0)
    tokens = block * BLOCK + tl.arange(0, BLOCK)
    is_routed = _load_routed(ids_ptr, tokens, num_tokens, num_local_experts, K, P2)
    peer = tl.arange(0, P2)
    starts = tl.load(starts_ptr + peer * num_blocks + block, mask=peer < P, other=0)
    index = starts[None, :] + tl.cumsum(is_routed, axis=0) - 1
    list_ptrs = peer_array(peer_ptrs_ptr, tl.minimum(peer, P - 1), offset_bytes, tokens_ptr)
    token_ptrs = list_ptrs[None, :] + rank * num_tokens + index
    tl.store(token_ptrs, tokens[:, None] + tl.zeros_like(index), mask=(is_routed > 0) & (peer < P)[None, :])


@triton.jit(do_not_specialize=SIZES)
def _plan_kernel(
    ids_ptr, starts_ptr, counts_ptr, header_ptr, sent_mask_ptr, recv_offsets_ptr, overflowed_ptr, rank, num_tokens,
    num_blocks, num_local_experts, max_rows, K: tl.constexpr, P: tl.constexpr, P2: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    block = tl.program_id(0)
    tokens = block * BLOCK + tl.arange(0, BLOCK)
    is_routed = _load_routed(ids_ptr, tokens, num_tokens, num_local_experts, K, P2)
    peer = tl.arange(0, P2)
    source = tl.arange(0, P2)[:, None]
    is_count = (source < P) & (peer[None, :] < P)
    counts = tl.load(counts_ptr + source * P + peer[None, :], mask=is_count, other=0)
    # after a failed barrier, counts and lists are stale and may point anywhere: no row is received
    counts = tl.where(tl.load(header_ptr) == 0, counts, 0)
    first = tl.sum(tl.where(source < rank, counts, 0), axis=0)
    first += tl.load(starts_ptr + peer * num_blocks + block, mask=(peer < P) & (block < num_blocks), other=0)
    index = first[None, :] + tl.cumsum(is_routed, axis=0) - 1
    is_sent = (is_routed > 0) & (index < max_rows)
    keep = (tokens[:, None] < num_tokens) & (peer[None, :] < P)
    tl.store(sent_mask_ptr + tokens[:, None].to(tl.int64) * P + peer[None, :], is_sent.to(tl.int8), mask=keep)
    recv_counts = tl.sum(tl.where(peer[None, :] == rank, counts, 0), axis=1)
    recv_ends = tl.cumsum(recv_counts, axis=0)
    is_first = block == 0
    tl.store(recv_offsets_ptr, 0, mask=is_first)
    tl.store(recv_offsets_ptr + 1 + peer, tl.minimum(recv_ends, max_rows), mask=is_first & (peer < P))
    tl.store(overflowed_ptr, (tl.sum(recv_counts, axis=0) > max_rows).to(tl.int32), mask=is_first)


def exchange_counts(ids_TK: Tensor, arrays: SymmArrays, rank: int, num_local_experts: int) -> Tensor:
    """Write to every peer which tokens' rows this rank sends to it, and all its counts; the write phase of a plan.

    Shapes: ids int64 or int32 [T, K], global experts, -1 for none -> int32 [P, b], the number of rows for each rank
    before each block of tokens.
    """
    num_tokens, top_k = ids_TK.shape
    num_ranks = arrays.counts.peer_ptrs_P.numel()
    num_blocks = triton.cdiv(num_tokens, BLOCK)
    starts_Pb = ids_TK.new_empty(num_ranks, num_blocks, dtype=torch.int32)
    sizes = {"P": num_ranks, "P2": triton.next_power_of_2(num_ranks)}
    if num_blocks:
        _count_kernel[(num_blocks,)](
            ids_TK, starts_Pb, num_tokens, num_blocks, num_local_experts, K=top_k, BLOCK=BLOCK, **sizes
        )
    _exchange_counts_kernel[(num_ranks,)](
        starts_Pb, *_kernel_args(arrays.counts), rank, num_blocks, CHUNK=CHUNK, **sizes
    )
    if num_blocks:
        _list_kernel[(num_blocks,)](
            ids_TK, starts_Pb, *_kernel_args(arrays.tokens), rank, num_tokens, num_blocks, num_local_experts,
            K=top_k, BLOCK=BLOCK, **sizes,
        )  # fmt: skip
    return starts_Pb


def plan_rows(
    ids_TK: Tensor, starts_Pb: Tensor, arrays: SymmArrays, rank: int, num_local_experts: int, max_rows: int
) -> RowPlan:
    """Make the plan from all ranks' counts; the read phase of a plan. Every rank has room for `max_rows` rows."""
    num_tokens, top_k = ids_TK.shape
    num_ranks, num_blocks = starts_Pb.shape
    sent_mask_TP = ids_TK.new_empty(num_tokens, num_ranks, dtype=torch.bool)
    recv_offsets_Q = ids_TK.new_empty(num_ranks + 1, dtype=torch.int32)
    overflowed = ids_TK.new_empty((), dtype=torch.int32)
    _plan_kernel[(max(num_blocks, 1),)](
        ids_TK, starts_Pb, arrays.counts.local, arrays.signals.local, sent_mask_TP.view(torch.int8), recv_offsets_Q,
        overflowed, rank, num_tokens, num_blocks, num_local_experts, max_rows,
        K=top_k, P=num_ranks, P2=triton.next_power_of_2(num_ranks), BLOCK=BLOCK,
    )  # fmt: skip
    return RowPlan(sent_mask_TP, arrays.tokens.local.clone(), recv_offsets_Q, overflowed)


def _kernel_args(array: SymmArray) -> tuple[Tensor, Tensor, int]:
    """A rank's own array, its peers' addresses and its offset, as kernels take them."""
    return array.local, array.peer_ptrs_P, array.offset_bytes
