"""Vocab-parallel cross entropy (arXiv:1909.08053): the vocabulary is split over ranks, which exchange no logits.

C tokens of a chunk · V words of a part of the vocabulary · W words of all parts · P parts, one a rank

Physics: memory-bound as softmax_gradient.py, 6·C·V bytes, in two kernels, because ranks exchange statistics between
them. The first kernel reads the logits of a part and writes three fp32 statistics for each token: the largest logit,
the sum of exponentials relative to it, and the logit of the label. The exchange is one message of 12·C·P bytes, 96 KiB
for 2048 tokens and 4 parts. The second kernel reads the statistics of all parts, computes the same loss on every rank,
and overwrites the logits by their gradient.

The label of a token is in one part. For all other parts, and for a token without a label, the third statistic is minus
infinity.
"""

from collections.abc import Callable

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from torch import Tensor

from titan_moe.kernels.loss.cross_entropy import IGNORE_LABEL
from titan_moe.kernels.loss.softmax_gradient import LOG2_E, blocks_of, overwrite_row, row_softmax
from titan_moe.kernels.registry import Kernel, register

NUM_STATISTICS = 3


def softmax_over_parts_reference(
    logits_CW: Tensor, labels_C: Tensor, num_parts: int, writes_gradient: bool = True
) -> tuple[Tensor, Tensor]:
    """Cross entropy of each token, [C] in at least fp32, and its gradient, [C, W] in the logits' dtype, from the logits
    of all parts at once. Without `writes_gradient` the second result is a copy of the logits."""
    wide_CW = logits_CW.to(torch.promote_types(logits_CW.dtype, torch.float32))
    losses_C = F.cross_entropy(wide_CW, labels_C, ignore_index=IGNORE_LABEL, reduction="none")
    if not writes_gradient:
        return losses_C, logits_CW.clone()
    has_label_C1 = (labels_C != IGNORE_LABEL)[:, None]
    is_label_CW = torch.arange(wide_CW.shape[1], device=labels_C.device) == labels_C[:, None]
    dlogits_CW = torch.where(has_label_C1, wide_CW.softmax(1) - is_label_CW.to(wide_CW.dtype), 0)
    return losses_C, dlogits_CW.to(logits_CW.dtype)


@triton.jit(do_not_specialize=["first_word", "num_tokens"])
def _part_statistics_kernel(
    logits_ptr, labels_ptr, statistics_ptr, row_stride, num_words, first_word, num_tokens,
    BLOCK: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    logits_ptr += row * row_stride
    word = tl.load(labels_ptr + row) - first_word
    is_own = (word >= 0) & (word < num_words)
    label_logit = tl.load(logits_ptr + word, mask=is_own, other=float("-inf"))
    row_max, total = row_softmax(logits_ptr, num_words, BLOCK, STAGES)
    tl.store(statistics_ptr + row, row_max)
    tl.store(statistics_ptr + num_tokens + row, total)
    tl.store(statistics_ptr + 2 * num_tokens + row, label_logit.to(tl.float32))


@triton.jit(do_not_specialize=["first_word", "num_tokens"])
def _part_gradient_kernel(
    logits_ptr, labels_ptr, statistics_ptr, losses_ptr, row_stride, num_words, first_word, num_tokens, ignored,
    NUM_PARTS: tl.constexpr, PADDED_PARTS: tl.constexpr, BLOCK: tl.constexpr, STAGES: tl.constexpr,
    WRITES_GRADIENT: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    logits_ptr += row * row_stride
    label = tl.load(labels_ptr + row)
    has_label = label != ignored
    part = tl.arange(0, PADDED_PARTS)
    is_part = part < NUM_PARTS
    part_ptr = statistics_ptr + part.to(tl.int64) * 3 * num_tokens + row
    maxima = tl.load(part_ptr, mask=is_part, other=float("-inf"))
    totals = tl.load(part_ptr + num_tokens, mask=is_part, other=0.0)
    label_logit = tl.max(tl.load(part_ptr + 2 * num_tokens, mask=is_part, other=float("-inf")), axis=0)
    maximum = tl.max(maxima, axis=0)
    logsumexp = maximum + tl.log(tl.sum(totals * tl.exp2((maxima - maximum) * LOG2_E), axis=0))
    loss = tl.where(label_logit == float("-inf"), float("nan"), logsumexp - label_logit)  # the label of no part
    tl.store(losses_ptr + row, tl.where(has_label, loss, 0.0))
    if WRITES_GRADIENT:
        shift = tl.where(has_label, -logsumexp * LOG2_E, float("-inf"))  # an ignored label gives probability 0
        overwrite_row(logits_ptr, shift, (label - first_word).to(tl.int32), num_words, BLOCK, STAGES)


def part_statistics(logits_CV: Tensor, labels_C: Tensor, first_word: int) -> Tensor:
    """Statistics of the part that begins at word `first_word`: [C, V] -> fp32 [3, C]. Labels count over all parts."""
    num_tokens, num_words = logits_CV.shape
    statistics_3C = logits_CV.new_empty(NUM_STATISTICS, num_tokens, dtype=torch.float32)
    if num_tokens:
        _part_statistics_kernel[(num_tokens,)](
            logits_CV, labels_C, statistics_3C, logits_CV.stride(0), num_words, first_word, num_tokens,
            **blocks_of(num_words),
        )  # fmt: skip
    return statistics_3C


def part_gradient(
    logits_CV: Tensor,
    labels_C: Tensor,
    losses_C: Tensor,
    ignored: int,
    *,
    statistics_P3C: Tensor,
    first_word: int,
    writes_gradient: bool = True,
) -> None:
    """Write each token's cross entropy over all parts to `losses_C`; with `writes_gradient`, overwrite the logits of
    this part by their gradient.

    A token with label `ignored` gets loss and gradient zero. Any other label outside of all parts gets loss NaN. The
    row stride of the logits may exceed V.
    """
    num_tokens, num_words = logits_CV.shape
    num_parts = statistics_P3C.shape[0]
    if num_tokens:
        _part_gradient_kernel[(num_tokens,)](
            logits_CV, labels_C, statistics_P3C, losses_C, logits_CV.stride(0), num_words, first_word, num_tokens,
            ignored, NUM_PARTS=num_parts, PADDED_PARTS=triton.next_power_of_2(num_parts),
            WRITES_GRADIENT=writes_gradient, **blocks_of(num_words),
        )  # fmt: skip


class VocabParallelSoftmax:
    """`softmax_gradient` of one part of the vocabulary. All ranks call it at the same time, each with its part."""

    def __init__(self, first_word: int, exchange: Callable[[Tensor], Tensor]) -> None:
        """`exchange` takes this part's statistics [3, C] and returns those of all parts [P, 3, C]."""
        self.first_word, self.exchange = first_word, exchange

    def __call__(
        self, logits_CV: Tensor, labels_C: Tensor, losses_C: Tensor, ignored: int, *, writes_gradient: bool = True
    ) -> None:
        statistics_P3C = self.exchange(part_statistics(logits_CV, labels_C, self.first_word))
        part_gradient(
            logits_CV,
            labels_C,
            losses_C,
            ignored,
            statistics_P3C=statistics_P3C,
            first_word=self.first_word,
            writes_gradient=writes_gradient,
        )


@torch.library.custom_op("titan_moe::softmax_over_parts", mutates_args=())
def softmax_over_parts(
    logits_CW: Tensor, labels_C: Tensor, num_parts: int, writes_gradient: bool = True
) -> tuple[Tensor, Tensor]:
    """Compute in one process, part by part, what `num_parts` ranks compute together: the cross entropy of each token
    and its gradient, [C, W] -> fp32 [C] and [C, W]."""
    dlogits_CW = logits_CW.clone(memory_format=torch.contiguous_format)
    losses_C = logits_CW.new_empty(logits_CW.shape[0], dtype=torch.float32)
    parts = dlogits_CW.tensor_split(num_parts, dim=1)
    first_words = [sum(part.shape[1] for part in parts[:rank]) for rank in range(num_parts)]
    statistics = [part_statistics(part, labels_C, first) for part, first in zip(parts, first_words, strict=True)]
    statistics_P3C = torch.stack(statistics)
    for part_CV, first_word in zip(parts, first_words, strict=True):
        part_gradient(
            part_CV,
            labels_C,
            losses_C,
            IGNORE_LABEL,
            statistics_P3C=statistics_P3C,
            first_word=first_word,
            writes_gradient=writes_gradient,
        )
    return losses_C, dlogits_CW


softmax_over_parts.register_fake(
    lambda logits, *_: (
        logits.new_empty(logits.shape[0], dtype=torch.float32),
        torch.empty_like(logits, memory_format=torch.contiguous_format),
    )
)
register(Kernel("softmax_over_parts", softmax_over_parts, softmax_over_parts_reference, needs_triton=True))
