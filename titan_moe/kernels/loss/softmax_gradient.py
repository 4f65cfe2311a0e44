"""Compute each token's cross entropy, and overwrite a chunk's logits by their gradient.

C tokens of a chunk · V vocabulary

Physics: memory-bound. A row of 152k words in bf16 is 304 KB, too much for a program to keep, so it is read twice and
written once: 6·C·V bytes. The second pass goes backwards, from the words that were read last, to find part of them in
the cache. One program handles one row. Each of its lanes keeps its own maximum and sum (online softmax), with one
exponential an element, so lanes exchange nothing before the row's end. The fp32 arithmetic, about a dozen instructions
an element and pass, takes nearly as long as the transfers, so the next blocks are loaded meanwhile.
"""

import triton
import triton.language as tl
from torch import Tensor

BLOCK_WORDS = 16_384
"""One program fills an SM: the fewer rows are in flight, the more of them stay in the cache for the second pass."""
WORDS_PER_WARP = 512
NUM_STAGES = 3


LOG2_E = tl.constexpr(1.4426950408889634)
"""The hardware computes exponentials to the base 2."""


@triton.jit
def row_softmax(logits_ptr, num_words, BLOCK: tl.constexpr, STAGES: tl.constexpr):
    """The maximum of a row, and the sum of the exponentials of what its logits are below it."""
    lane = tl.arange(0, BLOCK)
    # finite: a lane that has read only masked words would otherwise compute inf - inf
    maximum = tl.full((BLOCK,), -1.0e38, dtype=tl.float32)
    total = tl.zeros((BLOCK,), dtype=tl.float32)
    for first in tl.range(0, num_words, BLOCK, num_stages=STAGES):
        words = first + lane
        logits = tl.load(logits_ptr + words, mask=words < num_words, other=float("-inf")).to(tl.float32)
        rescale = tl.exp2(-tl.abs(logits - maximum) * LOG2_E)
        total = tl.where(logits > maximum, total * rescale + 1.0, total + rescale)
        maximum = tl.maximum(maximum, logits)
    row_max = tl.max(maximum, axis=0)
    return row_max, tl.sum(total * tl.exp2((maximum - row_max) * LOG2_E), axis=0)


@triton.jit
def overwrite_row(logits_ptr, shift, word_of_label, num_words, BLOCK: tl.constexpr, STAGES: tl.constexpr):
    """Overwrite a row of logits by exp2(logits / ln 2 + shift), less one at the label."""
    lane = tl.arange(0, BLOCK)
    num_blocks = tl.cdiv(num_words, BLOCK)
    for block in tl.range(0, num_blocks, num_stages=STAGES):
        words = (num_blocks - 1 - block) * BLOCK + lane
        logits = tl.load(logits_ptr + words, mask=words < num_words, other=float("-inf")).to(tl.float32)
        probs = tl.exp2(logits * LOG2_E + shift)
        dlogits = tl.where(words == word_of_label, probs - 1.0, probs)
        tl.store(logits_ptr + words, dlogits.to(logits_ptr.dtype.element_ty), mask=words < num_words)


@triton.jit
def _softmax_gradient_kernel(
    logits_ptr, labels_ptr, losses_ptr, row_stride, num_words, ignored,
    BLOCK: tl.constexpr, STAGES: tl.constexpr, WRITES_GRADIENT: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    logits_ptr += row * row_stride
    label = tl.load(labels_ptr + row)
    has_label = label != ignored
    label_logit = tl.load(logits_ptr + label, mask=(label >= 0) & (label < num_words), other=float("nan"))
    row_max, total = row_softmax(logits_ptr, num_words, BLOCK, STAGES)
    logsumexp = row_max + tl.log(total)
    tl.store(losses_ptr + row, tl.where(has_label, logsumexp - label_logit.to(tl.float32), 0.0))
    if WRITES_GRADIENT:
        shift = tl.where(has_label, -logsumexp * LOG2_E, float("-inf"))  # an ignored label gives probability 0
        overwrite_row(logits_ptr, shift, label.to(tl.int32), num_words, BLOCK, STAGES)


def softmax_gradient(
    logits_CV: Tensor, labels_C: Tensor, losses_C: Tensor, ignored: int, *, writes_gradient: bool = True
) -> None:
    """Write each token's cross entropy to `losses_C`; with `writes_gradient`, overwrite the logits by their gradient.

    A token with label `ignored` gets loss and gradient zero. Any other label outside the vocabulary gets loss NaN. The
    row stride of the logits may exceed V.
    """
    num_tokens, num_words = logits_CV.shape
    if num_tokens:
        _softmax_gradient_kernel[(num_tokens,)](
            logits_CV, labels_C, losses_C, logits_CV.stride(0), num_words, ignored,
            WRITES_GRADIENT=writes_gradient, **blocks_of(num_words),
        )  # fmt: skip


def blocks_of(num_words: int) -> dict[str, int]:
    """Launch options of a program for each row."""
    block = min(triton.next_power_of_2(num_words), BLOCK_WORDS)
    return {"BLOCK": block, "STAGES": NUM_STAGES, "num_warps": max(1, block // WORDS_PER_WARP)}
