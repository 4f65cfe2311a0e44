"""The output head and the cross entropy in one, a chunk of tokens at a time.

T tokens · D width · V vocabulary · C tokens in a chunk

Physics: three GEMMs of 2·T·D·V FLOPs (logits, dX, dW) and a few memory passes over the logits. Whole logits of 16,384 tokens and
152k words would take 5 GB in bf16 and twice that in fp32; a chunk's logits are turned into their own gradient at once, in the
forward pass, so that C·V elements are all that ever exists. What is kept for backward is dX (T·D) and dW (V·D), for a loss
gradient of one; backward multiplies them by the gradient that arrives.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from titan_moe.kernels.registry import Kernel, Sample, register

IGNORE_LABEL = -100


def linear_cross_entropy_reference(x_TD: Tensor, weight_VD: Tensor, labels_T: Tensor, chunk_tokens: int = 0) -> Tensor:
    """Sum of the cross entropies of x's logits, all logits at once, in at least fp32."""
    logits_TV = F.linear(x_TD, weight_VD)
    logits_TV = logits_TV.to(torch.promote_types(logits_TV.dtype, torch.float32))
    return F.cross_entropy(logits_TV, labels_T, ignore_index=IGNORE_LABEL, reduction="sum")


def _loss_and_dlogits(logits_CV: Tensor, labels_C: Tensor) -> tuple[Tensor, Tensor]:
    """Summed loss of a chunk, and its gradient by the logits in the logits' own dtype."""
    wide_CV = logits_CV.to(torch.promote_types(logits_CV.dtype, torch.float32))
    counts_C1 = (labels_C != IGNORE_LABEL)[:, None]
    index_C1 = labels_C.clamp(min=0)[:, None]
    log_norm_C1 = torch.logsumexp(wide_CV, dim=-1, keepdim=True)
    loss = torch.where(counts_C1, log_norm_C1 - wide_CV.gather(1, index_C1), 0).sum()
    dlogits_CV = torch.exp(wide_CV - log_norm_C1)
    dlogits_CV.scatter_add_(1, index_C1, torch.full_like(log_norm_C1, -1.0))
    return loss, torch.where(counts_C1, dlogits_CV, 0).to(logits_CV.dtype)


class _LinearCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x_TD: Tensor, weight_VD: Tensor, labels_T: Tensor, chunk_tokens: int) -> Tensor:
        loss = x_TD.new_zeros((), dtype=torch.promote_types(x_TD.dtype, torch.float32))
        grad_x_TD = torch.empty_like(x_TD)
        grad_weight_VD = torch.zeros_like(weight_VD, dtype=loss.dtype)
        for begin in range(0, x_TD.shape[0], chunk_tokens):
            x_CD, labels_C = x_TD[begin : begin + chunk_tokens], labels_T[begin : begin + chunk_tokens]
            chunk_loss, dlogits_CV = _loss_and_dlogits(x_CD @ weight_VD.T, labels_C)
            loss += chunk_loss
            torch.mm(dlogits_CV, weight_VD, out=grad_x_TD[begin : begin + chunk_tokens])
            grad_weight_VD += dlogits_CV.T @ x_CD
        ctx.save_for_backward(grad_x_TD, grad_weight_VD.to(weight_VD.dtype))
        return loss

    @staticmethod
    def backward(ctx: Any, grad_loss: Tensor) -> tuple[Tensor, Tensor, None, None]:
        grad_x_TD, grad_weight_VD = ctx.saved_tensors
        return (grad_x_TD * grad_loss).to(grad_x_TD.dtype), (grad_weight_VD * grad_loss).to(grad_weight_VD.dtype), None, None


def linear_cross_entropy(x_TD: Tensor, weight_VD: Tensor, labels_T: Tensor, chunk_tokens: int = 4096) -> Tensor:
    """Sum of the cross entropies of `x @ weight.T` against the labels, without ever holding all logits.

    Shapes: x [T, D], weight [V, D], labels int64 [T] with `IGNORE_LABEL` where there is none -> scalar, at least fp32.
    `chunk_tokens` tokens have logits at one time; 0 makes all logits at once. Without gradients only the loss is computed.
    """
    if chunk_tokens == 0:
        return linear_cross_entropy_reference(x_TD, weight_VD, labels_T)
    if not torch.is_grad_enabled():
        chunks = zip(x_TD.split(chunk_tokens), labels_T.split(chunk_tokens), strict=True)
        return torch.stack([linear_cross_entropy_reference(x, weight_VD, labels) for x, labels in chunks]).sum()
    return _LinearCrossEntropy.apply(x_TD, weight_VD, labels_T, chunk_tokens)


def _samples(device: torch.device, dtype: torch.dtype) -> list[Sample]:
    x_TD = torch.randn(37, 16, device=device, dtype=dtype)
    weight_VD = torch.randn(50, 16, device=device, dtype=dtype)
    labels_T = torch.randint(50, (37,), device=device)
    some_T = labels_T.masked_fill(torch.rand(37, device=device) < 0.3, IGNORE_LABEL)
    none_T = torch.full_like(labels_T, IGNORE_LABEL)
    cases = (("all", labels_T, 16), ("some_ignored", some_T, 16), ("all_ignored", none_T, 16), ("one_chunk", some_T, 64))
    return [Sample(name, (x_TD, weight_VD, labels, chunk), 2) for name, labels, chunk in cases]


register(Kernel("linear_cross_entropy", linear_cross_entropy, linear_cross_entropy_reference, _samples))
