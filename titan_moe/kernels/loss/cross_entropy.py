"""Output head and cross entropy in PyTorch, a chunk of tokens at a time.

T tokens · D width · V vocabulary · C tokens in a chunk

Physics: three GEMMs of 2·T·D·V FLOPs (logits, dX, dW) and a few memory passes over the logits. All logits of 16,384
tokens and 152k words take 5 GB in bf16 and twice that in fp32. Here the forward pass computes the logits of one chunk
and replaces them by their gradient at once, so at most C·V elements of logits exist. Saved for backward are dX (T·D)
and dW (V·D) for a loss gradient of one. Backward multiplies them by the incoming gradient.
"""

from collections.abc import Callable
from math import prod
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.flop_counter import register_flop_formula

from titan_moe.kernels.autocast import as_operand
from titan_moe.kernels.registry import Kernel, register

IGNORE_LABEL = -100


def require_words(labels_T: Tensor, num_words: int) -> None:
    """Refuse a label that is outside of the vocabulary, and not `IGNORE_LABEL`: on a GPU by an assertion there, as
    PyTorch's cross entropy does. The host waits for nothing, so CUDA graphs may contain it.

    Raises: RuntimeError, on CPUs.
    """
    is_word_T = (labels_T >= 0) & (labels_T < num_words)
    torch._assert_async((is_word_T | (labels_T == IGNORE_LABEL)).all(), "a label is outside of the vocabulary")


def linear_cross_entropy_reference(
    x_TD: Tensor, weight_VD: Tensor, labels_T: Tensor, chunk_tokens: int = 0, bias_V: Tensor | None = None
) -> Tensor:
    """Sum the cross entropies of `x @ weight.T + bias`, all logits at once, in at least fp32."""
    logits_TV = F.linear(x_TD, weight_VD, bias_V)
    logits_TV = logits_TV.to(torch.promote_types(logits_TV.dtype, torch.float32))
    return F.cross_entropy(logits_TV, labels_T, ignore_index=IGNORE_LABEL, reduction="sum")


def loss_and_dlogits(logits_CV: Tensor, labels_C: Tensor) -> tuple[Tensor, Tensor]:
    """Summed loss of a chunk and dlogits in the logits' dtype; a few fused passes if compiled."""
    wide_CV = logits_CV.to(torch.promote_types(logits_CV.dtype, torch.float32))
    has_label_C1 = (labels_C != IGNORE_LABEL)[:, None]
    words_C1 = torch.where(has_label_C1, labels_C[:, None], 0)  # any other label outside of the vocabulary is an error
    logsumexp_C1 = torch.logsumexp(wide_CV, dim=-1, keepdim=True)
    is_label_CV = torch.arange(logits_CV.shape[1], device=logits_CV.device) == labels_C[:, None]
    dlogits_CV = torch.where(has_label_C1, torch.exp(wide_CV - logsumexp_C1) - is_label_CV.to(wide_CV.dtype), 0)
    loss = torch.where(has_label_C1, logsumexp_C1 - wide_CV.gather(1, words_C1), 0).sum()
    return loss, dlogits_CV.to(logits_CV.dtype)


LossAndGradient = Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]
CrossEntropy = Callable[..., Tensor]
"""x_TD, weight_VD, labels_T, chunk_tokens -> summed loss. Those without Triton take `bias_V` by name too."""


class _LinearCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x_TD: Tensor,
        weight_VD: Tensor,
        bias_V: Tensor | None,
        labels_T: Tensor,
        chunk_tokens: int,
        softmax: LossAndGradient,
        trains_weight: bool,
    ) -> Tensor:
        losses, grads_x_CD, wide = [], [], torch.promote_types(weight_VD.dtype, torch.float32)
        grad_weight_VD = torch.zeros_like(weight_VD, dtype=wide) if trains_weight else None
        grad_bias_V = None if bias_V is None else torch.zeros_like(bias_V, dtype=wide)
        for x_CD, labels_C in zip(x_TD.split(chunk_tokens), labels_T.split(chunk_tokens), strict=True):
            loss, dlogits_CV = softmax(F.linear(x_CD, weight_VD, bias_V), labels_C)
            losses.append(loss)
            grads_x_CD.append(dlogits_CV @ weight_VD)
            if grad_weight_VD is not None:
                grad_weight_VD = _add_product(grad_weight_VD, dlogits_CV.T, x_CD)
            if grad_bias_V is not None:
                grad_bias_V = grad_bias_V + dlogits_CV.sum(0, dtype=wide)
        ctx.save_for_backward(torch.cat(grads_x_CD), grad_weight_VD, grad_bias_V)
        ctx.dtype = x_TD.dtype
        return torch.stack(losses).sum()

    @staticmethod
    def backward(ctx: Any, grad_loss: Tensor) -> tuple[Tensor | None, ...]:
        # the product is computed in the loss's dtype: in bf16 the factor 1/tokens would be rounded. The cast copies,
        # because compiled torch 2.11 loses a gradient that ends in a cast to its own dtype
        grads = [
            None if grad is None else (grad.to(grad_loss.dtype) * grad_loss).to(ctx.dtype, copy=True)
            for grad in ctx.saved_tensors
        ]
        return *grads, None, None, None, None


@torch.library.custom_op("titan_moe::add_product", mutates_args=())
def _add_product(total: Tensor, a: Tensor, b: Tensor) -> Tensor:
    """Compute total + a @ b in total's dtype. On a GPU, a half-precision GEMM adds to an fp32 total itself.

    A custom op, because torch 2.11 cannot trace `addmm` with another output dtype.
    """
    if a.is_cuda and a.dtype != total.dtype:
        return torch.addmm(total, a, b, out_dtype=total.dtype)
    return total + (a @ b)


_add_product.register_fake(lambda total, a, b: torch.empty_like(total))
register_flop_formula(torch.ops.titan_moe.add_product)(lambda total, a, b, **_: 2 * prod(a) * b[1])


def linear_cross_entropy(
    x_TD: Tensor,
    weight_VD: Tensor,
    labels_T: Tensor,
    chunk_tokens: int = 4096,
    softmax: LossAndGradient = loss_and_dlogits,
    bias_V: Tensor | None = None,
) -> Tensor:
    """Sum the cross entropies of `x @ weight.T + bias` against the labels. All logits never exist at once.

    Shapes: x [T, D], weight [V, D], bias [V], labels int64 [T], `IGNORE_LABEL` for none -> scalar in at least fp32.

    `chunk_tokens` is the number of tokens whose logits exist at a time; 0 computes all logits at once. With gradients
    disabled only the loss is computed. `softmax` is `loss_and_dlogits`, eager or compiled.
    """
    if chunk_tokens == 0:
        return linear_cross_entropy_reference(x_TD, weight_VD, labels_T, bias_V=bias_V)
    if not torch.is_grad_enabled():
        chunks = zip(x_TD.split(chunk_tokens), labels_T.split(chunk_tokens), strict=True)
        losses = [linear_cross_entropy_reference(x, weight_VD, labels, bias_V=bias_V) for x, labels in chunks]
        return torch.stack(losses).sum()
    bias_V = None if bias_V is None else as_operand(bias_V)
    trains_weight = weight_VD.requires_grad  # a frozen one has no gradient, and no memory for one
    operands = as_operand(x_TD), as_operand(weight_VD), bias_V, labels_T
    return _LinearCrossEntropy.apply(*operands, chunk_tokens, softmax, trains_weight)


register(Kernel("linear_cross_entropy", linear_cross_entropy, linear_cross_entropy_reference))
