"""From a token's logits to its experts, their weights, and what load balancing wants to know of them.

B batch · N sequence · E experts · K choices a token · G groups

Physics: memory-bound. The fp32 logits are read once, 4·B·N·E bytes, and 12·B·N·K bytes of choices are written; backward
reads the logits again and writes their gradient. As torch operations it is a dozen passes over [B, N, E] each way.

Ties: of equally scored experts `fused_router.py` takes the lowest, torch's `topk` any. The last bit of a score may also
differ between the two, so where a token's K-th and next expert score alike, the choice may depend on which of them
runs. This breaks no training: the kernel's choice follows from a token's logits alone, so that recomputation repeats
it, and backward follows the experts that forward chose, whatever chose them.
"""

from collections.abc import Callable
from functools import cache
from typing import NamedTuple

import torch
from torch import Tensor


class RoutingRule(NamedTuple):
    """How logits become experts and weights; plain values, named as in `[model.moe]`."""

    score_fn: str
    """`softmax` over all experts, or `sigmoid` of each."""
    top_k: int
    num_groups: int = 1
    top_k_groups: int = 1
    """Groups of consecutive experts that a token may choose from."""
    group_score: str = "top2_sum"
    """What a group is ranked by: its best score, `max`, or the sum of its two best, `top2_sum`."""
    normalize_topk: bool = True
    route_scale: float = 1.0

    @property
    def num_ranked(self) -> int:
        """How many of a group's best scores its rank is the sum of."""
        return {"max": 1, "top2_sum": 2}[self.group_score]


class Routing(NamedTuple):
    """The choice, and sums over each sequence's tokens; weights, `share_sums_BE` and `z_sum` are differentiable."""

    topk_scores_BNK: Tensor
    """Weights of the chosen experts, normalised and scaled."""
    topk_ids_BNK: Tensor
    """int64, the chosen experts in any order."""
    counts_BE: Tensor
    """int64, tokens of each sequence that each expert was given."""
    share_sums_BE: Tensor
    """Each expert's share of a token's scores, summed."""
    z_sum: Tensor
    """Squared logsumexp of a token's logits, summed over all tokens."""


RouteTokens = Callable[[Tensor, Tensor, RoutingRule, Tensor | None], Routing]
"""logits_BNE, expert_bias_E, rule, forced_ids_BNK (taken whatever the scores say; None chooses) -> Routing."""


@cache
def choose_router(choice: str) -> RouteTokens:
    """The implementation for the recipe's choice of router kernels."""
    if choice == "torch":
        return route_tokens_reference
    from titan_moe.kernels.router.fused_router import route_tokens

    return route_tokens


def route_tokens_reference(
    logits_BNE: Tensor, expert_bias_E: Tensor, rule: RoutingRule, forced_ids_BNK: Tensor | None = None
) -> Routing:
    """Route in plain operations, in the logits' dtype.

    The bias takes part in the choice only (arXiv:2408.15664). Forced ids are int64 and must be experts.
    """
    scores_BNE = logits_BNE.softmax(dim=-1) if rule.score_fn == "softmax" else logits_BNE.sigmoid()
    ids_BNK = choose_experts(scores_BNE.detach() + expert_bias_E, rule) if forced_ids_BNK is None else forced_ids_BNK
    topk_scores_BNK = scores_BNE.gather(-1, ids_BNK)
    if rule.normalize_topk:
        topk_scores_BNK = topk_scores_BNK / (topk_scores_BNK.sum(-1, keepdim=True) + 1e-20)
    num_sequences, _, num_experts = logits_BNE.shape
    counts_BE = torch.zeros(num_sequences, num_experts, dtype=torch.int64, device=logits_BNE.device)
    counts_BE.scatter_add_(1, ids_BNK.flatten(1), torch.ones_like(ids_BNK).flatten(1))
    shares_BNE = scores_BNE / (scores_BNE.sum(-1, keepdim=True) + 1e-20)
    z_sum = torch.logsumexp(logits_BNE, dim=-1).square().sum()
    return Routing(topk_scores_BNK * rule.route_scale, ids_BNK, counts_BE, shares_BNE.sum(1), z_sum)


def choose_experts(ranked_BNE: Tensor, rule: RoutingRule) -> Tensor:
    """The K best experts of a token, or of its best groups (arXiv:2405.04434, arXiv:2412.19437): -> ids [B, N, K]."""
    if rule.num_groups > 1:
        ranked_BNE = _without_closed_groups(ranked_BNE, rule)
    return ranked_BNE.topk(rule.top_k, dim=-1, sorted=False).indices


def _without_closed_groups(ranked_BNE: Tensor, rule: RoutingRule) -> Tensor:
    grouped = ranked_BNE.unflatten(-1, (rule.num_groups, -1))
    group_ranks_BNG = grouped.topk(min(rule.num_ranked, grouped.shape[-1]), dim=-1).values.sum(-1)
    chosen = group_ranks_BNG.topk(rule.top_k_groups, dim=-1, sorted=False).indices
    is_open_BNG = torch.zeros_like(group_ranks_BNG, dtype=torch.bool).scatter_(-1, chosen, True)
    return grouped.masked_fill(~is_open_BNG[..., None], float("-inf")).flatten(-2)
