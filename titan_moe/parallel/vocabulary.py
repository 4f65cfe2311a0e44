"""Vocab-parallel embedding, output head and cross entropy (arXiv:1909.08053): the vocabulary is split over ranks.

P ranks · B batch · N sequence · n tokens of a rank (N/P) · C tokens in a chunk · D width · V words of this rank

The loss never gathers logits. A token needs three numbers over all ranks: the maximum of its logits, the sum of
exponentials and the logit of its label. With PyTorch's loss a chunk of tokens exchanges them in two messages, with
Triton's loss in one.
"""

from collections.abc import Callable

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch.distributed.distributed_c10d import _resolve_process_group

from titan_moe.dispatch.collectives import all_gather, all_gather_rows
from titan_moe.kernels.loss.cross_entropy import IGNORE_LABEL, linear_cross_entropy, require_words
from titan_moe.kernels.loss.fused_cross_entropy import fused_cross_entropy, head_ops, loss_alone, loss_and_gradients
from titan_moe.kernels.loss.softmax_over_parts import VocabParallelSoftmax
from titan_moe.layers.head import LanguageModelHead
from titan_moe.parallel.sequence import by_rank, gather_sequence, scatter_sequence


class VocabParallelEmbedding:
    """The forward of an embedding: each rank looks up its words; the sum over ranks is scattered over the sequence."""

    def __init__(self, forward: Callable[[Tensor], Tensor], num_words: int, group: dist.ProcessGroup) -> None:
        self.embed, self.num_words, self.group = forward, num_words, group

    def __call__(self, tokens_BN: Tensor) -> Tensor:
        """Tokens int64 [B, N], of the whole vocabulary -> [B, n, D]."""
        words_BN = tokens_BN - self.group.rank() * self.num_words
        is_own_BN = (words_BN >= 0) & (words_BN < self.num_words)
        x_BND = self.embed(torch.where(is_own_BN, words_BN, 0))
        return scatter_sequence(torch.where(is_own_BN[..., None], x_BND, 0.0), self.group)


class VocabParallelHead:
    """The forward of an output head: logits or, with labels, the summed loss of whole sequences. Both are equal on all
    ranks."""

    def __init__(self, head: LanguageModelHead, group: dist.ProcessGroup) -> None:
        self.head, self.group = head, group

    def __call__(self, x_BnD: Tensor, labels_BN: Tensor | None = None) -> Tensor:
        """[B, n, D] -> logits of all words [B, N, P·V], or with labels int64 [B, N] a scalar, fp32 or wider."""
        x_BnD = self.head.scaled(x_BnD)
        if labels_BN is None:
            logits_BNV = F.linear(gather_sequence(x_BnD, self.group), self.head.weight, self.head.bias)
            return all_gather(logits_BNV.movedim(-1, 0), self.group).movedim(0, -1)
        x_TD = all_gather(x_BnD, self.group).flatten(0, -2)
        labels_T = by_rank(labels_BN, self.group.size()).flatten()
        chunk_tokens = self.head.loss_chunk_tokens or len(x_TD)
        return self.cross_entropy(x_TD, self.head.weight, labels_T, chunk_tokens)

    def cross_entropy(self, x_TD: Tensor, weight_VD: Tensor, labels_T: Tensor, chunk_tokens: int) -> Tensor:
        """Sum the cross entropies of `x @ weight.T`: [T, D], [V, D], int64 [T] -> scalar, equal on all ranks.

        The head's bias is added, if it has one. The gradient of x is a sum over ranks; each rank has its own part.
        """
        if self.head.cross_entropy is fused_cross_entropy:
            return fused_cross_entropy_over_ranks(x_TD, weight_VD, labels_T, chunk_tokens, self.group.group_name)
        if torch.is_grad_enabled():
            softmax = self.loss_and_dlogits
            return linear_cross_entropy(x_TD, weight_VD, labels_T, chunk_tokens, softmax, **self.head.added)
        bias_V = self.head.bias
        chunks = zip(x_TD.split(chunk_tokens), labels_T.split(chunk_tokens), strict=True)
        losses = [self.loss_and_dlogits(F.linear(x, weight_VD, bias_V), labels)[0] for x, labels in chunks]
        return torch.stack(losses).sum()

    def loss_and_dlogits(self, logits_CV: Tensor, labels_C: Tensor) -> tuple[Tensor, Tensor]:
        """Summed loss of a chunk, and dlogits of this rank's words in the logits' dtype."""
        wide_CV = logits_CV.to(torch.promote_types(logits_CV.dtype, torch.float32))
        num_words = wide_CV.shape[1]
        has_label_C = labels_C != IGNORE_LABEL
        require_words(labels_C, self.group.size() * num_words)
        words_C = labels_C - self.group.rank() * num_words
        is_own_C = (words_C >= 0) & (words_C < num_words)
        max_C = wide_CV.amax(1)
        dist.all_reduce(max_C, dist.ReduceOp.MAX, group=self.group)
        exp_CV = torch.exp(wide_CV - max_C[:, None])
        label_C = torch.where(is_own_C, wide_CV.gather(1, words_C.clamp(0, num_words - 1)[:, None])[:, 0], 0)
        sums_2C = torch.stack([exp_CV.sum(1), label_C])
        dist.all_reduce(sums_2C, group=self.group)
        loss = torch.where(has_label_C, max_C + sums_2C[0].log() - sums_2C[1], 0).sum()
        is_label_CV = torch.arange(num_words, device=labels_C.device) == words_C[:, None]
        dlogits_CV = exp_CV / sums_2C[0][:, None] - is_label_CV.to(wide_CV.dtype)
        return loss, torch.where(has_label_C[:, None], dlogits_CV, 0).to(logits_CV.dtype)


def _softmax(group_name: str, num_words: int, labels_T: Tensor) -> VocabParallelSoftmax:
    """The softmax of this rank's words, which exchanges its statistics with the group. Labels must be words of all
    ranks."""
    group = _resolve_process_group(group_name)
    require_words(labels_T, group.size() * num_words)

    def exchange(statistics_3C: Tensor) -> Tensor:
        statistics_P3C = statistics_3C.new_empty(group.size(), *statistics_3C.shape)
        all_gather_rows(statistics_P3C.flatten(0, 1), statistics_3C, group=group)
        return statistics_P3C

    return VocabParallelSoftmax(group.rank() * num_words, exchange)


def _of_own_words(
    x_TD: Tensor, weight_VD: Tensor, labels_T: Tensor, chunk_tokens: int, trains_weight: bool, group: str
) -> tuple[Tensor, Tensor, Tensor]:
    softmax = _softmax(group, len(weight_VD), labels_T)
    return loss_and_gradients(x_TD, weight_VD, labels_T, chunk_tokens, trains_weight, softmax)


def _loss_of_own_words(x_TD: Tensor, weight_VD: Tensor, labels_T: Tensor, chunk_tokens: int, group: str) -> Tensor:
    return loss_alone(x_TD, weight_VD, labels_T, chunk_tokens, _softmax(group, len(weight_VD), labels_T))


fused_cross_entropy_over_ranks = head_ops("fused_cross_entropy_over_ranks", _of_own_words, _loss_of_own_words)
"""`fused_cross_entropy` of a vocabulary that is split over a group; the last argument is the name of the group."""
