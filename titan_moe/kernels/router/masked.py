"""Routing of sequences of which some tokens are padding: those have no experts and are in no sum.

B batch · N sequence · E experts · K experts a token
"""

import torch
from torch import Tensor

from titan_moe.kernels.router.routing import Routing, RoutingRule, count_tokens, expert_scores, shares_of


def mask_tokens(
    routing: Routing, logits_BNE: Tensor, rule: RoutingRule, valid_BN: Tensor, *, is_forced: bool = False
) -> Routing:
    """The routing of the valid tokens; others have id -1 and score 0. The sums are made again, in torch operations.

    `is_forced` says that ids were forced: the balancing loss then counts these.
    """
    num_experts, valid_BN1 = logits_BNE.shape[-1], valid_BN[..., None]
    scores_BNE = expert_scores(logits_BNE, rule.score_fn)
    counts_BE = aux_counts_BE = count_tokens(routing.topk_ids_BNK, num_experts, valid_BN)
    if rule.counts_by_score and not is_forced:
        by_score_BNK = scores_BNE.detach().topk(rule.top_k, dim=-1, sorted=False).indices
        aux_counts_BE = count_tokens(by_score_BNK, num_experts, valid_BN)
    shares_BNE = torch.where(valid_BN1, shares_of(scores_BNE), 0.0)
    squares_BN = torch.where(valid_BN, torch.logsumexp(logits_BNE, dim=-1).square(), 0.0)
    return Routing(
        torch.where(valid_BN1, routing.topk_scores_BNK, 0.0),
        torch.where(valid_BN1, routing.topk_ids_BNK, -1),
        counts_BE,
        aux_counts_BE,
        shares_BNE.sum(1),
        squares_BN.sum(),
    )
