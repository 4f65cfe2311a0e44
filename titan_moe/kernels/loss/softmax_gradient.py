"""Turn a chunk's logits into their gradient where they lie, and say each token's loss.

C tokens of a chunk · V vocabulary

Physics: memory-bound. A row of 152k words in bf16 is 304 KB, too much for a program to keep, so it is read twice and
written once: 6·C·V bytes, of which the second reading may find part in the cache; it goes backwards, from the words
that were read last. One program owns a row. Each of its lanes keeps a largest logit and a sum of its own, with one
exponential an element, so that no lane needs another's before the row's end; the arithmetic is in fp32, at about a
dozen instructions an element and pass nearly as long as the transfers, so the next blocks are on their way meanwhile.
"""

import triton
import triton.language as tl
from torch import Tensor

BLOCK_WORDS = 16_384
"""One program fills an SM: the fewer rows are at work, the more of them stay in the cache for the second reading."""
WORDS_PER_WARP = 512
NUM_STAGES = 3


@triton.jit
def _softmax_gradient_kernel(
    logits_ptr, labels_ptr, losses_ptr, row_stride, num_words, ignored,
    BLOCK: tl.constexpr, STAGES: tl.constexpr, WRITES_GRADIENT: tl.constexpr,
):  # fmt: skip
    LOG2_E: tl.constexpr = 1.4426950408889634  # exponentials to the base 2 are the hardware's own
    row = tl.program_id(0).to(tl.int64)
    logits_ptr += row * row_stride
    label = tl.load(labels_ptr + row)
    counts = label != ignored
    label_logit = tl.load(logits_ptr + label, mask=(label >= 0) & (label < num_words), other=float("nan"))
    lane = tl.arange(0, BLOCK)
    # finite, or a lane that has seen nothing but masked words would subtract infinity from infinity
    largest = tl.full((BLOCK,), -1.0e38, dtype=tl.float32)
    total = tl.zeros((BLOCK,), dtype=tl.float32)
    for first in tl.range(0, num_words, BLOCK, num_stages=STAGES):
        words = first + lane
        logits = tl.load(logits_ptr + words, mask=words < num_words, other=float("-inf")).to(tl.float32)
        smaller = tl.exp2(-tl.abs(logits - largest) * LOG2_E)
        total = tl.where(logits > largest, total * smaller + 1.0, total + smaller)
        largest = tl.maximum(largest, logits)
    peak = tl.max(largest, axis=0)
    log_norm = peak + tl.log(tl.sum(total * tl.exp2((largest - peak) * LOG2_E), axis=0))
    tl.store(losses_ptr + row, tl.where(counts, log_norm - label_logit.to(tl.float32), 0.0))
    if WRITES_GRADIENT:
        shift = tl.where(counts, -log_norm * LOG2_E, float("-inf"))  # no probability where no label counts
        word_of_label = label.to(tl.int32)
        num_blocks = tl.cdiv(num_words, BLOCK)
        for block in tl.range(0, num_blocks, num_stages=STAGES):
            words = (num_blocks - 1 - block) * BLOCK + lane
            logits = tl.load(logits_ptr + words, mask=words < num_words, other=float("-inf")).to(tl.float32)
            probs = tl.exp2(logits * LOG2_E + shift)
            dlogits = tl.where(words == word_of_label, probs - 1.0, probs)
            tl.store(logits_ptr + words, dlogits.to(logits_ptr.dtype.element_ty), mask=words < num_words)


def softmax_gradient(
    logits_CV: Tensor, labels_C: Tensor, losses_C: Tensor, ignored: int, *, writes_gradient: bool = True
) -> None:
    """Write each token's cross entropy into `losses_C`, and its gradient over the logits, unless only losses are asked.

    A token labelled `ignored` has loss and gradient zero; another label that is no word makes its loss NaN. Rows of
    logits may lie further apart than they are long.
    """
    num_tokens, num_words = logits_CV.shape
    block = min(triton.next_power_of_2(num_words), BLOCK_WORDS)
    if num_tokens:
        _softmax_gradient_kernel[(num_tokens,)](
            logits_CV, labels_C, losses_C, logits_CV.stride(0), num_words, ignored,
            BLOCK=block, STAGES=NUM_STAGES, WRITES_GRADIENT=writes_gradient,
            num_warps=max(1, block // WORDS_PER_WARP),
        )  # fmt: skip
