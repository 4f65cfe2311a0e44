"""Send a row's expert choices beside it, and bring the gradients of their scores home.

P ranks of the group · T tokens on each of them · S rows a rank has room for · K choices a token · e experts a rank

Physics: latency-bound. 8 bytes a choice travel with each copy, 64 a row of 8 choices, against the 4096 of the row
itself in bf16 of width 2048; on the way home only the rank that has a choice's expert knows its gradient, so a choice
pulls one number. Not measured yet.

The sender says which choices are the receiver's: ids arrive as the receiver's own experts, -1 for those of others.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from titan_moe.kernels.symm_dispatch import SymmArray, SymmArrays, peer_array

BLOCK, CHUNK = 32, 1024
SIZES = ["rank", "num_tokens", "num_choices"]


@triton.jit(do_not_specialize=SIZES)
def _push_kernel(
    ids_ptr, scores_ptr, places_ptr, here_ptr, memory_at_ptr, ids_offset, scores_offset, rank, num_tokens,
    num_local_experts, P: tl.constexpr, K: tl.constexpr, K2: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    token = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    k = tl.arange(0, K2)[None, :]
    keep = (token < num_tokens)[:, None] & (k < K)
    at = token[:, None].to(tl.int64) * K + k
    ids = tl.load(ids_ptr + at, mask=keep, other=-1)
    scores = tl.load(scores_ptr + at, mask=keep, other=0.0)
    for step in tl.static_range(P):
        peer = (rank + step) % P
        place = tl.load(places_ptr + token * P + peer, mask=token < num_tokens, other=-1)[:, None]
        there = place.to(tl.int64) * K + k
        expert = ids - peer * num_local_experts
        expert = tl.where((expert >= 0) & (expert < num_local_experts), expert, -1).to(tl.int32)
        tl.store(peer_array(memory_at_ptr, peer, ids_offset, here_ptr) + there, expert, mask=keep & (place >= 0))
        tl.store(peer_array(memory_at_ptr, peer, scores_offset, scores_ptr) + there, scores, mask=keep & (place >= 0))


@triton.jit(do_not_specialize=SIZES)
def _take_kernel(
    ids_ptr, scores_ptr, out_ids_ptr, out_scores_ptr, num_rows_ptr, num_choices, K: tl.constexpr, CHUNK: tl.constexpr
):  # fmt: skip
    choice = tl.program_id(0).to(tl.int64) * CHUNK + tl.arange(0, CHUNK)
    keep = choice < num_choices
    came = keep & (choice < tl.load(num_rows_ptr).to(tl.int64) * K)
    tl.store(out_ids_ptr + choice, tl.load(ids_ptr + choice, mask=came, other=-1), mask=keep)
    tl.store(out_scores_ptr + choice, tl.load(scores_ptr + choice, mask=came, other=0.0), mask=keep)


@triton.jit(do_not_specialize=SIZES)
def _pull_kernel(
    out_ptr, ids_ptr, places_ptr, memory_at_ptr, offset_bytes, num_choices, num_local_experts,
    P: tl.constexpr, K: tl.constexpr, CHUNK: tl.constexpr,
):  # fmt: skip
    choice = tl.program_id(0).to(tl.int64) * CHUNK + tl.arange(0, CHUNK)
    keep = choice < num_choices
    expert = tl.load(ids_ptr + choice, mask=keep, other=-1)
    home = tl.where(expert < 0, 0, expert // num_local_experts)
    place = tl.load(places_ptr + choice // K * P + home, mask=keep & (expert >= 0), other=-1).to(tl.int64)
    scores_ptr = peer_array(memory_at_ptr, home, offset_bytes, out_ptr)
    score = tl.load(scores_ptr + place * K + choice % K, mask=place >= 0, other=0.0)
    tl.store(out_ptr + choice, score, mask=keep)


def push_choices(
    ids_TK: Tensor, scores_TK: Tensor, places_TP: Tensor, arrays: SymmArrays, rank: int, num_local_experts: int
) -> None:
    """Store each token's ids and scores beside its copies: of the write phase of a push."""
    num_tokens, num_choices = ids_TK.shape
    if ids_TK.numel():
        _push_kernel[(triton.cdiv(num_tokens, BLOCK),)](
            ids_TK, scores_TK, places_TP, arrays.ids.local, arrays.ids.memory_at_P,
            arrays.ids.offset_bytes, arrays.scores.offset_bytes, rank, num_tokens, num_local_experts,
            P=places_TP.shape[1], K=num_choices, K2=triton.next_power_of_2(num_choices), BLOCK=BLOCK,
        )  # fmt: skip


def take_choices(arrays: SymmArrays, num_rows: Tensor) -> tuple[Tensor, Tensor]:
    """Copy what came out of this rank's arrays: ids, -1 past the last row that came, and scores, 0 there."""
    ids_SK, scores_SK = (torch.empty_like(array.local) for array in (arrays.ids, arrays.scores))
    if ids_SK.numel():
        _take_kernel[(triton.cdiv(ids_SK.numel(), CHUNK),)](
            arrays.ids.local, arrays.scores.local, ids_SK, scores_SK, num_rows, ids_SK.numel(),
            K=ids_SK.shape[1], CHUNK=CHUNK,
        )  # fmt: skip
    return ids_SK, scores_SK


def pull_scores(ids_TK: Tensor, places_TP: Tensor, scores: SymmArray, num_local_experts: int) -> Tensor:
    """Load each choice's number from the array of its expert's rank, 0 for no choice: of the read phase of a pull."""
    out_TK = scores.local.new_empty(ids_TK.shape)
    if ids_TK.numel():
        _pull_kernel[(triton.cdiv(ids_TK.numel(), CHUNK),)](
            out_TK, ids_TK, places_TP, scores.memory_at_P, scores.offset_bytes, ids_TK.numel(), num_local_experts,
            P=places_TP.shape[1], K=ids_TK.shape[1], CHUNK=CHUNK,
        )  # fmt: skip
    return out_TK
