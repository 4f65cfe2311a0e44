"""Split the fused projection into queries, keys and values, and norm and rotate the first two, in one pass.

T tokens · N sequence · H query heads · Hkv key/value heads · D head width · R = D/2 pairs, P of them rotated
X = (H + 2·Hkv)·D

Physics: memory-bound, reads T·X elements and writes as many. A tile is 2048 elements of queries, of keys or of values,
from as many heads as that takes.
"""

import triton
import triton.language as tl
from torch import Tensor

from titan_moe.kernels.device import refuse_cpu
from titan_moe.kernels.rope.pairs import load_angles, load_pairs, store_pairs, tile_shape

Heads = tuple[Tensor, Tensor, Tensor]
"""Queries [B, N, H, D], keys and values [B, N, Hkv, D]."""


@triton.jit
def _rotate_tile(
    tile, qkv_ptr, weight_ptr, cos_ptr, sin_ptr, out_ptr, num_tokens, N, token_stride, eps,
    FIRST: tl.constexpr, HEADS: tl.constexpr, R: tl.constexpr, P: tl.constexpr, NORMS: tl.constexpr,
    ROTATES: tl.constexpr, INTERLEAVED: tl.constexpr, ROWS: tl.constexpr, BLOCK_R: tl.constexpr,
):  # fmt: skip
    """One tile of the HEADS heads from the projection's head FIRST on."""
    row = tile * ROWS + tl.arange(0, ROWS)[:, None]
    is_row = row < num_tokens * HEADS
    token = row // HEADS
    in_offset = token.to(tl.int64) * token_stride + (FIRST + row % HEADS) * 2 * R
    a, b = load_pairs(qkv_ptr, in_offset, is_row, R, P, BLOCK_R, INTERLEAVED)
    if NORMS:
        rstd = tl.rsqrt((tl.sum(a * a, axis=1) + tl.sum(b * b, axis=1)) / (2 * R) + eps)[:, None]
        origin = tl.zeros((1, 1), tl.int32)
        weight_a, weight_b = load_pairs(weight_ptr, origin, origin == 0, R, P, BLOCK_R, INTERLEAVED)
        a, b = a * rstd * weight_a, b * rstd * weight_b
    if ROTATES:
        cos, sin = load_angles(cos_ptr, sin_ptr, token % N, is_row, P, BLOCK_R)
        a, b = a * cos - b * sin, b * cos + a * sin
    store_pairs(out_ptr, row.to(tl.int64) * 2 * R, is_row, a, b, R, P, BLOCK_R, INTERLEAVED)


@triton.jit
def _rotary_forward_kernel(
    qkv_ptr, q_weight_ptr, k_weight_ptr, cos_ptr, sin_ptr, q_ptr, k_ptr, v_ptr, num_tokens, N, token_stride, eps,
    HEADS: tl.constexpr, KV_HEADS: tl.constexpr, R: tl.constexpr, P: tl.constexpr, NORMS: tl.constexpr,
    INTERLEAVED: tl.constexpr, ROWS: tl.constexpr, BLOCK_R: tl.constexpr,
):  # fmt: skip
    tile = tl.program_id(0)
    q_tiles, kv_tiles = tl.cdiv(num_tokens * HEADS, ROWS), tl.cdiv(num_tokens * KV_HEADS, ROWS)
    if tile < q_tiles:
        _rotate_tile(
            tile, qkv_ptr, q_weight_ptr, cos_ptr, sin_ptr, q_ptr, num_tokens, N, token_stride, eps,
            0, HEADS, R, P, NORMS, True, INTERLEAVED, ROWS, BLOCK_R,
        )  # fmt: skip
    elif tile < q_tiles + kv_tiles:
        _rotate_tile(
            tile - q_tiles, qkv_ptr, k_weight_ptr, cos_ptr, sin_ptr, k_ptr, num_tokens, N, token_stride, eps,
            HEADS, KV_HEADS, R, P, NORMS, True, INTERLEAVED, ROWS, BLOCK_R,
        )  # fmt: skip
    else:
        _rotate_tile(
            tile - q_tiles - kv_tiles, qkv_ptr, qkv_ptr, cos_ptr, sin_ptr, v_ptr, num_tokens, N, token_stride, eps,
            HEADS + KV_HEADS, KV_HEADS, R, R, False, False, False, ROWS, BLOCK_R,
        )  # fmt: skip


def empty_heads(qkv_BNX: Tensor, num_kv_heads: int, head_dim: int) -> Heads:
    """Uninitialised queries, keys and values."""
    batch, length, width = qkv_BNX.shape
    num_heads = width // head_dim - 2 * num_kv_heads
    q, k, v = (qkv_BNX.new_empty(batch, length, heads, head_dim) for heads in (num_heads, num_kv_heads, num_kv_heads))
    return q, k, v


def rotary_forward(
    qkv_BNX: Tensor, q_weight_D: Tensor | None, k_weight_D: Tensor | None, cos_NP: Tensor, sin_NP: Tensor,
    num_kv_heads: int, head_dim: int, eps: float, is_interleaved: bool,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """Queries, keys and values: [B, N, heads, D] each, contiguous."""
    refuse_cpu(qkv_BNX, "rotary", "triton")
    q, k, v = empty_heads(qkv_BNX, num_kv_heads, head_dim)
    qkv_TX = qkv_BNX.flatten(0, 1)
    qkv_TX = qkv_TX if qkv_TX.stride(1) == 1 else qkv_TX.contiguous()
    num_tokens, num_heads, num_pairs = qkv_TX.shape[0], q.shape[2], head_dim // 2
    num_rows, block_r = tile_shape(num_pairs)
    if num_tokens:
        q_tiles, kv_tiles = (triton.cdiv(num_tokens * heads, num_rows) for heads in (num_heads, num_kv_heads))
        _rotary_forward_kernel[(q_tiles + 2 * kv_tiles,)](
            qkv_TX, qkv_TX if q_weight_D is None else q_weight_D, qkv_TX if k_weight_D is None else k_weight_D,
            cos_NP, sin_NP, q, k, v, num_tokens, q.shape[1], qkv_TX.stride(0), eps,
            HEADS=num_heads, KV_HEADS=num_kv_heads, R=num_pairs, P=cos_NP.shape[1], NORMS=q_weight_D is not None,
            INTERLEAVED=is_interleaved, ROWS=num_rows, BLOCK_R=block_r, num_warps=4,
        )  # fmt: skip
    return q, k, v
