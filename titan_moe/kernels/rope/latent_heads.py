"""Queries, keys and values of latent attention (MLA, arXiv:2405.04434) from its projections, in one pass.

B batch · N sequence of queries · M sequence of keys · H heads · C width of a head without rotation · V width of a value
P rotated pairs · X = H·(C + 2·P) · Y = H·(C + V)

Physics: memory-bound, reads X + Y elements a token and writes H·(2·C + 4·P + V): queries are copied with their last 2·P
elements rotated, and keys get the rotated part that all heads share behind their own. Backward reads as many gradients
as were written, with strides set by the attention kernel, and writes X + Y; a thread block sums the shared part over
all heads of a token, in a fixed order. Values are copied too: so the projection of keys and values is freed, where a
view of the values would keep it, and one operation writes its whole gradient. Saved for backward are the tables alone.
"""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from titan_moe.kernels.device import refuse_cpu
from titan_moe.kernels.registry import Kernel, register
from titan_moe.kernels.rope.pairs import load_angles, load_pairs, store_pairs
from titan_moe.kernels.rope.rotation import rotate_halves, rotate_pairs

Heads = tuple[Tensor, Tensor, Tensor]
"""Queries [B, N, H, C + 2·P], keys [B, M, H, C + 2·P] and values [B, M, H, V]."""
TILE_ELEMENTS = 2048


def latent_heads_reference(
    q_BNX: Tensor, kv_BMY: Tensor, k_rope_BM1R: Tensor, cos_NP: Tensor, sin_NP: Tensor, nope_dim: int, v_dim: int,
    is_interleaved: bool,
) -> Heads:  # fmt: skip
    """`latent_heads` in PyTorch operations, which the compiler fuses; in any dtype. Values are a view."""
    rope_dim = k_rope_BM1R.shape[-1]
    q_nope, q_rope = q_BNX.unflatten(-1, (-1, nope_dim + rope_dim)).split([nope_dim, rope_dim], -1)
    kv_BMHD = kv_BMY.unflatten(-1, (-1, nope_dim + v_dim))
    k_nope, v_BMHV = kv_BMHD.split([nope_dim, v_dim], dim=-1)
    q_rope = (rotate_pairs if is_interleaved else rotate_halves)(q_rope, cos_NP, sin_NP)
    q_BNHD = torch.cat([q_nope, q_rope], dim=-1)
    return q_BNHD, torch.cat([k_nope, k_rope_BM1R.expand(*k_nope.shape[:3], -1)], dim=-1), v_BMHV


@triton.jit
def _copy(in_ptr, in_offset, out_ptr, out_offset, is_row, WIDTH: tl.constexpr, BLOCK: tl.constexpr):
    """Offsets and mask [rows, 1]."""
    element = tl.arange(0, BLOCK)[None, :]
    keep = is_row & (element < WIDTH)
    x = tl.load(in_ptr + in_offset + element, mask=keep, other=0.0)
    tl.store(out_ptr + out_offset + element, x, mask=keep)


@triton.jit
def _latent_heads_kernel(
    q_in_ptr, kv_ptr, k_rope_ptr, cos_ptr, sin_ptr, q_ptr, k_ptr, v_ptr, num_queries, num_keys, N, q_stride, kv_stride,
    HEADS: tl.constexpr, C: tl.constexpr, P: tl.constexpr, V: tl.constexpr, INTERLEAVED: tl.constexpr,
    ROWS: tl.constexpr, BLOCK_C: tl.constexpr, BLOCK_P: tl.constexpr, BLOCK_V: tl.constexpr,
):  # fmt: skip
    tile, q_tiles = tl.program_id(0), tl.cdiv(num_queries * HEADS, ROWS)
    lane = tl.arange(0, ROWS)[:, None]
    if tile < q_tiles:
        row = tile * ROWS + lane
        is_row, token = row < num_queries * HEADS, (row // HEADS).to(tl.int64)
        in_offset, out_offset = token * q_stride + row % HEADS * (C + 2 * P), row.to(tl.int64) * (C + 2 * P)
        _copy(q_in_ptr, in_offset, q_ptr, out_offset, is_row, C, BLOCK_C)
        a, b = load_pairs(q_in_ptr, in_offset + C, is_row, P, P, BLOCK_P, INTERLEAVED)
        cos, sin = load_angles(cos_ptr, sin_ptr, token % N, is_row, P, BLOCK_P)
        a, b = a * cos - b * sin, b * cos + a * sin
        store_pairs(q_ptr, out_offset + C, is_row, a, b, P, P, BLOCK_P, INTERLEAVED)
    else:
        row = (tile - q_tiles) * ROWS + lane
        is_row, token = row < num_keys * HEADS, (row // HEADS).to(tl.int64)
        in_offset, out_offset = token * kv_stride + row % HEADS * (C + V), row.to(tl.int64) * (C + 2 * P)
        _copy(kv_ptr, in_offset, k_ptr, out_offset, is_row, C, BLOCK_C)
        _copy(k_rope_ptr, token * 2 * P, k_ptr, out_offset + C, is_row, 2 * P, 2 * BLOCK_P)
        _copy(kv_ptr, in_offset + C, v_ptr, row.to(tl.int64) * V, is_row, V, BLOCK_V)


@triton.jit
def _latent_heads_backward_kernel(
    dq_ptr, q_batch_stride, q_position_stride, q_head_stride, dk_ptr, k_batch_stride, k_position_stride, k_head_stride,
    dv_ptr, v_batch_stride, v_position_stride, v_head_stride, cos_ptr, sin_ptr, dq_out_ptr, dkv_ptr, dk_rope_ptr,
    num_queries, N, M, HEADS: tl.constexpr, C: tl.constexpr, P: tl.constexpr, V: tl.constexpr,
    INTERLEAVED: tl.constexpr, ROWS: tl.constexpr, BLOCK_C: tl.constexpr, BLOCK_P: tl.constexpr, BLOCK_V: tl.constexpr,
):  # fmt: skip
    tile, q_tiles = tl.program_id(0), tl.cdiv(num_queries * HEADS, ROWS)
    lane = tl.arange(0, ROWS)[:, None]
    if tile < q_tiles:
        row = tile * ROWS + lane
        is_row, token, head = row < num_queries * HEADS, (row // HEADS).to(tl.int64), (row % HEADS).to(tl.int64)
        in_offset = (token // N) * q_batch_stride + (token % N) * q_position_stride + head * q_head_stride
        out_offset = row.to(tl.int64) * (C + 2 * P)
        _copy(dq_ptr, in_offset, dq_out_ptr, out_offset, is_row, C, BLOCK_C)
        a, b = load_pairs(dq_ptr, in_offset + C, is_row, P, P, BLOCK_P, INTERLEAVED)
        cos, sin = load_angles(cos_ptr, sin_ptr, token % N, is_row, P, BLOCK_P)
        a, b = a * cos + b * sin, b * cos - a * sin
        store_pairs(dq_out_ptr, out_offset + C, is_row, a, b, P, P, BLOCK_P, INTERLEAVED)
    else:  # all heads of a key
        key = (tile - q_tiles).to(tl.int64)
        dk_ptr += (key // M) * k_batch_stride + (key % M) * k_position_stride
        dv_ptr += (key // M) * v_batch_stride + (key % M) * v_position_stride
        element = tl.arange(0, 2 * BLOCK_P)[None, :]
        total = tl.zeros((ROWS, 2 * BLOCK_P), tl.float32)
        for first in range(0, HEADS, ROWS):
            head = (first + lane).to(tl.int64)
            is_head, out_offset = head < HEADS, (key * HEADS + head) * (C + V)
            _copy(dk_ptr, head * k_head_stride, dkv_ptr, out_offset, is_head, C, BLOCK_C)
            _copy(dv_ptr, head * v_head_stride, dkv_ptr, out_offset + C, is_head, V, BLOCK_V)
            keep = is_head & (element < 2 * P)
            total += tl.load(dk_ptr + head * k_head_stride + C + element, mask=keep, other=0.0).to(tl.float32)
        element = tl.arange(0, 2 * BLOCK_P)
        shared = tl.sum(total, axis=0).to(dk_rope_ptr.dtype.element_ty)
        tl.store(dk_rope_ptr + key * 2 * P + element, shared, mask=element < 2 * P)


def _sizes(heads: int, nope_dim: int, num_pairs: int, v_dim: int) -> dict[str, int]:
    """Widths, and the blocks that hold them."""
    blocks = [triton.next_power_of_2(max(width, 1)) for width in (nope_dim, num_pairs, v_dim)]
    rows = max(TILE_ELEMENTS // max(blocks), 1)
    names = ("HEADS", "C", "P", "V", "ROWS", "BLOCK_C", "BLOCK_P", "BLOCK_V")
    return dict(zip(names, (heads, nope_dim, num_pairs, v_dim, rows, *blocks), strict=True))


def _rows(x_BNX: Tensor) -> Tensor:
    """Tokens in a row, each contiguous."""
    x_TX = x_BNX.flatten(0, 1)
    return x_TX if x_TX.stride(1) == 1 else x_TX.contiguous()


def _empty_heads(q_BNX: Tensor, kv_BMY: Tensor, k_rope: Tensor, cos: Any, sin: Any, nope_dim: int, v_dim: int) -> Heads:
    heads, width = kv_BMY.shape[2] // (nope_dim + v_dim), nope_dim + k_rope.shape[3]
    q, k, v = ((q_BNX, width), (kv_BMY, width), (kv_BMY, v_dim))
    return q[0].new_empty(*q_BNX.shape[:2], heads, q[1]), *(x.new_empty(*x.shape[:2], heads, d) for x, d in (k, v))


def launch_forward(
    q_BNX: Tensor, kv_BMY: Tensor, k_rope_BM1R: Tensor, cos_NP: Tensor, sin_NP: Tensor, nope_dim: int, v_dim: int,
    is_interleaved: bool,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """`latent_heads`, without gradients."""
    refuse_cpu(q_BNX, "rotary", "triton")
    q, k, v = _empty_heads(q_BNX, kv_BMY, k_rope_BM1R, cos_NP, sin_NP, nope_dim, v_dim)
    q_TX, kv_TY = _rows(q_BNX), _rows(kv_BMY)
    sizes = _sizes(q.shape[2], nope_dim, cos_NP.shape[1], v_dim)
    tiles = [triton.cdiv(len(x) * q.shape[2], sizes["ROWS"]) for x in (q_TX, kv_TY)]
    if sum(tiles):
        _latent_heads_kernel[(sum(tiles),)](
            q_TX, kv_TY, k_rope_BM1R.contiguous(), cos_NP, sin_NP, q, k, v, len(q_TX), len(kv_TY), q.shape[1],
            q_TX.stride(0), kv_TY.stride(0), INTERLEAVED=is_interleaved, **sizes, num_warps=4,
        )  # fmt: skip
    return q, k, v


def launch_backward(
    dq_BNHD: Tensor, dk_BMHD: Tensor, dv_BMHV: Tensor, cos_NP: Tensor, sin_NP: Tensor, is_interleaved: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of both projections and of the shared part of keys, contiguous. Those of results may have any
    strides."""
    dq, dk, dv = (grad if grad.stride(-1) == 1 else grad.contiguous() for grad in (dq_BNHD, dk_BMHD, dv_BMHV))
    (batch, length, heads, width), num_pairs = dq.shape, cos_NP.shape[1]
    dq_BNX, dkv_BMY, dk_rope = _empty_gradients(dq, dk, dv, cos_NP)
    sizes = _sizes(heads, width - 2 * num_pairs, num_pairs, dv.shape[3])
    programs = triton.cdiv(batch * length * heads, sizes["ROWS"]) + batch * dk.shape[1]
    if programs:
        _latent_heads_backward_kernel[(programs,)](
            dq, *dq.stride()[:3], dk, *dk.stride()[:3], dv, *dv.stride()[:3], cos_NP, sin_NP, dq_BNX, dkv_BMY, dk_rope,
            batch * length, length, dk.shape[1], INTERLEAVED=is_interleaved, **sizes, num_warps=4,
        )  # fmt: skip
    return dq_BNX, dkv_BMY, dk_rope


def _empty_gradients(dq: Tensor, dk: Tensor, dv: Tensor, cos_NP: Tensor, *_: Any) -> tuple[Tensor, Tensor, Tensor]:
    (batch, length, heads, width), rope_dim = dq.shape, 2 * cos_NP.shape[1]
    of_keys = dk.new_empty(batch, dk.shape[1], heads * (width - rope_dim + dv.shape[3]))
    return dq.new_empty(batch, length, heads * width), of_keys, dk.new_empty(batch, dk.shape[1], 1, rope_dim)


_latent_heads = torch.library.custom_op("titan_moe::latent_heads", launch_forward, mutates_args=())
_latent_heads.register_fake(lambda *args: _empty_heads(*args[:-1]))
_backward_op = torch.library.custom_op("titan_moe::latent_heads_backward", launch_backward, mutates_args=())
_backward_op.register_fake(_empty_gradients)


def _save(ctx: Any, inputs: tuple[Any, ...], output: Heads) -> None:
    *_, cos_NP, sin_NP, _, _, ctx.is_interleaved = inputs
    ctx.save_for_backward(cos_NP, sin_NP)


def _backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
    return *_backward_op(*grads, *ctx.saved_tensors, ctx.is_interleaved), None, None, None, None, None


_latent_heads.register_autograd(_backward, setup_context=_save)


def latent_heads(
    q_BNX: Tensor, kv_BMY: Tensor, k_rope_BM1R: Tensor, cos_NP: Tensor, sin_NP: Tensor, nope_dim: int, v_dim: int,
    is_interleaved: bool,
) -> Heads:  # fmt: skip
    """Split both projections into heads, rotate queries, and give each key the part that all share, in Triton.

    Shapes: q [B, N, H·(C + 2·P)], kv [B, M, H·(C + V)], the rotated part of keys [B, M, 1, 2·P], tables fp32 [N, P]
    -> [B, N, H, C + 2·P], [B, M, H, C + 2·P] and [B, M, H, V], contiguous.

    Raises: ValueError for fp64.
    """
    if q_BNX.dtype == torch.float64:
        raise ValueError(
            f'the Triton rotation computes in fp32, got {q_BNX.dtype}; take perf.override.rotary = "torch"'
        )
    tables = cos_NP.contiguous(), sin_NP.contiguous()
    return _latent_heads(q_BNX, kv_BMY, k_rope_BM1R, *tables, nope_dim, v_dim, is_interleaved)


register(Kernel("latent_heads", latent_heads, latent_heads_reference, needs_triton=True))
