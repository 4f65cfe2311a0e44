"""Router backward: from the gradients of the routing weights and the balancing sums to that of the logits.

B batch · N sequence · E experts · K experts a token · T tokens of a tile

Physics: memory-bound, reads 4·B·N·E + 12·B·N·K bytes and writes 4·B·N·E in one pass. Scores are recomputed from the
logits, not saved. Outputs without a gradient cost nothing: without balancing losses no share is computed.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from titan_moe.kernels.router.forward import fit_tile
from titan_moe.kernels.router.scores import score, score_slope, softmax_terms


@triton.jit
def _route_backward_kernel(
    logits_ptr, ids_ptr, dtopk_ptr, dshares_ptr, dz_ptr, dlogits_ptr, N, parts_per_sequence, route_scale,
    E: tl.constexpr, K: tl.constexpr, SCORE_FN: tl.constexpr, NORMALIZES: tl.constexpr,
    HAS_SHARES: tl.constexpr, HAS_Z: tl.constexpr, BLOCK_T: tl.constexpr, BLOCK_E: tl.constexpr,
):  # fmt: skip
    part = tl.program_id(0).to(tl.int64)
    sequence = part // parts_per_sequence
    token_T = (part % parts_per_sequence).to(tl.int32) * BLOCK_T + tl.arange(0, BLOCK_T)
    is_token_T = token_T < N
    row_T = sequence * N + token_T
    expert_E = tl.arange(0, BLOCK_E)
    keep_TE = is_token_T[:, None] & (expert_E < E)[None, :]
    offset_TE = row_T[:, None] * E + expert_E[None, :]
    logits_TE = tl.load(logits_ptr + offset_TE, mask=keep_TE, other=0.0)
    logits_TE = tl.where((expert_E < E)[None, :], logits_TE, float("-inf"))
    max_T, norm_T = softmax_terms(logits_TE)
    scores_TE = score(logits_TE, max_T, norm_T, SCORE_FN)

    is_topk_TE = tl.zeros((BLOCK_T, BLOCK_E), dtype=tl.int1)
    dscores_TE = tl.zeros((BLOCK_T, BLOCK_E), dtype=tl.float32)
    for k in tl.static_range(K):
        id_T = tl.load(ids_ptr + row_T * K + k, mask=is_token_T, other=0).to(tl.int32)
        dtopk_T = tl.load(dtopk_ptr + row_T * K + k, mask=is_token_T, other=0.0)
        is_kth_TE = expert_E[None, :] == id_T[:, None]
        is_topk_TE = is_topk_TE | is_kth_TE
        dscores_TE = tl.where(is_kth_TE, dtopk_T[:, None], dscores_TE)
    if NORMALIZES:
        total_T1 = tl.sum(tl.where(is_topk_TE, scores_TE, 0.0), axis=1)[:, None] + 1e-20
        mean_T1 = tl.sum(dscores_TE * scores_TE, axis=1)[:, None] / total_T1
        dscores_TE = tl.where(is_topk_TE, (dscores_TE - mean_T1) / total_T1, 0.0)
    dscores_TE *= route_scale
    if HAS_SHARES:
        dshares_1E = tl.load(dshares_ptr + sequence * E + expert_E, mask=expert_E < E, other=0.0)[None, :]
        if SCORE_FN == "softmax":  # softmax scores sum to 1 already
            dscores_TE += dshares_1E
        else:
            total_T1 = tl.sum(scores_TE, axis=1)[:, None] + 1e-20
            dscores_TE += (dshares_1E - tl.sum(dshares_1E * scores_TE, axis=1)[:, None] / total_T1) / total_T1

    if SCORE_FN == "softmax":
        dlogits_TE = scores_TE * (dscores_TE - tl.sum(dscores_TE * scores_TE, axis=1)[:, None])
    else:
        dlogits_TE = dscores_TE * score_slope(logits_TE, scores_TE, SCORE_FN)
    if HAS_Z:
        log_norm_T = max_T + tl.log(norm_T)
        dlogits_TE += (2 * tl.load(dz_ptr) * log_norm_T)[:, None] * score(logits_TE, max_T, norm_T, "softmax")
    tl.store(dlogits_ptr + offset_TE, dlogits_TE, mask=keep_TE)


def route_backward(
    logits_BNE: Tensor, ids_BNK: Tensor, dtopk_scores_BNK: Tensor, dshare_sums_BE: Tensor | None,
    dz_sum: Tensor | None, score_fn: str, top_k: int, normalize_topk: bool, route_scale: float,
) -> Tensor:  # fmt: skip
    """Gradient of the logits. All tensors are contiguous."""
    num_sequences, num_tokens, num_experts = logits_BNE.shape
    dlogits_BNE = torch.empty_like(logits_BNE)
    tile = fit_tile(num_experts, num_groups=1)
    parts_per_sequence = triton.cdiv(num_tokens, tile.tokens)
    if logits_BNE.numel():
        _route_backward_kernel[(num_sequences * parts_per_sequence,)](
            logits_BNE, ids_BNK, dtopk_scores_BNK, dshare_sums_BE, dz_sum, dlogits_BNE,
            num_tokens, parts_per_sequence, route_scale,
            E=num_experts, K=top_k, SCORE_FN=score_fn, NORMALIZES=normalize_topk,
            HAS_SHARES=dshare_sums_BE is not None, HAS_Z=dz_sum is not None,
            BLOCK_T=tile.tokens, BLOCK_E=tile.group_size, num_warps=1,
        )  # fmt: skip
    return dlogits_BNE
