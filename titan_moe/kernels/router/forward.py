"""Router forward: scores, top-k, routing weights and sums over a sequence, from the logits in one pass.

B batch · N sequence · E experts · K experts a token · G groups · T tokens of a tile

Physics: memory-bound, reads 4·B·N·E bytes and writes 12·B·N·K; see routing.py. A program is one warp and holds all
logits of its tokens, so a reduction over experts stays within the warp. The top K are K passes over registers: find the
largest key, find the first column that has it, remove that column. A key is a score mapped to an int32 of the same
order: Hopper reduces integers over a warp in one instruction, and one int32 is below the key of every score, -inf and
NaN too, so a token gets K different experts for any logits. With `counts_by_score` K more passes take the largest keys
of the scores alone, unless without groups every bias is zero: then these are the selected ones. The passes read
nothing, and a program writes 4·E bytes more.

Sums over a sequence are deterministic: each program writes its tokens' sums, and a second kernel adds them in order.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from titan_moe.kernels.router.routing import Routing, RoutingRule
from titan_moe.kernels.router.scores import score, softmax_terms

REMOVED = tl.constexpr(-(2**31))  # below the key of every float
MASKED = tl.constexpr(-0x7F800001)  # the key of -inf


@triton.jit
def _flip(bits):
    """Map the bits of floats to int32 of the same order, or back."""
    return bits ^ ((bits >> 31) & 0x7FFFFFFF)


@triton.jit
def _key(x):
    return _flip(x.to(tl.int32, bitcast=True))


@triton.jit
def _first_best(key, index, axis: tl.constexpr):
    """Index of the largest key; the lowest index on a tie."""
    best = tl.max(key, axis=axis, keep_dims=True)
    return tl.min(tl.where(key == best, index, 0x7FFFFFFF), axis=axis, keep_dims=True)


@triton.jit
def _group_ranks(key_TGS, NUM_RANKED: tl.constexpr):
    """Keys of the groups: of the best expert, or of the sum of the best experts."""
    best_TG = tl.max(key_TGS, axis=2)
    if NUM_RANKED > 1:
        index_S = tl.arange(0, key_TGS.shape[2])[None, None, :]
        sum_TG = _flip(best_TG).to(tl.float32, bitcast=True)
        for _ in tl.static_range(NUM_RANKED - 1):
            key_TGS = tl.where(index_S == _first_best(key_TGS, index_S, 2), REMOVED, key_TGS)
            sum_TG += _flip(tl.max(key_TGS, axis=2)).to(tl.float32, bitcast=True)
        best_TG = _key(sum_TG)
    return best_TG


@triton.jit
def _experts_of(column_E, E: tl.constexpr, GROUPS: tl.constexpr, BLOCK_S: tl.constexpr):
    """The ids of columns, and whether they are experts: each group is padded to a power of two."""
    expert_E = column_E
    is_expert_E = column_E < E
    if GROUPS > 1:
        expert_E = column_E // BLOCK_S * (E // GROUPS) + column_E % BLOCK_S
        is_expert_E = (column_E % BLOCK_S < E // GROUPS) & (column_E // BLOCK_S < GROUPS)
    return expert_E, is_expert_E


@triton.jit
def _mask_groups(
    key_TE, is_expert_E, GROUPS: tl.constexpr, TOP_GROUPS: tl.constexpr, NUM_RANKED: tl.constexpr,
    BLOCK_T: tl.constexpr, BLOCK_G: tl.constexpr, BLOCK_S: tl.constexpr,
):  # fmt: skip
    """Group-limited routing: experts outside a token's best groups get the key of -inf."""
    group_G = tl.arange(0, BLOCK_G)[None, :]
    rank_TG = _group_ranks(tl.reshape(key_TE, (BLOCK_T, BLOCK_G, BLOCK_S)), NUM_RANKED)
    rank_TG = tl.where(group_G < GROUPS, rank_TG, REMOVED)
    is_selected_TG = tl.zeros((BLOCK_T, BLOCK_G), dtype=tl.int32)
    for _ in tl.static_range(TOP_GROUPS):
        is_best_TG = group_G == _first_best(rank_TG, group_G, 1)
        is_selected_TG = tl.where(is_best_TG, 1, is_selected_TG)
        rank_TG = tl.where(is_best_TG, REMOVED, rank_TG)
    is_selected_TGS = tl.broadcast_to(is_selected_TG[:, :, None], (BLOCK_T, BLOCK_G, BLOCK_S))
    is_selected_TE = tl.reshape(is_selected_TGS, (BLOCK_T, BLOCK_G * BLOCK_S)) != 0
    return tl.where(is_selected_TE | ~is_expert_E[None, :], key_TE, MASKED)


@triton.jit
def _is_topk(key_TE, index_E, K: tl.constexpr):
    """Whether a key is among the K largest of its token; the lowest index on a tie."""
    is_topk_TE = tl.zeros(key_TE.shape, dtype=tl.int1)
    for _ in tl.static_range(K):
        is_best_TE = index_E[None, :] == _first_best(key_TE, index_E[None, :], 1)
        is_topk_TE = is_topk_TE | is_best_TE
        key_TE = tl.where(is_best_TE, REMOVED, key_TE)
    return is_topk_TE


@triton.jit
def _route_kernel(
    logits_ptr, bias_ptr, forced_ptr, kept_ptr, topk_scores_ptr, ids_ptr, counts_ptr, aux_counts_ptr, shares_ptr, z_ptr,
    N, parts_per_sequence, route_scale,
    E: tl.constexpr, K: tl.constexpr, GROUPS: tl.constexpr, TOP_GROUPS: tl.constexpr, NUM_RANKED: tl.constexpr,
    SCORE_FN: tl.constexpr, NORMALIZES: tl.constexpr, IS_FORCED: tl.constexpr, KEEPS: tl.constexpr,
    COUNTS_BY_SCORE: tl.constexpr,
    PART: tl.constexpr, BLOCK_T: tl.constexpr, BLOCK_G: tl.constexpr, BLOCK_S: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    part = tl.program_id(0).to(tl.int64)
    sequence = part // parts_per_sequence
    first_token = (part % parts_per_sequence).to(tl.int32) * PART
    column_E = tl.arange(0, BLOCK_G * BLOCK_S)
    expert_E, is_expert_E = _experts_of(column_E, E, GROUPS, BLOCK_S)
    bias_E = tl.load(bias_ptr + expert_E, mask=is_expert_E, other=0.0)
    selects_by_score = (GROUPS == 1 and not KEEPS) & (tl.max((bias_E != 0).to(tl.int32), axis=0) == 0)
    k_K = tl.arange(0, BLOCK_K)[None, :]
    counts_E = tl.zeros((BLOCK_G * BLOCK_S,), dtype=tl.int32)
    aux_counts_E = tl.zeros((BLOCK_G * BLOCK_S,), dtype=tl.int32)
    shares_E = tl.zeros((BLOCK_G * BLOCK_S,), dtype=tl.float32)
    z = 0.0
    for begin in range(0, PART, BLOCK_T):
        token_T = first_token + begin + tl.arange(0, BLOCK_T)
        is_token_T = token_T < N
        row_T = sequence * N + token_T
        keep_TE = is_token_T[:, None] & is_expert_E[None, :]
        logits_TE = tl.load(logits_ptr + row_T[:, None] * E + expert_E[None, :], mask=keep_TE, other=0.0)
        logits_TE = tl.where(is_expert_E[None, :], logits_TE, float("-inf"))
        max_T, norm_T = softmax_terms(logits_TE)
        scores_TE = score(logits_TE, max_T, norm_T, SCORE_FN)

        key_TE = tl.where(is_expert_E[None, :], _key(scores_TE + bias_E[None, :]), REMOVED)
        if GROUPS > 1 and not IS_FORCED:
            key_TE = _mask_groups(key_TE, is_expert_E, GROUPS, TOP_GROUPS, NUM_RANKED, BLOCK_T, BLOCK_G, BLOCK_S)
        counts_TE = tl.zeros((BLOCK_T, BLOCK_G * BLOCK_S), dtype=tl.int32)
        ids_TK = tl.zeros((BLOCK_T, BLOCK_K), dtype=tl.int32)
        for k in tl.static_range(K):
            if IS_FORCED:
                id_T1 = tl.load(forced_ptr + row_T[:, None] * K + k, mask=is_token_T[:, None], other=0).to(tl.int32)
                is_kth_TE = (expert_E[None, :] == id_T1) & is_expert_E[None, :]
            else:
                best_T1 = _first_best(key_TE, column_E[None, :], 1)
                is_kth_TE = column_E[None, :] == best_T1
                key_TE = tl.where(is_kth_TE, REMOVED, key_TE)
                id_T1 = best_T1
                if GROUPS > 1:
                    id_T1 = best_T1 // BLOCK_S * (E // GROUPS) + best_T1 % BLOCK_S
                if KEEPS:
                    kept_T1 = tl.load(kept_ptr + row_T[:, None] * K + k, mask=is_token_T[:, None], other=-1)
                    id_T1 = tl.where(kept_T1 >= 0, kept_T1, id_T1)
                    is_kth_TE = (expert_E[None, :] == id_T1) & is_expert_E[None, :]
            counts_TE += is_kth_TE.to(tl.int32)
            ids_TK = tl.where(k_K == k, id_T1, ids_TK)

        keep_TK = is_token_T[:, None] & (k_K < K)
        topk_logits_TK = tl.load(logits_ptr + row_T[:, None] * E + ids_TK, mask=keep_TK, other=0.0)
        weights_TK = tl.where(keep_TK, score(topk_logits_TK, max_T, norm_T, SCORE_FN), 0.0)
        if NORMALIZES:
            weights_TK = weights_TK / (tl.sum(weights_TK, axis=1) + 1e-20)[:, None]
        offset_TK = row_T[:, None] * K + k_K
        tl.store(topk_scores_ptr + offset_TK, weights_TK * route_scale, mask=keep_TK)
        tl.store(ids_ptr + offset_TK, ids_TK.to(tl.int64), mask=keep_TK)

        counts_E += tl.sum(tl.where(is_token_T[:, None], counts_TE, 0), axis=0)
        if COUNTS_BY_SCORE:
            is_counted_TE = counts_TE > 0
            if not selects_by_score:
                score_key_TE = tl.where(is_expert_E[None, :], _key(scores_TE), REMOVED)
                is_counted_TE = _is_topk(score_key_TE, column_E, K)
            aux_counts_E += tl.sum((is_counted_TE & is_token_T[:, None]).to(tl.int32), axis=0)
        if SCORE_FN != "softmax":  # softmax scores sum to 1 already
            scores_TE = scores_TE / (tl.sum(scores_TE, axis=1) + 1e-20)[:, None]
        shares_E += tl.sum(tl.where(is_token_T[:, None], scores_TE, 0.0), axis=0)
        log_norm_T = max_T + tl.log(norm_T)
        z += tl.sum(tl.where(is_token_T, log_norm_T * log_norm_T, 0.0), axis=0)
    tl.store(counts_ptr + part * E + expert_E, counts_E, mask=is_expert_E)
    if COUNTS_BY_SCORE:
        tl.store(aux_counts_ptr + part * E + expert_E, aux_counts_E, mask=is_expert_E)
    tl.store(shares_ptr + part * E + expert_E, shares_E, mask=is_expert_E)
    tl.store(z_ptr + part, z)


@triton.jit
def _add_parts_kernel(
    counts_ptr, aux_counts_ptr, shares_ptr, z_ptr, counts_BE_ptr, aux_counts_BE_ptr, shares_BE_ptr, z_sum_ptr,
    E, num_parts, parts_per_sequence, COUNTS_BY_SCORE: tl.constexpr,
    BLOCK_P: tl.constexpr, BLOCK_E: tl.constexpr, BLOCK_Z: tl.constexpr,
):  # fmt: skip
    sequence = tl.program_id(0).to(tl.int64)
    expert_E = tl.program_id(1) * BLOCK_E + tl.arange(0, BLOCK_E)
    counts_PE = tl.zeros((BLOCK_P, BLOCK_E), dtype=tl.int32)
    aux_counts_PE = tl.zeros((BLOCK_P, BLOCK_E), dtype=tl.int32)
    shares_PE = tl.zeros((BLOCK_P, BLOCK_E), dtype=tl.float32)
    for first in range(0, parts_per_sequence, BLOCK_P):
        part_P = first + tl.arange(0, BLOCK_P)
        keep_PE = (part_P < parts_per_sequence)[:, None] & (expert_E < E)[None, :]
        offset_PE = (sequence * parts_per_sequence + part_P)[:, None] * E + expert_E[None, :]
        counts_PE += tl.load(counts_ptr + offset_PE, mask=keep_PE, other=0)
        if COUNTS_BY_SCORE:
            aux_counts_PE += tl.load(aux_counts_ptr + offset_PE, mask=keep_PE, other=0)
        shares_PE += tl.load(shares_ptr + offset_PE, mask=keep_PE, other=0.0)
    counts_E = tl.sum(counts_PE, axis=0).to(tl.int64)
    tl.store(counts_BE_ptr + sequence * E + expert_E, counts_E, mask=expert_E < E)
    if COUNTS_BY_SCORE:
        aux_counts_E = tl.sum(aux_counts_PE, axis=0).to(tl.int64)
        tl.store(aux_counts_BE_ptr + sequence * E + expert_E, aux_counts_E, mask=expert_E < E)
    tl.store(shares_BE_ptr + sequence * E + expert_E, tl.sum(shares_PE, axis=0), mask=expert_E < E)
    if (tl.program_id(0) == 0) & (tl.program_id(1) == 0):
        z_Z = tl.zeros((BLOCK_Z,), dtype=tl.float32)
        for first in range(0, num_parts, BLOCK_Z):
            part_Z = first + tl.arange(0, BLOCK_Z)
            z_Z += tl.load(z_ptr + part_Z, mask=part_Z < num_parts, other=0.0)
        tl.store(z_sum_ptr, tl.sum(z_Z, axis=0))


class Tile(NamedTuple):
    """Tokens that a program holds at a time, and columns of a row: groups and experts of a group, padded."""

    tokens: int
    groups: int
    group_size: int


def fit_tile(num_experts: int, num_groups: int) -> Tile:
    """Sixteen logits for each thread of a warp, and at least one token."""
    groups = triton.next_power_of_2(num_groups)
    group_size = triton.next_power_of_2(num_experts // num_groups)
    return Tile(max(1, 16 * 32 // (groups * group_size)), groups, group_size)


def route_forward(
    logits_BNE: Tensor,
    expert_bias_E: Tensor,
    rule: RoutingRule,
    forced_ids_BNK: Tensor | None = None,
    kept_ids_BNK: Tensor | None = None,
) -> Routing:
    """Route contiguous fp32 logits; forced ids are contiguous int64, kept ids contiguous int32.

    `aux_counts_BE` is empty without `counts_by_score`.
    """
    num_sequences, num_tokens, num_experts = logits_BNE.shape
    routing = empty_routing(logits_BNE, rule)
    if not logits_BNE.numel():
        return Routing(*routing[:2], *(out.zero_() for out in routing[2:]))
    tile = fit_tile(num_experts, rule.num_groups)
    tokens_per_part = max(16, tile.tokens)
    parts_per_sequence = triton.cdiv(num_tokens, tokens_per_part)
    num_parts = num_sequences * parts_per_sequence
    shares_PE = logits_BNE.new_empty(num_parts, num_experts)
    counts_PE = torch.empty_like(shares_PE, dtype=torch.int32)
    aux_counts_PE = torch.empty_like(counts_PE) if rule.counts_by_score else None
    z_P = logits_BNE.new_empty(num_parts)
    _route_kernel[(num_parts,)](
        logits_BNE, expert_bias_E, forced_ids_BNK, kept_ids_BNK, routing.topk_scores_BNK, routing.topk_ids_BNK,
        counts_PE, aux_counts_PE, shares_PE, z_P, num_tokens, parts_per_sequence, rule.route_scale,
        E=num_experts, K=rule.top_k, GROUPS=rule.num_groups, TOP_GROUPS=rule.top_k_groups,
        NUM_RANKED=min(rule.num_ranked, num_experts // rule.num_groups), SCORE_FN=rule.score_fn,
        NORMALIZES=rule.normalize_topk, IS_FORCED=forced_ids_BNK is not None, KEEPS=kept_ids_BNK is not None,
        COUNTS_BY_SCORE=rule.counts_by_score, PART=tokens_per_part, BLOCK_T=tile.tokens, BLOCK_G=tile.groups,
        BLOCK_S=tile.group_size, BLOCK_K=triton.next_power_of_2(rule.top_k), num_warps=1,
    )  # fmt: skip
    block_e = 32
    _add_parts_kernel[(num_sequences, triton.cdiv(num_experts, block_e))](
        counts_PE, aux_counts_PE, shares_PE, z_P,
        routing.counts_BE, routing.aux_counts_BE, routing.share_sums_BE, routing.z_sum,
        num_experts, num_parts, parts_per_sequence, COUNTS_BY_SCORE=rule.counts_by_score,
        BLOCK_P=64, BLOCK_E=block_e, BLOCK_Z=1024, num_warps=4,
    )  # fmt: skip
    return routing


def empty_routing(logits_BNE: Tensor, rule: RoutingRule) -> Routing:
    """Uninitialised outputs for these logits."""
    num_sequences, num_tokens, num_experts = logits_BNE.shape
    topk_scores_BNK = logits_BNE.new_empty(num_sequences, num_tokens, rule.top_k)
    share_sums_BE = logits_BNE.new_empty(num_sequences, num_experts)
    counts_BE = torch.empty_like(share_sums_BE, dtype=torch.int64)
    return Routing(
        topk_scores_BNK,
        torch.empty_like(topk_scores_BNK, dtype=torch.int64),
        counts_BE,
        torch.empty_like(counts_BE) if rule.counts_by_score else counts_BE.new_empty(0),
        share_sums_BE,
        logits_BNE.new_empty(()),
    )
