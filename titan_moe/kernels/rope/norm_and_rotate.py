"""Queries, keys and values from the fused projection: per-head RMSNorm and rotation (RoPE, arXiv:2104.09864).

B batch · N sequence · H query heads · Hkv key/value heads · D head width · P rotated pairs, of the first 2·P elements
X = (H + 2·Hkv)·D, width of the projection

Physics: memory-bound. Aim: one pass forward and one backward (forward.py, backward.py). Separate operations take one
pass for each norm, three or four in fp32 for each rotation, and another to join the gradients.

The values are copied. This reads and writes Hkv·D elements a token, a tenth of forward for Qwen3 (33 MB a layer of
16,384 tokens). It lets one op compute the whole gradient: with values as a view of the projection, autograd would write
their gradient into zeros and add it, some five passes over X. Saved for backward are the tables and, with a norm, the
projection, which is the norm's input. Without a norm the copy lets the projection be freed; a view would keep it alive.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from titan_moe.kernels.registry import Kernel, register
from titan_moe.kernels.rope.backward import empty_gradient, rotary_backward
from titan_moe.kernels.rope.forward import Heads, empty_heads, rotary_forward
from titan_moe.kernels.rope.rotation import rotate_halves, rotate_pairs


def norm_and_rotate_reference(
    qkv_BNX: Tensor, q_weight_D: Tensor | None, k_weight_D: Tensor | None, cos_NP: Tensor, sin_NP: Tensor,
    num_kv_heads: int, head_dim: int, eps: float, is_interleaved: bool,
) -> Heads:  # fmt: skip
    """`norm_and_rotate` in PyTorch operations, which the compiler fuses; in any dtype."""
    heads = qkv_BNX.unflatten(-1, (-1, head_dim))
    q_BNHD, k_BNHD, v_BNHD = heads.split([heads.shape[2] - 2 * num_kv_heads, num_kv_heads, num_kv_heads], dim=2)
    if q_weight_D is not None and k_weight_D is not None:
        # autocast on GPUs norms in fp32, and FlexAttention takes queries, keys and values of one dtype
        q_BNHD = F.rms_norm(q_BNHD, q_weight_D.shape, q_weight_D, eps).to(qkv_BNX.dtype)
        k_BNHD = F.rms_norm(k_BNHD, k_weight_D.shape, k_weight_D, eps).to(qkv_BNX.dtype)
    rotate = rotate_pairs if is_interleaved else rotate_halves
    return rotate(q_BNHD, cos_NP, sin_NP), rotate(k_BNHD, cos_NP, sin_NP), v_BNHD


_norm_and_rotate = torch.library.custom_op("titan_moe::norm_and_rotate", rotary_forward, mutates_args=())
_backward_op = torch.library.custom_op("titan_moe::norm_and_rotate_backward", rotary_backward, mutates_args=())
_norm_and_rotate.register_fake(
    lambda qkv, q_weight, k_weight, cos, sin, heads, head_dim, *_: empty_heads(qkv, heads, head_dim)
)
_backward_op.register_fake(
    lambda dq, dk, *_: (empty_gradient(dq, dk), dq.new_empty(2, dq.shape[3], dtype=torch.float32))
)


def _save(ctx: Any, inputs: tuple[Any, ...], output: Heads) -> None:
    qkv_BNX, q_weight_D, k_weight_D, cos_NP, sin_NP, _, _, ctx.eps, ctx.is_interleaved = inputs
    kept_BNX = None if q_weight_D is None else qkv_BNX
    ctx.save_for_backward(kept_BNX, q_weight_D, k_weight_D, cos_NP, sin_NP)


def _backward(ctx: Any, *grads_BNHD: Tensor) -> tuple[Tensor | None, ...]:
    saved = ctx.saved_tensors  # read once: under recompute the first access recomputes, and a second one raises
    dqkv_BNX, dweights_2D = _backward_op(*grads_BNHD, *saved, ctx.eps, ctx.is_interleaved)
    # copy=True: compiled torch 2.11 loses a gradient that ends in a cast to its own dtype
    dweights = [
        None if weight_D is None else dweight_D.to(weight_D.dtype, copy=True)
        for weight_D, dweight_D in zip(saved[1:3], dweights_2D, strict=True)
    ]
    return dqkv_BNX, *dweights, None, None, None, None, None, None


_norm_and_rotate.register_autograd(_backward, setup_context=_save)


def norm_and_rotate(
    qkv_BNX: Tensor, q_weight_D: Tensor | None, k_weight_D: Tensor | None, cos_NP: Tensor, sin_NP: Tensor,
    num_kv_heads: int, head_dim: int, eps: float, is_interleaved: bool,
) -> Heads:  # fmt: skip
    """Split, norm and rotate the fused projection in Triton, in bf16 or fp32.

    Shapes: qkv [B, N, (H + 2·Hkv)·D], norm weights [D] (both or none), tables fp32 [N, P]
    -> [B, N, H, D], [B, N, Hkv, D] and [B, N, Hkv, D], contiguous.

    Raises: ValueError for fp64, and for one norm weight without the other.
    """
    if qkv_BNX.dtype == torch.float64:
        raise ValueError(
            f'the Triton norm and rotation compute in fp32, got {qkv_BNX.dtype}; take perf.override.rotary = "torch"'
        )
    if (q_weight_D is None) != (k_weight_D is None):
        raise ValueError("got one norm weight: queries and keys are normed together, give both weights or neither")
    if q_weight_D is not None and k_weight_D is not None:
        q_weight_D, k_weight_D = q_weight_D.contiguous(), k_weight_D.contiguous()
    return _norm_and_rotate(
        qkv_BNX,
        q_weight_D,
        k_weight_D,
        cos_NP.contiguous(),
        sin_NP.contiguous(),
        num_kv_heads,
        head_dim,
        eps,
        is_interleaved,
    )


register(Kernel("norm_and_rotate", norm_and_rotate, norm_and_rotate_reference, needs_triton=True))
