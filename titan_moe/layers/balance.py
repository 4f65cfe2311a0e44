"""Keeping experts evenly loaded: counts, the per-sequence auxiliary loss, the router z-loss.

B batch · N sequence · E experts · K choices a token

Per sequence: `L = coef · E / (K·N) · Σ_i count_i · P_i` with P_i the mean normalised score of expert i
(arXiv:2101.03961, per sequence as in arXiv:2412.19437 section 2.1.2). A sequence lives on one rank, so the loss does
not depend on the layout.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from titan_moe.config.model import MoEConfig
from titan_moe.kernels.router.routing import Routing


class _Account(torch.autograd.Function):
    """Identity on the scores whose backward books the counts and the auxiliary loss, and sends its gradient.

    Backward runs once a microbatch, however often forward does, and not at all in validation.
    """

    @staticmethod
    def forward(
        ctx: Any, scores: Tensor, aux_loss: Tensor, counts_E: Tensor, booked_E: Tensor, booked: Tensor, scale: Tensor
    ) -> Tensor:
        ctx.save_for_backward(aux_loss.detach(), counts_E, scale)
        ctx.books = booked_E, booked  # not saved tensors: microbatches in flight book into them one after the other
        return scores.view_as(scores)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        aux_loss, counts_E, scale = ctx.saved_tensors
        booked_E, booked = ctx.books
        booked_E.add_(counts_E)
        booked.add_(aux_loss * scale)
        return grad, scale.to(aux_loss.dtype, copy=True), None, None, None, None


class LoadBalance(nn.Module):
    """Books what each expert was given and attaches the balancing losses to the scores.

    `scale` is the scale of the main loss (one over the tokens of the optimizer step, set by the step), so that the
    gradients of both have the same meaning under every layout and accumulation. `sum_over_tokens` makes per-rank sums
    whole where a layout splits a sequence; the default, identity, is right where it does not.
    """

    tokens_per_expert_E: Tensor
    aux_loss: Tensor
    scale: Tensor

    def __init__(self, config: MoEConfig) -> None:
        super().__init__()
        self.aux_loss_coef, self.z_loss_coef = config.aux_loss_coef, config.z_loss_coef
        self.num_experts, self.top_k = config.num_experts, config.top_k
        self.sum_over_tokens: Callable[[Tensor], Tensor] = _identity
        self.register_buffer(
            "tokens_per_expert_E", torch.zeros(config.num_experts, dtype=torch.int64), persistent=False
        )
        self.register_buffer("aux_loss", torch.zeros((), dtype=torch.float32), persistent=False)
        self.register_buffer("scale", torch.ones((), dtype=torch.float32), persistent=False)

    def reset_buffers(self) -> None:
        """Forget what was booked."""
        self.tokens_per_expert_E.zero_()
        self.aux_loss.zero_()
        self.scale.fill_(1.0)

    def forward(self, routing: Routing) -> Tensor:
        """The chosen scores, unchanged, with losses attached and counts to be booked."""
        num_tokens = routing.topk_ids_BNK.shape[1]
        # a loss without weight is not differentiated: its backward would add zeros, at the price of a pass
        share_sums_BE = routing.share_sums_BE if self.aux_loss_coef else routing.share_sums_BE.detach()
        z_sum = routing.z_sum if self.z_loss_coef else routing.z_sum.detach()
        share_sums_BE = self.sum_over_tokens(share_sums_BE)
        load_BE = self.sum_over_tokens(routing.counts_BE).to(share_sums_BE.dtype)
        # each sequence weighs as many tokens as it has, like the main loss
        aux_loss = (load_BE * share_sums_BE).sum() * (self.aux_loss_coef * self.num_experts / (self.top_k * num_tokens))
        counts_E = routing.counts_BE.sum(0)
        return _Account.apply(
            routing.topk_scores_BNK,
            aux_loss + self.z_loss_coef * z_sum,
            counts_E,
            self.tokens_per_expert_E,
            self.aux_loss,
            self.scale,
        )


def _identity(x: Tensor) -> Tensor:
    return x
