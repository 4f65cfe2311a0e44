"""Attention of some queries to a block of keys, with the log-sum-exp of its scores, and its gradients.

B batch · n queries · m keys of the block · H heads · G key/value heads, a divisor of H · D head width

Softmax over all keys of a sequence is a mean of the results of blocks, weighted by the sums of their exponentials. The
gradients of a block need only the result and the log-sum-exp over all blocks (arXiv:2205.14135, appendix B.4), so the
kernels of whole sequences are those of blocks. PyTorch's `scaled_dot_product_attention` does not return the
log-sum-exp; the operations behind it do. All of them sum in fp32, on CPUs in fp64 for fp64.
"""

from typing import Any, NamedTuple

import torch
from torch import Tensor

aten = torch.ops.aten


class AttendedBlock(NamedTuple):
    """The result of a block."""

    out_BnHD: Tensor
    lse_BHn: Tensor  # natural logarithm; fp32 or wider


def attend_to_block(
    q_BnHD: Tensor, k_BmGD: Tensor, v_BmGD: Tensor, backend: str, scale: float, *, is_causal: bool
) -> AttendedBlock:
    """Attend to all keys, or with `is_causal`, which needs m = n, to those up to the query's place.

    `backend` is one of `cudnn`, `flash` (bf16 and fp16 on GPUs) and `cpu` (any dtype).
    """
    q, k, v = (x.transpose(1, 2) for x in (q_BnHD, k_BmGD, v_BmGD))
    if backend == "cudnn":
        out, lse_BHn1 = aten._scaled_dot_product_cudnn_attention(q, k, v, None, True, 0.0, is_causal, scale=scale)[:2]
        return AttendedBlock(out.transpose(1, 2), lse_BHn1.flatten(2))
    if backend == "flash":
        out, lse = aten._scaled_dot_product_flash_attention(q, k, v, 0.0, is_causal, scale=scale)[:2]
        return AttendedBlock(out.transpose(1, 2), lse)
    k, v = (_expand_heads(x, q.shape[1]) for x in (k, v))
    out, lse = aten._scaled_dot_product_flash_attention_for_cpu(q, k, v, 0.0, is_causal, scale=scale)
    return AttendedBlock(out.transpose(1, 2), lse)


def block_gradients(
    dout_BnHD: Tensor,
    q_BnHD: Tensor,
    k_BmGD: Tensor,
    v_BmGD: Tensor,
    whole: AttendedBlock,
    backend: str,
    scale: float,
    *,
    is_causal: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """The gradients of queries, keys and values through a block, in their shapes. `whole` is of all blocks."""
    dout, q, k, v, out = (x.transpose(1, 2) for x in (dout_BnHD, q_BnHD, k_BmGD, v_BmGD, whole.out_BnHD))
    lse_BHn, sizes = whole.lse_BHn.contiguous(), (q.shape[2], k.shape[2])
    grads: tuple[Any, ...]
    if backend == "cudnn":
        unused = q.new_zeros((), dtype=torch.int64)  # seed and offset of dropout
        grads = aten._scaled_dot_product_cudnn_attention_backward(
            dout, q, k, v, out, lse_BHn[..., None], unused, unused, None, None, None, *sizes, 0.0, is_causal,
            scale=scale,
        )  # fmt: skip
    elif backend == "flash":
        unused = q.new_zeros((), dtype=torch.int64)
        grads = aten._scaled_dot_product_flash_attention_backward(
            dout, q, k, v, out, lse_BHn, None, None, *sizes, 0.0, is_causal, unused, unused, scale=scale
        )
    else:
        num_heads, num_kv_heads = q.shape[1], k.shape[1]
        k, v = (_expand_heads(x, num_heads) for x in (k, v))
        dq, dk, dv = aten._scaled_dot_product_flash_attention_for_cpu_backward(
            dout, q, k, v, out, lse_BHn, 0.0, is_causal, scale=scale
        )
        grads = dq, *(x.unflatten(1, (num_kv_heads, -1)).sum(2) for x in (dk, dv))
    dq, dk, dv = (x.transpose(1, 2) for x in grads)
    return dq, dk, dv


def merge(total: AttendedBlock, block: AttendedBlock) -> None:
    """Add a block's keys to a result in fp32 or wider, in place."""
    weight_BHn = torch.sigmoid(block.lse_BHn - total.lse_BHn)  # the part of the block in the sum of exponentials
    total.out_BnHD.lerp_(block.out_BnHD.to(total.out_BnHD.dtype), weight_BHn.transpose(1, 2)[..., None])
    torch.logaddexp(total.lse_BHn, block.lse_BHn, out=total.lse_BHn)


def add_sinks(total: AttendedBlock, sinks_H: Tensor) -> None:
    """Let the sink of each head join the softmax of a result in fp32 or wider, in place."""
    sinks_H1 = sinks_H[:, None].to(total.lse_BHn.dtype)
    total.out_BnHD.mul_(torch.sigmoid(total.lse_BHn - sinks_H1).transpose(1, 2)[..., None])
    torch.logaddexp(total.lse_BHn, sinks_H1, out=total.lse_BHn)


def sink_gradients(dout_BnHD: Tensor, whole: AttendedBlock, sinks_H: Tensor) -> Tensor:
    """The gradients of sinks. `whole` is with them."""
    dots_BHn = (dout_BnHD.to(whole.lse_BHn.dtype) * whole.out_BnHD).sum(-1).transpose(1, 2)
    parts_BHn = torch.exp(sinks_H[:, None].to(whole.lse_BHn.dtype) - whole.lse_BHn)
    return -(parts_BHn * dots_BHn).sum((0, 2)).to(sinks_H.dtype)


def _expand_heads(x_BGmD: Tensor, num_heads: int) -> Tensor:
    """Repeat each key/value head for its queries' heads: the kernel for CPUs takes fewer heads on torch 2.13 alone."""
    return x_BGmD.repeat_interleave(num_heads // x_BGmD.shape[1], dim=1)
