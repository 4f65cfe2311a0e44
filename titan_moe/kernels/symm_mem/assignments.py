"""Get the expert ids and scores of received rows, and put back the gradients of the scores.

P ranks of the group · T tokens on each rank · S rows a rank has room for · K experts a token · e experts a rank

Physics: latency-bound. 8 bytes an assignment cross the link with each row, 64 for K = 8, against 4096 of the row itself
in bf16 of width 2048. In backward K numbers a row are sent back. Each is valid on the rank of its expert only.

`get` converts global expert ids to local ones, -1 for experts of other ranks.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from titan_moe.kernels.symm_mem.arrays import SymmArray, SymmArrays, peer_array
from titan_moe.kernels.symm_mem.row_plan import RowPlan

BLOCK, CHUNK = 32, 1024
SIZES = ["rank", "num_tokens", "num_rows", "num_assignments"]


@triton.jit
def find_tokens(row, tokens_ptr, recv_offsets_ptr, num_tokens, P: tl.constexpr):
    """Source rank and token of each row, and whether the row exists."""
    source = tl.zeros_like(row)
    for peer in tl.static_range(P - 1):
        source += (row >= tl.load(recv_offsets_ptr + peer + 1)).to(tl.int32)
    is_received = row < tl.load(recv_offsets_ptr + P)
    begin = tl.load(recv_offsets_ptr + source)
    token = tl.load(tokens_ptr + source.to(tl.int64) * num_tokens + row - begin, mask=is_received, other=0)
    return source, token.to(tl.int64), is_received


@triton.jit(do_not_specialize=SIZES)
def _get_kernel(
    out_ids_ptr, out_scores_ptr, tokens_ptr, recv_offsets_ptr, local_ids_ptr, peer_ptrs_ptr, ids_offset, scores_offset,
    rank, num_tokens, num_rows, num_local_experts,
    P: tl.constexpr, K: tl.constexpr, K2: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    k = tl.arange(0, K2)[None, :]
    keep = (row < num_rows)[:, None] & (k < K)
    source, token, is_received = find_tokens(row, tokens_ptr, recv_offsets_ptr, num_tokens, P)
    offset = token[:, None] * K + k
    ids_ptr = peer_array(peer_ptrs_ptr, source, ids_offset, local_ids_ptr)[:, None]
    expert = tl.load(ids_ptr + offset, mask=keep & is_received[:, None], other=-1) - rank * num_local_experts
    expert = tl.where(is_received[:, None] & (expert >= 0) & (expert < num_local_experts), expert, -1)
    scores_ptr = peer_array(peer_ptrs_ptr, source, scores_offset, out_scores_ptr)[:, None]
    scores = tl.load(scores_ptr + offset, mask=keep & is_received[:, None], other=0.0)
    out_offset = row[:, None].to(tl.int64) * K + k
    tl.store(out_ids_ptr + out_offset, expert, mask=keep)
    tl.store(out_scores_ptr + out_offset, scores, mask=keep)


@triton.jit(do_not_specialize=SIZES)
def _put_kernel(
    scores_ptr, tokens_ptr, recv_offsets_ptr, peer_ptrs_ptr, offset_bytes, rank, num_tokens, num_rows,
    P: tl.constexpr, K: tl.constexpr, K2: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    k = tl.arange(0, K2)[None, :]
    source, token, is_received = find_tokens(row, tokens_ptr, recv_offsets_ptr, num_tokens, P)
    keep = ((row < num_rows) & is_received)[:, None] & (k < K)
    scores = tl.load(scores_ptr + row[:, None].to(tl.int64) * K + k, mask=keep, other=0.0)
    offset = (token * P + rank)[:, None] * K + k
    tl.store(peer_array(peer_ptrs_ptr, source, offset_bytes, scores_ptr)[:, None] + offset, scores, mask=keep)


@triton.jit(do_not_specialize=SIZES)
def _pick_kernel(
    out_ptr, ids_ptr, sent_mask_ptr, scores_ptr, num_assignments, num_local_experts,
    P: tl.constexpr, K: tl.constexpr, CHUNK: tl.constexpr,
):  # fmt: skip
    assignment = tl.program_id(0).to(tl.int64) * CHUNK + tl.arange(0, CHUNK)
    keep = assignment < num_assignments
    expert = tl.load(ids_ptr + assignment, mask=keep, other=-1)
    expert_rank = tl.where(expert < 0, 0, expert // num_local_experts).to(tl.int64)
    offset = assignment // K * P + expert_rank
    is_sent = tl.load(sent_mask_ptr + offset, mask=keep & (expert >= 0), other=0)
    score = tl.load(scores_ptr + offset * K + assignment % K, mask=is_sent != 0, other=0.0)
    tl.store(out_ptr + assignment, score, mask=keep)


def own_scores(scores: SymmArray) -> Tensor:
    """The part of `scores` that holds this rank's routing scores for `get`: [T, K]."""
    return scores.local.flatten(0, 1)[: len(scores.local)]


def get_assignments(
    plan: RowPlan, arrays: SymmArrays, rank: int, num_local_experts: int, max_rows: int
) -> tuple[Tensor, Tensor]:
    """Get the local expert ids (int32 [S, K], -1 past the last row) and scores ([S, K], 0 there) of the received rows;
    the read phase of a get."""
    num_tokens, num_ranks, top_k = arrays.scores.local.shape
    ids_SK = arrays.ids.local.new_empty(max_rows, top_k)
    scores_SK = arrays.scores.local.new_empty(max_rows, top_k)
    if ids_SK.numel():
        _get_kernel[(triton.cdiv(max_rows, BLOCK),)](
            ids_SK, scores_SK, plan.recv_tokens_PT, plan.recv_offsets_Q, arrays.ids.local, arrays.ids.peer_ptrs_P,
            arrays.ids.offset_bytes, arrays.scores.offset_bytes, rank, num_tokens, max_rows, num_local_experts,
            P=num_ranks, K=top_k, K2=triton.next_power_of_2(top_k), BLOCK=BLOCK,
        )  # fmt: skip
    return ids_SK, scores_SK


def put_scores(dscores_SK: Tensor, plan: RowPlan, scores: SymmArray, rank: int) -> None:
    """Put each row's score gradients into the array of its token's rank; the write phase of a put."""
    num_tokens, num_ranks, top_k = scores.local.shape
    if dscores_SK.numel():
        _put_kernel[(triton.cdiv(len(dscores_SK), BLOCK),)](
            dscores_SK, plan.recv_tokens_PT, plan.recv_offsets_Q, scores.peer_ptrs_P, scores.offset_bytes, rank,
            num_tokens, len(dscores_SK), P=num_ranks, K=top_k, K2=triton.next_power_of_2(top_k), BLOCK=BLOCK,
        )  # fmt: skip


def pick_scores(ids_TK: Tensor, sent_mask_TP: Tensor, scores: SymmArray, num_local_experts: int) -> Tensor:
    """Read each assignment's score gradient, put by its expert's rank, 0 for none: [T, K]; the read phase of a put."""
    out_TK = scores.local.new_empty(ids_TK.shape)
    if ids_TK.numel():
        _pick_kernel[(triton.cdiv(ids_TK.numel(), CHUNK),)](
            out_TK, ids_TK, sent_mask_TP.view(torch.int8), scores.local, ids_TK.numel(), num_local_experts,
            P=sent_mask_TP.shape[1], K=ids_TK.shape[1], CHUNK=CHUNK,
        )  # fmt: skip
    return out_TK
