"""Where each token's copies go in the memories of its peers, worked out on the devices.

P ranks of the group · T tokens on each of them · K choices a token · e experts a rank · b blocks of tokens · S rows
that a rank has room for

A token is copied once to each rank that has experts of its choice. A rank's rows are ordered by the rank that they came
from, then by token: the order of `alltoall`, the same every time, since integers are summed and nothing is taken by
whoever comes first. Where a rank has less room than rows want to come, the last ones get no place, and the rank raises
a flag: nobody sends them, and nobody waits for them.

Physics: latency-bound. Ids are read twice, 8 bytes each, and P int32 a token are written: 3 MB for 16,384 tokens of 8
choices over 8 ranks, a microsecond of bandwidth, in three launches and two barriers. Not measured yet.

Write phase, `count_copies`: one program counts a block's copies for each rank, one program a rank sums them over blocks
and writes the sum into every peer's table. Read phase, `place_copies`: with the whole table, P·P integers, a rank knows
where its rows begin in each memory, and how many rows it will get itself.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from titan_moe.kernels.symm_dispatch import SymmArray, peer_array

BLOCK, CHUNK = 128, 1024
SIZES = ["rank", "num_tokens", "num_blocks", "max_rows"]
"""Arguments that may differ by rank and batch and must not compile a kernel anew."""


def place_copies_reference(ids_PTK: Tensor, num_local_experts: int, max_rows: int) -> tuple[Tensor, Tensor, Tensor]:
    """What all ranks together find: places [P, T, P], rows received [P] and whether they found room [P], all int32."""
    num_ranks = ids_PTK.shape[0]
    rank_PTK = torch.where(ids_PTK < 0, -1, ids_PTK // num_local_experts)
    wanted_PTP = (rank_PTK[..., None] == torch.arange(num_ranks, device=ids_PTK.device)).any(2)
    # the rows of a destination, by source and token, are numbered from 0
    places_PTP = (wanted_PTP.flatten(0, 1).cumsum(0) - 1).view(wanted_PTP.shape)
    places_PTP = torch.where(wanted_PTP & (places_PTP < max_rows), places_PTP, -1)
    num_rows_P = wanted_PTP.sum((0, 1))
    return places_PTP.int(), num_rows_P.clamp(max=max_rows).int(), (num_rows_P > max_rows).int()


@triton.jit
def _load_wanted(ids_ptr, tokens, num_tokens, num_local_experts, K: tl.constexpr, P2: tl.constexpr):
    """1 where a token has experts of its choice on a rank, else 0: [BLOCK, P2]."""
    rank = tl.arange(0, P2)[None, :]
    wanted = (tokens[:, None] < 0) & (rank < 0)
    for k in tl.static_range(K):
        expert = tl.load(ids_ptr + tokens.to(tl.int64) * K + k, mask=tokens < num_tokens, other=-1)
        home = tl.where(expert < 0, -1, expert // num_local_experts)
        wanted = wanted | (home[:, None] == rank)
    return wanted.to(tl.int32)


@triton.jit(do_not_specialize=SIZES)
def _count_kernel(
    ids_ptr, starts_ptr, num_tokens, num_blocks, num_local_experts,
    K: tl.constexpr, P: tl.constexpr, P2: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    block = tl.program_id(0)
    wanted = _load_wanted(ids_ptr, block * BLOCK + tl.arange(0, BLOCK), num_tokens, num_local_experts, K, P2)
    rank = tl.arange(0, P2)
    tl.store(starts_ptr + rank * num_blocks + block, tl.sum(wanted, axis=0), mask=rank < P)


@triton.jit(do_not_specialize=SIZES)
def _announce_kernel(
    starts_ptr, counts_ptr, memory_at_ptr, offset_bytes, rank, num_blocks,
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
    # a peer beyond the last has no address: read one that exists, and write nothing
    table = peer_array(memory_at_ptr, tl.minimum(peer, P - 1), offset_bytes, counts_ptr)
    tl.store(table + rank * P + destination, tl.zeros((P2,), dtype=tl.int32) + total, mask=peer < P)


@triton.jit(do_not_specialize=SIZES)
def _place_kernel(
    ids_ptr, starts_ptr, counts_ptr, places_ptr, num_rows_ptr, overflowed_ptr, rank, num_tokens, num_blocks,
    num_local_experts, max_rows, K: tl.constexpr, P: tl.constexpr, P2: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    block = tl.program_id(0)
    tokens = block * BLOCK + tl.arange(0, BLOCK)
    wanted = _load_wanted(ids_ptr, tokens, num_tokens, num_local_experts, K, P2)
    peer = tl.arange(0, P2)
    source = tl.arange(0, P2)[:, None]
    is_count = (source < P) & (peer[None, :] < P)
    counts = tl.load(counts_ptr + source * P + peer[None, :], mask=is_count, other=0)
    first = tl.sum(tl.where(source < rank, counts, 0), axis=0)
    first += tl.load(starts_ptr + peer * num_blocks + block, mask=(peer < P) & (block < num_blocks), other=0)
    places = first[None, :] + tl.cumsum(wanted, axis=0) - 1
    places = tl.where((wanted > 0) & (places < max_rows), places, -1)
    is_place = (tokens[:, None] < num_tokens) & (peer[None, :] < P)
    tl.store(places_ptr + tokens[:, None].to(tl.int64) * P + peer[None, :], places, mask=is_place)
    received = tl.sum(tl.sum(tl.where(peer[None, :] == rank, counts, 0), axis=1), axis=0)
    tl.store(num_rows_ptr, tl.minimum(received, max_rows), mask=block == 0)
    tl.store(overflowed_ptr, (received > max_rows).to(tl.int32), mask=block == 0)


def count_copies(ids_TK: Tensor, counts: SymmArray, rank: int, num_local_experts: int) -> Tensor:
    """Write into every peer's table how many rows this rank has for each: the write phase of a plan.

    Shapes: ids int64 or int32 [T, K], global experts, -1 for none -> int32 [P, b], the copies for each rank that lie
    before each block of tokens.
    """
    num_tokens, num_choices = ids_TK.shape
    num_ranks = counts.memory_at_P.numel()
    num_blocks = triton.cdiv(num_tokens, BLOCK)
    starts_Pb = ids_TK.new_empty(num_ranks, num_blocks, dtype=torch.int32)
    padded_ranks = triton.next_power_of_2(num_ranks)
    if num_blocks:
        _count_kernel[(num_blocks,)](
            ids_TK, starts_Pb, num_tokens, num_blocks, num_local_experts,
            K=num_choices, P=num_ranks, P2=padded_ranks, BLOCK=BLOCK,
        )  # fmt: skip
    _announce_kernel[(num_ranks,)](
        starts_Pb, counts.local, counts.memory_at_P, counts.offset_bytes, rank, num_blocks,
        P=num_ranks, P2=padded_ranks, CHUNK=CHUNK,
    )  # fmt: skip
    return starts_Pb


def place_copies(
    ids_TK: Tensor, starts_Pb: Tensor, counts: SymmArray, rank: int, num_local_experts: int, max_rows: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Read this rank's table: the read phase of a plan. Every rank has room for `max_rows` rows.

    Returns:
        places_TP: int32, token -> its row in each rank's memory, -1 where it has none.
        num_rows: int32 scalar on the device, the rows that this rank will get.
        overflowed: int32 scalar on the device, 1 if more wanted to come to this rank than it has room for, else 0.
    """
    num_tokens, num_choices = ids_TK.shape
    num_ranks, num_blocks = starts_Pb.shape
    places_TP = ids_TK.new_empty(num_tokens, num_ranks, dtype=torch.int32)
    num_rows, overflowed = (ids_TK.new_empty((), dtype=torch.int32) for _ in range(2))
    _place_kernel[(max(num_blocks, 1),)](
        ids_TK, starts_Pb, counts.local, places_TP, num_rows, overflowed, rank, num_tokens, num_blocks,
        num_local_experts, max_rows, K=num_choices, P=num_ranks, P2=triton.next_power_of_2(num_ranks), BLOCK=BLOCK,
    )  # fmt: skip
    return places_TP, num_rows, overflowed
