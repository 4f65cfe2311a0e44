"""Fetch the expert choices of rows that come, and bring the gradients of their scores home.

P ranks of the group · T tokens on each of them · S rows a rank has room for · K choices a token · e experts a rank

Physics: latency-bound. 8 bytes a choice cross the link with each row, 64 a row of 8 choices, against the 4096 of the
row itself in bf16 of width 2048; K numbers a row come home, of which only the rank that has a choice's expert knows
its own.

Who fetches makes the experts its own, -1 for those of others.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from titan_moe.kernels.symm_mem.arrays import SymmArray, SymmArrays, peer_array
from titan_moe.kernels.symm_mem.row_plan import RowPlan

BLOCK, CHUNK = 32, 1024
SIZES = ["rank", "num_tokens", "num_rows", "num_choices"]


@triton.jit
def find_tokens(row, tokens_ptr, ends_ptr, num_tokens, P: tl.constexpr):
    """Source and token of each row, and whether it came."""
    source = tl.zeros_like(row)
    for peer in tl.static_range(P - 1):
        source += (row >= tl.load(ends_ptr + peer + 1)).to(tl.int32)
    came = row < tl.load(ends_ptr + P)
    begin = tl.load(ends_ptr + source)
    token = tl.load(tokens_ptr + source.to(tl.int64) * num_tokens + row - begin, mask=came, other=0)
    return source, token.to(tl.int64), came


@triton.jit(do_not_specialize=SIZES)
def _get_kernel(
    out_ids_ptr, out_scores_ptr, tokens_ptr, ends_ptr, here_ptr, peer_ptrs_ptr, ids_offset, scores_offset, rank,
    num_tokens, num_rows, num_local_experts, P: tl.constexpr, K: tl.constexpr, K2: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    k = tl.arange(0, K2)[None, :]
    keep = (row < num_rows)[:, None] & (k < K)
    source, token, came = find_tokens(row, tokens_ptr, ends_ptr, num_tokens, P)
    there = token[:, None] * K + k
    ids_ptr = peer_array(peer_ptrs_ptr, source, ids_offset, here_ptr)[:, None]
    expert = tl.load(ids_ptr + there, mask=keep & came[:, None], other=-1) - rank * num_local_experts
    expert = tl.where(came[:, None] & (expert >= 0) & (expert < num_local_experts), expert, -1)
    scores_ptr = peer_array(peer_ptrs_ptr, source, scores_offset, out_scores_ptr)[:, None]
    scores = tl.load(scores_ptr + there, mask=keep & came[:, None], other=0.0)
    at = row[:, None].to(tl.int64) * K + k
    tl.store(out_ids_ptr + at, expert, mask=keep)
    tl.store(out_scores_ptr + at, scores, mask=keep)


@triton.jit(do_not_specialize=SIZES)
def _put_kernel(
    scores_ptr, tokens_ptr, ends_ptr, peer_ptrs_ptr, offset_bytes, rank, num_tokens, num_rows,
    P: tl.constexpr, K: tl.constexpr, K2: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    k = tl.arange(0, K2)[None, :]
    source, token, came = find_tokens(row, tokens_ptr, ends_ptr, num_tokens, P)
    keep = ((row < num_rows) & came)[:, None] & (k < K)
    scores = tl.load(scores_ptr + row[:, None].to(tl.int64) * K + k, mask=keep, other=0.0)
    place = (token * P + rank)[:, None] * K + k
    tl.store(peer_array(peer_ptrs_ptr, source, offset_bytes, scores_ptr)[:, None] + place, scores, mask=keep)


@triton.jit(do_not_specialize=SIZES)
def _pick_kernel(
    out_ptr, ids_ptr, sent_mask_ptr, scores_ptr, num_choices, num_local_experts,
    P: tl.constexpr, K: tl.constexpr, CHUNK: tl.constexpr,
):  # fmt: skip
    choice = tl.program_id(0).to(tl.int64) * CHUNK + tl.arange(0, CHUNK)
    keep = choice < num_choices
    expert = tl.load(ids_ptr + choice, mask=keep, other=-1)
    home = tl.where(expert < 0, 0, expert // num_local_experts).to(tl.int64)
    place = choice // K * P + home
    sent_mask = tl.load(sent_mask_ptr + place, mask=keep & (expert >= 0), other=0)
    score = tl.load(scores_ptr + place * K + choice % K, mask=sent_mask != 0, other=0.0)
    tl.store(out_ptr + choice, score, mask=keep)


def own_scores(scores: SymmArray) -> Tensor:
    """Where the scores of the rank's tokens lie to be fetched: [T, K]."""
    return scores.local.flatten(0, 1)[: len(scores.local)]


def get_assignments(
    plan: RowPlan, arrays: SymmArrays, rank: int, num_local_experts: int, max_rows: int
) -> tuple[Tensor, Tensor]:
    """Load the choices of the rows that come: int32 ids [S, K], -1 past the last, and scores [S, K], 0 there; of the
    read phase of a fetch."""
    num_tokens, num_ranks, num_choices = arrays.scores.local.shape
    ids_SK = arrays.ids.local.new_empty(max_rows, num_choices)
    scores_SK = arrays.scores.local.new_empty(max_rows, num_choices)
    if ids_SK.numel():
        _get_kernel[(triton.cdiv(max_rows, BLOCK),)](
            ids_SK, scores_SK, plan.recv_tokens_PT, plan.recv_offsets_Q, arrays.ids.local, arrays.ids.peer_ptrs_P,
            arrays.ids.offset_bytes, arrays.scores.offset_bytes, rank, num_tokens, max_rows, num_local_experts,
            P=num_ranks, K=num_choices, K2=triton.next_power_of_2(num_choices), BLOCK=BLOCK,
        )  # fmt: skip
    return ids_SK, scores_SK


def put_scores(dscores_SK: Tensor, plan: RowPlan, scores: SymmArray, rank: int) -> None:
    """Store each row's numbers in its token's place for this rank: of the write phase of a delivery."""
    num_tokens, num_ranks, num_choices = scores.local.shape
    if dscores_SK.numel():
        _put_kernel[(triton.cdiv(len(dscores_SK), BLOCK),)](
            dscores_SK, plan.recv_tokens_PT, plan.recv_offsets_Q, scores.peer_ptrs_P, scores.offset_bytes, rank, num_tokens,
            len(dscores_SK),
            P=num_ranks, K=num_choices, K2=triton.next_power_of_2(num_choices), BLOCK=BLOCK,
        )  # fmt: skip


def pick_scores(ids_TK: Tensor, sent_mask_TP: Tensor, scores: SymmArray, num_local_experts: int) -> Tensor:
    """Load each choice's number from its token's place for its expert's rank, 0 for no choice: of the read phase of a
    delivery."""
    out_TK = scores.local.new_empty(ids_TK.shape)
    if ids_TK.numel():
        _pick_kernel[(triton.cdiv(ids_TK.numel(), CHUNK),)](
            out_TK, ids_TK, sent_mask_TP.view(torch.int8), scores.local, ids_TK.numel(), num_local_experts,
            P=sent_mask_TP.shape[1], K=ids_TK.shape[1], CHUNK=CHUNK,
        )  # fmt: skip
    return out_TK
