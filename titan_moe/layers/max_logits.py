"""Attention whose largest logit of each head is measured, for QK-clip.

B batch · N sequence · H heads · D head width
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from titan_moe.kernels.attention.max_logits import MaxLogits, Pairs
from titan_moe.layers.attention import Context
from titan_moe.layers.wide_buffers import WideBuffers


class _MeasureInBackward(torch.autograd.Function):
    """Identity on the result of attention. Its backward measures the logits, from queries and keys that backward needs
    in any case, and keeps the larger of these and of those before.

    Backward runs exactly once per microbatch, however often forward runs, and never in validation.
    """

    @staticmethod
    def forward(
        ctx: Any, out: Tensor, q: Tensor, k: Tensor, total_H: Tensor, measure: MaxLogits, scale: float, first_head: int,
        is_causal: bool, window: int | None, chunk: int | None, *of_pairs: Tensor | None,
    ) -> Tensor:  # fmt: skip
        ctx.save_for_backward(q, k, *of_pairs)
        # not a saved tensor: several microbatches may be in flight, and each backward changes it in place
        ctx.total_H, ctx.measure, ctx.scale, ctx.first_head = total_H, measure, scale, first_head
        ctx.limits = is_causal, window, chunk
        return out.view_as(out)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        q, k, *of_pairs = ctx.saved_tensors
        own_H = ctx.measure(q, k, ctx.scale, Pairs(*ctx.limits, *of_pairs)).to(ctx.total_H.dtype)
        before, total_H = ctx.first_head, ctx.total_H
        own_H = nn.functional.pad(own_H, (before, len(total_H) - before - len(own_H)), value=-torch.inf)
        total_H.copy_(torch.maximum(total_H, own_H))
        return grad, *[None] * (9 + len(of_pairs))


class MeasuredAttention(WideBuffers):
    """The `attend` of an attention layer, which keeps the largest logits of a step.

    `max_logits_H` has those of all heads of the model, of which this rank computes some, from `first_head` on. Of
    others it has -inf, as of all heads before the first backward. `measure` computes those of a forward.
    """

    wide_buffers = ("max_logits_H",)
    max_logits_H: Tensor

    def __init__(
        self, attend: Callable[..., Tensor], measure: MaxLogits, *, num_heads: int, first_head: int, like: Tensor
    ) -> None:
        """The buffer is where a parameter like `like` is, in fp32 or wider."""
        super().__init__()
        self.attend, self.measure, self.first_head = attend, measure, first_head
        wide = torch.promote_types(like.dtype, torch.float32)
        start_H = torch.full((num_heads,), -torch.inf, dtype=wide, device=like.device)
        self.register_buffer("max_logits_H", start_H, persistent=False)

    def reset_buffers(self) -> None:
        """Begin a step."""
        self.max_logits_H.fill_(-torch.inf)

    def forward(
        self, q_BNHD: Tensor, k_BNHD: Tensor, v_BNHD: Tensor, context: Context, scale: float, *sinks: Tensor
    ) -> Tensor:
        """As the attention that it surrounds; sinks are no logits of a query and a key."""
        out_BNHD = self.attend(q_BNHD, k_BNHD, v_BNHD, context, scale, *sinks)
        if not torch.is_grad_enabled():
            return out_BNHD
        keys = q_BNHD.detach(), k_BNHD.detach()
        measured: Tensor = _MeasureInBackward.apply(
            out_BNHD, *keys, self.max_logits_H, self.measure, scale, self.first_head, *context.pairs
        )
        return measured
