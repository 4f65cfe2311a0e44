"""Load balancing of experts: token counts, the auxiliary losses, the router z-loss.

B batch · N sequence · E experts · K choices a token

Per sequence: `L = coef · Σ_i f_i · P_i` with `f_i = E / (K·N) · count_i` and P_i the mean normalised score of expert i
(arXiv:2101.03961, per sequence as in arXiv:2412.19437 section 2.1.2). Of a microbatch and of the batch of an optimizer
step it is the same with the counts and scores of all their tokens (arXiv:2501.11873); P_i of a batch is a sum over
microbatches, so one needs no more than f_i of the whole batch. count_i is the number of tokens with expert i
among the top K of their scores, without bias and groups (eq. 18). So the loss balances the scores, and a bias that
balances the load does not hide their imbalance. The bias update and the load metrics count the selected experts.
Where a sequence is split over ranks, the sums of a sequence are those of all its ranks, so the loss does not depend on
the layout.

A mean over sequences, this is Megatron Core's `seq_aux_loss`, summed over layers; the others are its `aux_loss` and
`global_aux_loss`. Megatron's gradients of the last have the loads of the microbatches so far.
Mixtral's in transformers is K times as large, a mean over layers, and counts all tokens of a batch together.
"""

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any, Literal

import torch
from torch import Tensor

from titan_moe.config.model import MoEConfig
from titan_moe.kernels.router.quantiles import NUM_BINS
from titan_moe.kernels.router.routing import Routing
from titan_moe.layers.wide_buffers import WideBuffers

LossReduction = Literal["mean", "sum"]
"""Whether the main loss of a forward is a mean over its tokens, or a sum."""
Sums = tuple[Tensor, Tensor, Tensor]
"""Sums over the tokens of sequences: shares [B, E], counts [B, E] and the z-loss's squares, a scalar."""


class _AttachAuxLoss(torch.autograd.Function):
    """Identity on the scores. Its backward adds up counts and auxiliary loss, and starts the loss's gradient.

    Backward runs exactly once per microbatch, however often forward runs, and never in validation.
    """

    @staticmethod
    def forward(ctx: Any, scores: Tensor, aux_loss: Tensor, scale: Tensor, *summands_and_totals: Tensor) -> Tensor:
        """The totals are those of the auxiliary loss and of each summand, in this order."""
        num_summands = len(summands_and_totals) // 2
        ctx.save_for_backward(aux_loss.detach(), scale, *summands_and_totals[:num_summands])
        # not saved tensors: several microbatches may be in flight, and each backward changes the totals in place
        ctx.totals = summands_and_totals[num_summands:]
        return scores.view_as(scores)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        aux_loss, scale, *summands = ctx.saved_tensors
        total_aux_loss, *totals = ctx.totals
        for summand, total in zip(summands, totals, strict=True):
            total.add_(summand)
        total_aux_loss.add_(aux_loss * scale)
        return grad, scale.to(aux_loss.dtype, copy=True), None, *[None] * (len(summands) + len(ctx.totals))


class LoadBalance(WideBuffers):
    """Count the selected experts' tokens and attach the balancing losses to the scores.

    `reduction` is that of the main loss over the tokens of a forward, and `scale` the factor on it; the balancing
    losses follow both. The defaults are those of a plain mean. The trainer sets a sum, and one over the tokens of the
    optimizer step that are routed, with a label or not. So a coefficient means the same for every layout, gradient
    accumulation and share of labels.
    If a layout splits sequences, `num_sequence_ranks` have a part of each, and `sum_over_tokens` sums over them; all of
    them then have the same losses, and each has the gradients of its own tokens. The default is the identity.
    For the loss of the whole batch, `sum_over_batch` sums the counts of one microbatch over the ranks that have others;
    the default is the identity. With several microbatches they are counted ahead: while `is_counting`, forwards add to
    `batch_counts_E`, which those with gradients read while `counts_ahead`. A forward of validation or text, whose
    balancing losses are not used, sums nothing over ranks.
    `share_sums_E`, `num_dropped` and `margins_EQ` are for metrics and for quantile balancing.
    """

    wide_buffers = ("aux_loss", "scale", "share_sums_E")
    tokens_per_expert_E: Tensor
    batch_counts_E: Tensor
    share_sums_E: Tensor
    margins_EQ: Tensor
    num_dropped: Tensor
    aux_loss: Tensor
    scale: Tensor

    def __init__(self, config: MoEConfig) -> None:
        super().__init__()
        self.coefs, self.z_loss_coef = config.aux_coefs, config.z_loss_coef
        self.num_experts, self.top_k = config.num_experts, config.top_k
        self.counts_margins, self.counts_dropped = config.bias_update == "quantile", config.capacity_factor > 0
        self.reduction: LossReduction = "mean"
        self.num_sequence_ranks = 1
        self.sum_over_tokens: Callable[[Tensor, Tensor, Tensor], Sums] = _whole_sequences
        self.sum_over_batch: Callable[[Tensor], Tensor] = _whole_batch
        self.counts_ahead = self.is_counting = False
        self.register_buffer(
            "tokens_per_expert_E", torch.zeros(config.num_experts, dtype=torch.int64), persistent=False
        )
        num_bins = NUM_BINS if config.bias_update == "quantile" else 0
        margins_EQ = torch.zeros(config.num_experts, num_bins, dtype=torch.int64)
        self.register_buffer("margins_EQ", margins_EQ, persistent=False)
        self.register_buffer("num_dropped", torch.zeros((), dtype=torch.int64), persistent=False)
        self.register_buffer("share_sums_E", torch.zeros(config.num_experts, dtype=torch.float32), persistent=False)
        self.register_buffer("batch_counts_E", torch.zeros_like(self.tokens_per_expert_E), persistent=False)
        self.register_buffer("aux_loss", torch.zeros((), dtype=torch.float32), persistent=False)
        self.register_buffer("scale", torch.ones((), dtype=torch.float32), persistent=False)

    def reset_buffers(self) -> None:
        """Zero the sums, and reset the scale."""
        self.zero_sums()
        self.batch_counts_E.zero_()
        self.scale.fill_(1.0)

    @property
    def sums(self) -> tuple[Tensor, ...]:
        """What microbatches add up in place."""
        return self.aux_loss, self.tokens_per_expert_E, self.share_sums_E, self.margins_EQ, self.num_dropped

    def zero_sums(self) -> None:
        """Begin a step."""
        for total in self.sums:
            total.zero_()

    def forward(self, routing: Routing, margins_EQ: Tensor | None = None, *, is_masked: bool = False) -> Tensor:
        """Return the top-k scores unchanged, with the losses attached and the counts accumulated in backward, and the
        margins of quantile balancing, if there are any. With `is_masked`, sequences have as many tokens as are counted.

        In training a router that is frozen together with all that is before it accumulates in forward. What repeats a
        forward takes back what that adds (`repeated`).
        """
        # a loss with coefficient 0 is detached: its backward would only add zeros
        share_sums_BE = routing.share_sums_BE if self.coefs.are_used else routing.share_sums_BE.detach()
        z_sum = routing.z_sum if self.z_loss_coef else routing.z_sum.detach()
        sums = self.sum_over_tokens(share_sums_BE, routing.aux_counts_BE, z_sum)
        num_sequences, num_tokens = routing.topk_ids_BNK.shape[:2]
        aux_loss = self._loss(*sums, num_sequences, None if is_masked else num_tokens * self.num_sequence_ranks)
        added = [
            (routing.counts_BE.sum(0), self.tokens_per_expert_E),
            (routing.share_sums_BE.detach().sum(0), self.share_sums_E),
        ]
        if margins_EQ is not None:
            added.append((margins_EQ, self.margins_EQ))
        if self.counts_dropped:
            added.append(((routing.topk_ids_BNK < 0).sum(), self.num_dropped))
        if torch.is_grad_enabled() and not routing.topk_scores_BNK.requires_grad:  # no backward comes here
            for summand, total in [(aux_loss * self.scale, self.aux_loss), *added]:
                total.add_(summand)
            return routing.topk_scores_BNK
        summands, totals = zip(*added, strict=True)
        return _AttachAuxLoss.apply(routing.topk_scores_BNK, aux_loss, self.scale, *summands, self.aux_loss, *totals)

    def _loss(
        self, share_sums_BE: Tensor, counts_BE: Tensor, z_sum: Tensor, num_sequences: int, num_tokens: int | None
    ) -> Tensor:
        """All balancing losses, of these sums over the tokens of whole sequences. `num_tokens` are those of each; None
        for as many as are counted."""
        dtype = share_sums_BE.dtype
        products_BE = counts_BE.to(dtype) * share_sums_BE
        total: Tensor | int
        if num_tokens is None:
            counted_B1 = counts_BE.sum(1, keepdim=True).to(dtype) / self.top_k
            products_BE, num_tokens, total = products_BE / counted_B1.clamp(min=1), 1, counted_B1.sum().clamp(min=1)
        else:
            total = max(num_sequences * num_tokens, 1)
        weight = 1.0 / total if self.reduction == "mean" else 1.0
        # each sequence is weighted by its number of tokens, like the main loss
        factor = weight * self.coefs.sequence * self.num_experts / (self.top_k * max(num_tokens, 1))
        aux_loss = products_BE.sum() * factor
        if self.coefs.microbatch:
            factor = weight * self.coefs.microbatch * self.num_experts / (self.top_k * total)
            aux_loss = aux_loss + (counts_BE.sum(0).to(dtype) * share_sums_BE.sum(0)).sum() * factor
        if self.coefs.global_batch:
            loads_E = self._batch_loads(counts_BE.sum(0), dtype)
            aux_loss = aux_loss + (loads_E * share_sums_BE.sum(0)).sum() * (weight * self.coefs.global_batch)
        return aux_loss + weight * self.z_loss_coef * z_sum

    def _batch_loads(self, counts_E: Tensor, dtype: torch.dtype) -> Tensor:
        """The load of each expert over the mean, f_i, in the whole batch, given the counts of this microbatch."""
        if self.is_counting:
            self.batch_counts_E.add_(counts_E.to(self.batch_counts_E.dtype))
        elif torch.is_grad_enabled():
            counts_E = self.batch_counts_E if self.counts_ahead else self.sum_over_batch(counts_E)
        return counts_E.to(dtype) * (self.num_experts / counts_E.sum().clamp(min=1).to(dtype))


@contextmanager
def repeated(balances: Iterable[LoadBalance]) -> Iterator[None]:
    """Repeat forwards: the sums are those of the first time."""
    before = [(total, total.clone()) for balance in balances for total in balance.sums]
    try:
        yield
    finally:
        for total, value in before:
            total.copy_(value)


def _whole_sequences(share_sums_BE: Tensor, counts_BE: Tensor, z_sum: Tensor) -> Sums:
    """The default of `LoadBalance.sum_over_tokens`."""
    return share_sums_BE, counts_BE, z_sum


def _whole_batch(counts_E: Tensor) -> Tensor:
    """The default of `LoadBalance.sum_over_batch`."""
    return counts_E
