"""Output head and cross entropy as one op: one buffer of logits, softmax and gradients in place.

T tokens · D width · V vocabulary · C tokens in a chunk

Physics: compute-bound, three GEMMs of 2·T·D·V FLOPs. In bf16 the softmax moves 6·T·V bytes, and each chunk moves 8·D·V
bytes to add to the fp32 weight gradient: large chunks are faster, small chunks need less memory. Temporary memory is
2·C·V bytes of logits, which are overwritten by their gradient, and 4·V·D bytes of the fp32 weight gradient. At 16,384 x
2048 x 151,936 the GEMMs are 30.6 TFLOP, the softmax moves 15 GB, and eight chunks of 2048 tokens move 20 GB for the
weight gradient. Memory peaks in backward, where the fp32 weight gradient is cast to bf16: 1.2 GiB beyond the gradients.
Aim: under 1.5 GiB, and 80 % of the speed of the GEMMs alone.

As in cross_entropy.py, forward computes the gradients for a loss gradient of one, and backward scales them. The whole
forward is one op, because otherwise chunks could not share buffers under autograd and the compiler. The reference is
`linear_cross_entropy_reference`.
"""

from collections.abc import Callable, Iterator
from math import prod
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils.flop_counter import register_flop_formula

from titan_moe.kernels.autocast import as_operand
from titan_moe.kernels.device import refuse_cpu
from titan_moe.kernels.loss.cross_entropy import (
    IGNORE_LABEL,
    linear_cross_entropy_reference,
    require_words,
)
from titan_moe.kernels.loss.scaled_cast import scaled_cast
from titan_moe.kernels.loss.softmax_gradient import softmax_gradient
from titan_moe.kernels.registry import Kernel, register

CHUNK_TOKENS = 2048
ROW_ELEMENTS = 64
"""Rows of logits begin at multiples of this, so they are aligned for the GEMMs with any vocabulary size."""


Softmax = Callable[..., None]
"""Logits, labels, losses to write, the ignored label, and whether the logits become their gradient."""


def loss_and_gradients(
    x_TD: Tensor,
    weight_VD: Tensor,
    labels_T: Tensor,
    chunk_tokens: int,
    trains_weight: bool = True,
    softmax: Softmax = softmax_gradient,
) -> tuple[Tensor, Tensor, Tensor]:
    """Summed loss in fp32; for a loss gradient of one, dX in x's dtype and dW in fp32, which is empty for a weight that
    does not train.

    If the vocabulary is split over ranks, and `softmax` covers all of it, dX is this rank's part of a sum over ranks.
    """
    losses_T = x_TD.new_empty(x_TD.shape[0], dtype=torch.float32)
    dx_TD, dweight_VD = empty_gradients(x_TD, weight_VD, trains_weight)
    if x_TD.shape[0] == 0:
        dweight_VD.zero_()
    for tokens, logits_CV in logits_by_chunk(x_TD, weight_VD, chunk_tokens):
        softmax(logits_CV, labels_T[tokens], losses_T[tokens], IGNORE_LABEL)
        add_gradients(logits_CV, x_TD, weight_VD, tokens, dx_TD, dweight_VD)
    return losses_T.sum(), dx_TD, dweight_VD


def loss_alone(
    x_TD: Tensor, weight_VD: Tensor, labels_T: Tensor, chunk_tokens: int, softmax: Softmax = softmax_gradient
) -> Tensor:
    """Summed loss in fp32, no gradients."""
    losses_T = x_TD.new_empty(x_TD.shape[0], dtype=torch.float32)
    for tokens, logits_CV in logits_by_chunk(x_TD, weight_VD, chunk_tokens):
        softmax(logits_CV, labels_T[tokens], losses_T[tokens], IGNORE_LABEL, writes_gradient=False)
    return losses_T.sum()


def empty_gradients(x_TD: Tensor, weight_VD: Tensor, trains_weight: bool = True) -> tuple[Tensor, Tensor]:
    """Uninitialised dX in x's dtype and dW in fp32, without rows for a weight that does not train."""
    num_words = weight_VD.shape[0] if trains_weight else 0
    return x_TD.new_empty(x_TD.shape), weight_VD.new_empty(num_words, weight_VD.shape[1], dtype=torch.float32)


def logits_by_chunk(x_TD: Tensor, weight_VD: Tensor, chunk_tokens: int) -> Iterator[tuple[slice, Tensor]]:
    """Yield each chunk's tokens and logits. All chunks share one buffer, so a chunk overwrites the one before."""
    num_tokens, num_words = x_TD.shape[0], weight_VD.shape[0]
    row = -(-num_words // ROW_ELEMENTS) * ROW_ELEMENTS
    buffer_CV = x_TD.new_empty(min(chunk_tokens, num_tokens), row)[:, :num_words]
    for first in range(0, num_tokens, chunk_tokens):
        tokens = slice(first, min(first + chunk_tokens, num_tokens))
        yield tokens, torch.mm(x_TD[tokens], weight_VD.T, out=buffer_CV[: tokens.stop - first])


def add_gradients(
    dlogits_CV: Tensor, x_TD: Tensor, weight_VD: Tensor, tokens: slice, dx_TD: Tensor, dweight_VD: Tensor
) -> None:
    """Write the chunk's part of dX, and add its part to dW. The first chunk overwrites dW."""
    torch.mm(dlogits_CV, weight_VD, out=dx_TD[tokens])
    if not dweight_VD.shape[0]:
        return
    beta = int(tokens.start > 0)
    a, b, wide = dlogits_CV.T, x_TD[tokens], dweight_VD.dtype
    if a.device.type == "cpu" or a.dtype == wide:
        torch.addmm(dweight_VD, a.to(wide), b.to(wide), beta=beta, out=dweight_VD)
    else:  # the GEMM of half-precision matrices adds to the fp32 sum
        torch.addmm(dweight_VD, a, b, beta=beta, out_dtype=wide, out=dweight_VD)


class HeadOps(NamedTuple):
    """The two operations of a head and its loss."""

    with_gradients: Callable[..., tuple[Tensor, Tensor, Tensor]]
    alone: Callable[..., Tensor]

    def __call__(self, x_TD: Tensor, weight_VD: Tensor, labels_T: Tensor, chunk_tokens: int, *rest: Any) -> Tensor:
        """The summed loss; what gradients need is computed if they are wanted.

        Raises: TypeError for fp64, which the kernels would compute in fp32.
        """
        if x_TD.dtype == torch.float64:
            raise TypeError('the fused cross entropy computes in fp32: for fp64 take perf.override.head = "torch"')
        chunk_tokens = chunk_tokens or max(x_TD.shape[0], 1)
        labels_T = labels_T.contiguous()
        x_TD, weight_VD = as_operand(x_TD), as_operand(weight_VD)
        if torch.is_grad_enabled() and (x_TD.requires_grad or weight_VD.requires_grad):
            return self.with_gradients(x_TD, weight_VD, labels_T, chunk_tokens, weight_VD.requires_grad, *rest)[0]
        return self.alone(x_TD, weight_VD, labels_T, chunk_tokens, *rest)


def head_ops(name: str, with_gradients: Callable[..., Any], alone: Callable[..., Any]) -> HeadOps:
    """Register functions with the arguments and results of `loss_and_gradients` and `loss_alone` as
    `titan_moe::<name>` and `titan_moe::<name>_loss`. Their first four arguments are x, weight, labels and
    `chunk_tokens`; the next one of the first is whether the weight trains."""
    train = torch.library.custom_op(f"titan_moe::{name}", with_gradients, mutates_args=())
    lose = torch.library.custom_op(f"titan_moe::{name}_loss", alone, mutates_args=())
    train.register_fake(lambda x, weight, _, __, trains, *___: (_empty_loss(x), *empty_gradients(x, weight, trains)))
    lose.register_fake(lambda x, *_: _empty_loss(x))
    train.register_autograd(_backward, setup_context=_save)
    namespace = torch.ops.titan_moe
    register_flop_formula(getattr(namespace, name))(_count_with_gradients)
    register_flop_formula(getattr(namespace, f"{name}_loss"))(lambda x, weight, *_, **__: 2 * x[0] * prod(weight))
    return HeadOps(train, lose)


def _count_with_gradients(x: Any, weight: Any, labels: Any, chunk: Any, trains_weight: bool, *_: Any, **__: Any) -> int:
    return (4 + 2 * trains_weight) * x[0] * prod(weight)


def _empty_loss(x_TD: Tensor) -> Tensor:
    return x_TD.new_empty((), dtype=torch.float32)


_scaled_cast = torch.library.custom_op("titan_moe::scaled_cast", scaled_cast, mutates_args=())
_scaled_cast.register_fake(lambda x, factor, dtype: torch.empty_like(x, dtype=dtype))


def _save(ctx: Any, inputs: tuple[Tensor, ...], output: tuple[Tensor, Tensor, Tensor]) -> None:
    _, dx_TD, dweight_VD = output
    ctx.save_for_backward(dx_TD, dweight_VD)
    ctx.mark_non_differentiable(dx_TD, dweight_VD)
    ctx.set_materialize_grads(False)  # otherwise backward gets fp32 zeros of dW's size
    ctx.dtype = inputs[0].dtype


def _backward(ctx: Any, grad_loss: Tensor | None, *_: None) -> tuple[Tensor | None, ...]:
    others = [None] * (len(ctx.needs_input_grad) - 2)
    if grad_loss is None:
        return None, None, *others
    wanted = zip(ctx.saved_tensors, ctx.needs_input_grad[:2], strict=True)
    grads = [_scaled_cast(grad, grad_loss, ctx.dtype) if is_needed else None for grad, is_needed in wanted]
    return *grads, *others


def _of_all_words(
    x_TD: Tensor, weight_VD: Tensor, labels_T: Tensor, chunk_tokens: int, trains_weight: bool
) -> tuple[Tensor, Tensor, Tensor]:
    require_words(labels_T, len(weight_VD))
    refuse_cpu(x_TD, "head", "triton")
    return loss_and_gradients(x_TD, weight_VD, labels_T, chunk_tokens, trains_weight)


def _loss_of_all_words(x_TD: Tensor, weight_VD: Tensor, labels_T: Tensor, chunk_tokens: int) -> Tensor:
    require_words(labels_T, len(weight_VD))
    refuse_cpu(x_TD, "head", "triton")
    return loss_alone(x_TD, weight_VD, labels_T, chunk_tokens)


_head = head_ops("fused_cross_entropy", _of_all_words, _loss_of_all_words)


def fused_cross_entropy(x_TD: Tensor, weight_VD: Tensor, labels_T: Tensor, chunk_tokens: int = CHUNK_TOKENS) -> Tensor:
    """Sum the cross entropies of `x @ weight.T` against the labels, in bf16 or fp32 on a GPU.

    Shapes: x [T, D], weight [V, D], labels int64 [T], `IGNORE_LABEL` for none -> fp32 scalar.

    `chunk_tokens` is the number of tokens whose logits exist at a time; 0 computes all logits at once. Without
    gradients only the loss is computed, in the memory of one chunk's logits.

    Raises: TypeError for fp64, which the kernels would compute in fp32. A label outside of the vocabulary fails an
    assertion on the GPU.
    """
    return _head(x_TD, weight_VD, labels_T, chunk_tokens)


register(Kernel("fused_cross_entropy", fused_cross_entropy, linear_cross_entropy_reference, needs_triton=True))
