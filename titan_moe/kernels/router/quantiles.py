"""Quantile balancing: the bias of an expert with which it would have had its share of a step's tokens.

T tokens · E experts · K choices a token · Q bins

An expert's *margin* in a token is its score less the score, with bias, that a token's K+1 best expert has: with the
bias -margin the expert would just be chosen. The bias that gives an expert T·K/E tokens is minus the margin of which so
many are larger (the dual coordinate descent of the assignment problem; Megatron Core's quantile balancing).

Megatron averages the quantiles of microbatches, so its bias depends on the layout. Here margins are counted in bins.
Counts of any ranks and microbatches add up exactly, and the quantile is that of all tokens, to a share of a bin. Bins
are finest near 0, where the scores of a softmax over many experts are.
"""

import torch
from torch import Tensor

NUM_BINS = 512
"""Bins of equal width in the signed square root of a margin, from -1 to 1."""


def count_margins(scores_BNE: Tensor, expert_bias_E: Tensor, top_k: int, valid_BN: Tensor | None = None) -> Tensor:
    """Count the margins of all tokens, or of the valid ones: -> int64 [E, Q]. Scores are from 0 to 1."""
    scores_TE = scores_BNE.detach().flatten(0, 1)
    threshold_T1 = (scores_TE + expert_bias_E).topk(top_k + 1, dim=-1).values[:, -1:]
    bins_ET = _bins(scores_TE - threshold_T1).T
    counts_EQ = torch.zeros(scores_TE.shape[1], NUM_BINS, dtype=torch.int64, device=scores_TE.device)
    ones_ET = torch.ones_like(bins_ET) if valid_BN is None else valid_BN.flatten().long().expand_as(bins_ET)
    return counts_EQ.scatter_add_(1, bins_ET, ones_ET)


def balanced_biases(counts_EQ: Tensor, top_k: int) -> Tensor:
    """The bias of each expert, in fp64, of the margins of all tokens: [..., E, Q] -> [..., E]."""
    num_experts = counts_EQ.shape[-2]
    # number of margins in this bin or above
    above_EQ = counts_EQ.flip(-1).cumsum(-1).flip(-1).double()
    wanted_E1 = above_EQ[..., :1] * (top_k / num_experts)
    bin_E1 = ((above_EQ > wanted_E1).sum(-1, keepdim=True) - 1).clamp(min=0)
    in_bin_E1 = counts_EQ.gather(-1, bin_E1).double().clamp(min=1)
    above_E1 = above_EQ.gather(-1, bin_E1) - in_bin_E1
    # tokens are spread evenly over a bin
    root_E1 = (bin_E1 + 1 - (wanted_E1 - above_E1) / in_bin_E1) * (2 / NUM_BINS) - 1
    return -(root_E1.sign() * root_E1.square()).squeeze(-1)


def _bins(margins: Tensor) -> Tensor:
    roots = margins.sign() * margins.abs().sqrt()
    return ((roots + 1) * (NUM_BINS / 2)).long().clamp(0, NUM_BINS - 1)
