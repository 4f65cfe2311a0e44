"""Backward of norm and rotation: from the gradients of queries, keys and values to that of the fused projection.

B batch · N sequence · H query heads · Hkv key/value heads · D head width · R = D/2 pairs, P of them rotated
X = (H + 2·Hkv)·D · M programs

Physics: memory-bound. Reads three gradients (X elements a token, with strides set by the attention kernel) and, with a
norm, the queries and keys of the projection; writes X. The gradients of the norm weights are sums over all tokens and
heads: each of M programs sums its part in registers and writes 2·D numbers, which are then summed in order.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from titan_moe.kernels.rope.pairs import load_angles, load_pairs, store_pairs, tile_shape

NUM_PROGRAMS = 1056
"""Most programs: eight for each multiprocessor of an H200."""
TILES_A_PROGRAM = 4
"""Fewest tiles of queries of a program, so that few partial sums are written."""


@triton.jit
def _rotate_back(
    grad_ptr, batch_stride, position_stride, head_stride, qkv_ptr, weight_ptr, cos_ptr, sin_ptr, dqkv_ptr,
    dweight_ptr, num_tokens, N, token_stride, eps, ALL_HEADS: tl.constexpr, FIRST: tl.constexpr, HEADS: tl.constexpr,
    R: tl.constexpr, P: tl.constexpr, NORMS: tl.constexpr, ROTATES: tl.constexpr, INTERLEAVED: tl.constexpr,
    ROWS: tl.constexpr, BLOCK_R: tl.constexpr,
):  # fmt: skip
    """This program's tiles of the HEADS heads from FIRST on, and its part of the norm weight's gradient."""
    origin = tl.zeros((1, 1), tl.int32)
    dweight_a, dweight_b = tl.zeros((ROWS, BLOCK_R), tl.float32), tl.zeros((ROWS, BLOCK_R), tl.float32)
    for tile in range(tl.program_id(0), tl.cdiv(num_tokens * HEADS, ROWS), tl.num_programs(0)):
        row = tile * ROWS + tl.arange(0, ROWS)[:, None]
        is_row = row < num_tokens * HEADS
        token, head = (row // HEADS).to(tl.int64), (row % HEADS).to(tl.int64)
        grad_offset = (token // N) * batch_stride + (token % N) * position_stride + head * head_stride
        a, b = load_pairs(grad_ptr, grad_offset, is_row, R, P, BLOCK_R, INTERLEAVED)
        if ROTATES:
            cos, sin = load_angles(cos_ptr, sin_ptr, token % N, is_row, P, BLOCK_R)
            a, b = a * cos + b * sin, b * cos - a * sin
        if NORMS:
            in_offset = token * token_stride + (FIRST + head) * 2 * R
            x_a, x_b = load_pairs(qkv_ptr, in_offset, is_row, R, P, BLOCK_R, INTERLEAVED)
            rstd = tl.rsqrt((tl.sum(x_a * x_a, axis=1) + tl.sum(x_b * x_b, axis=1)) / (2 * R) + eps)[:, None]
            x_a, x_b = x_a * rstd, x_b * rstd
            dweight_a += a * x_a
            dweight_b += b * x_b
            weight_a, weight_b = load_pairs(weight_ptr, origin, origin == 0, R, P, BLOCK_R, INTERLEAVED)
            a, b = a * weight_a, b * weight_b
            projection = ((tl.sum(a * x_a, axis=1) + tl.sum(b * x_b, axis=1)) / (2 * R))[:, None]
            a, b = (a - x_a * projection) * rstd, (b - x_b * projection) * rstd
        out_offset = (token * ALL_HEADS + FIRST + head) * 2 * R
        store_pairs(dqkv_ptr, out_offset, is_row, a, b, R, P, BLOCK_R, INTERLEAVED)
    if NORMS:
        dweight_a, dweight_b = tl.sum(dweight_a, axis=0)[None, :], tl.sum(dweight_b, axis=0)[None, :]
        store_pairs(dweight_ptr, origin, origin == 0, dweight_a, dweight_b, R, P, BLOCK_R, INTERLEAVED)


@triton.jit
def _rotary_backward_kernel(
    dq_ptr, q_batch_stride, q_position_stride, q_head_stride, dk_ptr, k_batch_stride, k_position_stride, k_head_stride,
    dv_ptr, v_batch_stride, v_position_stride, v_head_stride, qkv_ptr, q_weight_ptr, k_weight_ptr, cos_ptr, sin_ptr,
    dqkv_ptr, dweights_ptr, num_tokens, N, token_stride, eps, HEADS: tl.constexpr, KV_HEADS: tl.constexpr,
    R: tl.constexpr, P: tl.constexpr, NORMS: tl.constexpr, INTERLEAVED: tl.constexpr, ROWS: tl.constexpr,
    BLOCK_R: tl.constexpr,
):  # fmt: skip
    ALL_HEADS: tl.constexpr = HEADS + 2 * KV_HEADS
    dweights_ptr += tl.program_id(0) * 4 * R
    _rotate_back(
        dq_ptr, q_batch_stride, q_position_stride, q_head_stride, qkv_ptr, q_weight_ptr, cos_ptr, sin_ptr, dqkv_ptr,
        dweights_ptr, num_tokens, N, token_stride, eps, ALL_HEADS, 0, HEADS,
        R, P, NORMS, True, INTERLEAVED, ROWS, BLOCK_R,
    )  # fmt: skip
    _rotate_back(
        dk_ptr, k_batch_stride, k_position_stride, k_head_stride, qkv_ptr, k_weight_ptr, cos_ptr, sin_ptr, dqkv_ptr,
        dweights_ptr + 2 * R, num_tokens, N, token_stride, eps, ALL_HEADS, HEADS, KV_HEADS,
        R, P, NORMS, True, INTERLEAVED, ROWS, BLOCK_R,
    )  # fmt: skip
    _rotate_back(
        dv_ptr, v_batch_stride, v_position_stride, v_head_stride, qkv_ptr, qkv_ptr, cos_ptr, sin_ptr, dqkv_ptr,
        dweights_ptr, num_tokens, N, token_stride, eps, ALL_HEADS, HEADS + KV_HEADS, KV_HEADS,
        R, R, False, False, False, ROWS, BLOCK_R,
    )  # fmt: skip


def empty_gradient(dq_BNHD: Tensor, dk_BNHD: Tensor) -> Tensor:
    """The uninitialised gradient of the projection."""
    batch, length, num_heads, head_dim = dq_BNHD.shape
    return dq_BNHD.new_empty(batch, length, (num_heads + 2 * dk_BNHD.shape[2]) * head_dim)


def rotary_backward(
    dq_BNHD: Tensor, dk_BNHD: Tensor, dv_BNHD: Tensor, qkv_BNX: Tensor | None, q_weight_D: Tensor | None,
    k_weight_D: Tensor | None, cos_NP: Tensor, sin_NP: Tensor, eps: float, is_interleaved: bool,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Gradients of the projection [B, N, X], contiguous, and of the two norm weights [2, D], fp32.

    Gradients of queries, keys and values may have any strides. Without norms `qkv_BNX` and the weights are None, and
    the weights' gradients are zero.
    """
    dq, dk, dv = (grad if grad.stride(-1) == 1 else grad.contiguous() for grad in (dq_BNHD, dk_BNHD, dv_BNHD))
    batch, length, num_heads, head_dim = dq.shape
    num_tokens = batch * length
    num_rows, block_r = tile_shape(head_dim // 2)
    dqkv_BNX = empty_gradient(dq, dk)
    qkv_TX = dqkv_BNX.flatten(0, 1) if qkv_BNX is None else qkv_BNX.flatten(0, 1)
    qkv_TX = qkv_TX if qkv_TX.stride(1) == 1 else qkv_TX.contiguous()
    num_programs = min(triton.cdiv(num_tokens * num_heads, num_rows * TILES_A_PROGRAM), NUM_PROGRAMS)
    norms = q_weight_D is not None
    dweights_M2D = dq.new_empty(num_programs if norms else 0, 2, head_dim, dtype=torch.float32)
    if num_tokens:
        _rotary_backward_kernel[(num_programs,)](
            dq, *dq.stride()[:3], dk, *dk.stride()[:3], dv, *dv.stride()[:3], qkv_TX,
            qkv_TX if q_weight_D is None else q_weight_D, qkv_TX if k_weight_D is None else k_weight_D,
            cos_NP, sin_NP, dqkv_BNX, dweights_M2D, num_tokens, length, qkv_TX.stride(0), eps,
            HEADS=num_heads, KV_HEADS=dk.shape[2], R=head_dim // 2, P=cos_NP.shape[1], NORMS=norms,
            INTERLEAVED=is_interleaved, ROWS=num_rows, BLOCK_R=block_r, num_warps=4,
        )  # fmt: skip
    return dqkv_BNX, dweights_M2D.sum(0)
