"""What the router's forward and backward kernels compute alike from a tile of logits."""

import triton
import triton.language as tl


@triton.jit
def softmax_terms(logits_TE):
    """Each token's largest logit, and the sum of the exponentials of the distances to it."""
    peak_T = tl.max(logits_TE, axis=1)
    return peak_T, tl.sum(tl.exp(logits_TE - peak_T[:, None]), axis=1)


@triton.jit
def score(logits, peak_T, norm_T, IS_SOFTMAX: tl.constexpr):
    """Scores of whole rows of logits or of some of each row; -inf scores 0."""
    if IS_SOFTMAX:
        return tl.exp(logits - peak_T[:, None]) / norm_T[:, None]
    else:
        return tl.sigmoid(logits)
