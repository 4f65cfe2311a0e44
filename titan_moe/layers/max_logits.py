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
    """Identity on the result of attention. Its backward measures the logits from queries and keys, and keeps the larger
    of these and of those before.

    The backward of attention needs queries and keys in any case. Where it keeps copies of them instead, wider ones for
    sinks without FlexAttention or scaled ones of PyTorch's "math", both are in memory.

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


class LargestLogits(WideBuffers):
    """The largest logits of a step, of all heads of the model: -inf of heads that this rank does not compute, and of
    all before the first backward."""

    wide_buffers = ("logits_H",)
    logits_H: Tensor

    def __init__(self, num_heads: int, like: Tensor) -> None:
        """They are where a parameter like `like` is, in fp32 or wider."""
        super().__init__()
        wide = torch.promote_types(like.dtype, torch.float32)
        start_H = torch.full((num_heads,), -torch.inf, dtype=wide, device=like.device)
        self.register_buffer("logits_H", start_H, persistent=False)

    def reset_buffers(self) -> None:
        """Begin a step."""
        self.logits_H.fill_(-torch.inf)


class MeasuredAttention:
    """The `attend` of an attention layer, which keeps the largest logits of its heads, from `first_head` on."""

    def __init__(
        self, attend: Callable[..., Tensor], largest: LargestLogits, measure: MaxLogits, first_head: int
    ) -> None:
        self.attend, self.largest, self.measure, self.first_head = attend, largest, measure, first_head

    def __call__(
        self, q_BNHD: Tensor, k_BNHD: Tensor, v_BNHD: Tensor, context: Context, scale: float, *sinks: Tensor
    ) -> Tensor:
        """As the attention that it surrounds; sinks are no logits of a query and a key."""
        out_BNHD = self.attend(q_BNHD, k_BNHD, v_BNHD, context, scale, *sinks)
        if not torch.is_grad_enabled():
            return out_BNHD
        keys = q_BNHD.detach(), k_BNHD.detach()
        measured: Tensor = _MeasureInBackward.apply(
            out_BNHD, *keys, self.largest.logits_H, self.measure, scale, self.first_head, *context.pairs
        )
        return measured
