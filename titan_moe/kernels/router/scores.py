"""Scores of a tile of logits, for the router's forward and backward kernels.

T tokens of a tile · E experts
"""

import triton
import triton.language as tl


@triton.jit
def softmax_terms(logits_TE):
    """Each token's largest logit, and the sum of exp(logit - largest)."""
    max_T = tl.max(logits_TE, axis=1)
    return max_T, tl.sum(tl.exp(logits_TE - max_T[:, None]), axis=1)


@triton.jit
def score(logits, max_T, norm_T, IS_SOFTMAX: tl.constexpr):
    """Softmax or sigmoid scores of all or some logits of each row; -inf scores 0."""
    if IS_SOFTMAX:
        return tl.exp(logits - max_T[:, None]) / norm_T[:, None]
    else:
        return tl.sigmoid(logits)
