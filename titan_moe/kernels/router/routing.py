"""Routing: from router logits to top-k experts, their weights, and the sums that load balancing needs. The reference.

B batch · N sequence · E experts · K experts a token · G groups

Physics: memory-bound. The fp32 logits are read once, 4·B·N·E bytes, and 12·B·N·K bytes of ids and weights are written.
Backward reads the logits again and writes their gradient. Torch operations take a dozen passes over [B, N, E] in each
direction. Aim: one pass in each.

The balancing loss counts each token's top-k by score alone, whatever the bias and the groups select (arXiv:2412.19437
eq. 18; Megatron Core's `compute_routing_scores_for_aux_loss`). `counts_by_score` adds these counts.

Ties: among equal scores `fused_router.py` takes the lowest expert id, torch's `topk` any. The last bit of a score may
also differ between the two. So where a token's K-th and next scores are nearly equal, the two may select different
experts. Training is correct either way: backward uses the experts that forward selected.
"""

from typing import NamedTuple, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor


class RoutingRule(NamedTuple):
    """How logits become experts and weights. Plain values, named as in `[model.moe]`."""

    score_fn: str
    """`softmax` over all experts, `sigmoid` or `sqrtsoftplus` of each, or `sparsemixer`, of which there is no Triton
    kernel."""
    top_k: int
    num_groups: int = 1
    top_k_groups: int = 1
    """Number of groups of consecutive experts that a token's top-k is limited to."""
    group_score: str = "top2_sum"
    """A group's score: its best expert score (`max`), or the sum of its two best (`top2_sum`), or of as many as its
    share of a token's experts (`top_share_sum`)."""
    normalize_topk: bool = True
    route_scale: float = 1.0
    counts_by_score: bool = False
    """Also count each token's top-k by score alone, without bias and groups: the counts of the balancing loss."""
    sparsemixer_jitter: float = 0.01

    @property
    def num_ranked(self) -> int:
        """Number of best expert scores that a group's score sums."""
        return {"max": 1, "top2_sum": 2, "top_share_sum": self.top_k // self.top_k_groups}[self.group_score]


class Routing(NamedTuple):
    """Top-k experts and sums over each sequence's tokens. Weights, `share_sums_BE` and `z_sum` are differentiable."""

    topk_scores_BNK: Tensor
    """Routing weights of the selected experts, normalised and scaled."""
    topk_ids_BNK: Tensor
    """int64, the selected experts in any order."""
    counts_BE: Tensor
    """int64, number of a sequence's tokens that each expert gets."""
    aux_counts_BE: Tensor
    """int64, number of a sequence's tokens that have each expert among their top-k by score alone. Equal to `counts_BE`
    without `counts_by_score`, and with forced ids."""
    share_sums_BE: Tensor
    """Each expert's share of a token's score sum, summed over a sequence's tokens."""
    z_sum: Tensor
    """Squared logsumexp of a token's logits, summed over all tokens."""


class RouteTokens(Protocol):
    """How logits are routed."""

    def __call__(
        self,
        logits_BNE: Tensor,
        expert_bias_E: Tensor,
        rule: RoutingRule,
        forced_ids_BNK: Tensor | None = None,
        kept_ids_BNK: Tensor | None = None,
    ) -> Routing:
        """Forced ids, int64, are taken in place of the top-k, and counted by the balancing loss. Kept ids, int32, are
        an earlier top-k of the same tokens; -1 takes the top-k. With forced ids there are no kept ones."""


def route_tokens_reference(
    logits_BNE: Tensor,
    expert_bias_E: Tensor,
    rule: RoutingRule,
    forced_ids_BNK: Tensor | None = None,
    kept_ids_BNK: Tensor | None = None,
) -> Routing:
    """Route in torch operations, in the logits' dtype.

    The expert bias affects the selection, not the weights (arXiv:2408.15664). Forced ids are int64 and valid experts.
    """
    num_experts = logits_BNE.shape[-1]
    scores_BNE = expert_scores(logits_BNE, rule.score_fn)
    ranked_BNE = (logits_BNE if rule.score_fn == "sparsemixer" else scores_BNE).detach() + expert_bias_E
    ids_BNK = choose_experts(ranked_BNE, rule) if forced_ids_BNK is None else forced_ids_BNK
    if kept_ids_BNK is not None:
        ids_BNK = torch.where(kept_ids_BNK >= 0, kept_ids_BNK.long(), ids_BNK)
    if rule.score_fn == "sparsemixer":
        topk_scores_BNK = sparsemixer(logits_BNE, ids_BNK, rule.sparsemixer_jitter)
    else:
        topk_scores_BNK = scores_BNE.gather(-1, ids_BNK)
    if rule.normalize_topk:
        topk_scores_BNK = topk_scores_BNK / (topk_scores_BNK.sum(-1, keepdim=True) + 1e-20)
    counts_BE = aux_counts_BE = count_tokens(ids_BNK, num_experts)
    if rule.counts_by_score and forced_ids_BNK is None:
        by_score_BNK = scores_BNE.detach().topk(rule.top_k, dim=-1, sorted=False).indices
        aux_counts_BE = count_tokens(by_score_BNK, num_experts)
    shares_BNE, squares_BN = shares_of(scores_BNE), torch.logsumexp(logits_BNE, dim=-1).square()
    scaled_BNK = topk_scores_BNK * rule.route_scale
    return Routing(scaled_BNK, ids_BNK, counts_BE, aux_counts_BE, shares_BNE.sum(1), squares_BN.sum())


def expert_scores(logits_BNE: Tensor, score_fn: str) -> Tensor:
    """The score of every expert; `sparsemixer` has those of softmax where it does not weigh."""
    if score_fn == "sigmoid":
        return logits_BNE.sigmoid()
    if score_fn == "sqrtsoftplus":  # the root has no slope at 0, where softplus of logits below -100 is in fp32
        return F.softplus(logits_BNE).clamp(min=1e-30).sqrt()
    return logits_BNE.softmax(dim=-1)


def sparsemixer(logits_BNE: Tensor, ids_BNK: Tensor, jitter: float) -> Tensor:
    """Scores [B, N, 2] of two experts a token, the better one first (arXiv:2409.12136, as evaluated)."""
    left_BNE, sizes_BNE, scores = logits_BNE, logits_BNE.detach().abs(), []
    for id_BN1 in ids_BNK.split(1, dim=-1):
        best_BN1 = left_BNE.detach().amax(-1, keepdim=True)
        distance_BNE = (best_BN1 - logits_BNE.detach()) / torch.maximum(sizes_BNE, best_BN1)
        near_BNE = left_BNE.masked_fill(distance_BNE > 2 * jitter, float("-inf"))
        scores.append(near_BNE.softmax(dim=-1).gather(-1, id_BN1))
        left_BNE = left_BNE.scatter(-1, id_BN1, float("-inf"))
    return torch.cat(scores, dim=-1)


def shares_of(scores_BNE: Tensor) -> Tensor:
    """Each expert's share of a token's score sum."""
    return scores_BNE / (scores_BNE.sum(-1, keepdim=True) + 1e-20)


def count_tokens(ids_BNK: Tensor, num_experts: int, valid_BN: Tensor | None = None) -> Tensor:
    """Count the tokens of each expert, or those of them that are valid: -> [B, E]."""
    ones_BNK = torch.ones_like(ids_BNK) if valid_BN is None else valid_BN[..., None].expand_as(ids_BNK).long()
    counts_BE = torch.zeros(ids_BNK.shape[0], num_experts, dtype=torch.int64, device=ids_BNK.device)
    return counts_BE.scatter_add_(1, ids_BNK.flatten(1), ones_BNK.flatten(1))


def choose_experts(ranked_BNE: Tensor, rule: RoutingRule) -> Tensor:
    """Top-k experts, with groups only from a token's best ones (arXiv:2405.04434, arXiv:2412.19437): -> [B, N, K]."""
    if rule.num_groups > 1:
        ranked_BNE = _mask_groups(ranked_BNE, rule)
    return ranked_BNE.topk(rule.top_k, dim=-1, sorted=rule.score_fn == "sparsemixer").indices


def _mask_groups(ranked_BNE: Tensor, rule: RoutingRule) -> Tensor:
    grouped = ranked_BNE.unflatten(-1, (rule.num_groups, -1))
    group_ranks_BNG = grouped.topk(min(rule.num_ranked, grouped.shape[-1]), dim=-1).values.sum(-1)
    group_ids = group_ranks_BNG.topk(rule.top_k_groups, dim=-1, sorted=False).indices
    is_selected_BNG = torch.zeros_like(group_ranks_BNG, dtype=torch.bool).scatter_(-1, group_ids, True)
    return grouped.masked_fill(~is_selected_BNG[..., None], float("-inf")).flatten(-2)
