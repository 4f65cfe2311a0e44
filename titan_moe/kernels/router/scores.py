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
def score(logits, max_T, norm_T, SCORE_FN: tl.constexpr):
    """Scores of all or some logits of each row; -inf scores 0."""
    if SCORE_FN == "softmax":
        return tl.exp(logits - max_T[:, None]) / norm_T[:, None]
    elif SCORE_FN == "sigmoid":
        return tl.sigmoid(logits)
    else:
        return tl.sqrt(softplus(logits))


@triton.jit
def softplus(x):
    """log(1 + exp(x)) to the last bits, also where exp(x) is below those of 1."""
    small = tl.exp(-tl.abs(x))
    rounded = 1.0 + small
    log1p = tl.where(rounded == 1.0, small, tl.log(rounded) * (small / tl.maximum(rounded - 1.0, 1e-30)))
    return tl.maximum(x, 0.0) + log1p


@triton.jit
def score_slope(logits, scores, SCORE_FN: tl.constexpr):
    """The derivative of a score by its own logit, of scores that have no other."""
    if SCORE_FN == "sigmoid":
        return scores * (1 - scores)
    else:
        return tl.where(scores > 1e-15, tl.sigmoid(logits) / (2 * tl.maximum(scores, 1e-15)), 0.0)
