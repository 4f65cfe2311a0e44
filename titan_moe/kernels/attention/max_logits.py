"""The largest attention logit of each head, which QK-clip needs (arXiv:2507.20534, section 2.1).

B batch · Q queries · N keys · H query heads · G key heads, a divisor of H · D head width

Physics: the first product of attention, 2·D FLOPs for each visible pair and head, half of attention's forward. Logits
are never written: a thread block has the queries of a tile, goes through the tiles of keys that any of them sees, and
keeps the largest product of each place of a tile. Keys before the queries' documents are skipped. What it reads is what
attention's forward reads but for values, so products bound it. Each thread block writes one number. A maximum does not
depend on the order, so results are the same on every layout.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.utils.flop_counter import register_flop_formula

from titan_moe.kernels.device import refuse_cpu
from titan_moe.kernels.registry import Kernel, register

CHUNK_ELEMENTS = 2**24
"""Logits of a chunk of queries of the reference."""
SMALLEST_DOT = 16


class Pairs(NamedTuple):
    """Which keys a query sees: those at its place and before, of its window, its chunk and its document."""

    is_causal: bool = True  # else all keys, whatever the other fields say
    window: int | None = None  # tokens, itself included; None: no window
    chunk: int | None = None  # tokens of each chunk of the sequence; None: no chunks
    positions_Q: Tensor | None = None  # int64, ascending: places of queries in the sequence; None: 0, 1, ...
    document_ids_BN: Tensor | None = None  # of the tokens of a sequence; None: one document


MaxLogits = Callable[[Tensor, Tensor, float, Pairs], Tensor]
"""Queries [B, Q, H, D], keys [B, N, G, D], a scale above 0 -> the largest logit of each head [H]."""
ALL_CAUSAL, ALL_PAIRS = Pairs(), Pairs(is_causal=False)


def max_logits_reference(q_BQHD: Tensor, k_BNGD: Tensor, scale: float, pairs: Pairs = ALL_CAUSAL) -> Tensor:
    """`max_logits` in PyTorch operations, by chunks of queries; in any dtype, with products in fp32 or wider."""
    wide = torch.promote_types(q_BQHD.dtype, torch.float32)
    num_keys, num_groups = k_BNGD.shape[1:3]
    k_BGDN = k_BNGD.to(wide).permute(0, 2, 3, 1)
    q_BGKQD = q_BQHD.to(wide).unflatten(2, (num_groups, -1)).permute(0, 2, 3, 1, 4)
    largest_GK = q_BGKQD.new_full(q_BGKQD.shape[1:3], -torch.inf)
    size = max(CHUNK_ELEMENTS // max(q_BQHD.shape[0] * q_BQHD.shape[2] * num_keys, 1), 1)
    places_Q = torch.arange(q_BQHD.shape[1], device=q_BQHD.device) if pairs.positions_Q is None else pairs.positions_Q
    for q_BGKqD, places_q in zip(q_BGKQD.split(size, dim=3), places_Q.split(size), strict=True):
        logits_BGKqN = q_BGKqD @ k_BGDN[:, :, None]
        if pairs.is_causal:
            visible_BqN = _visible(places_q, num_keys, pairs)
            logits_BGKqN = logits_BGKqN.masked_fill(~visible_BqN[:, None, None], -torch.inf)
        if logits_BGKqN.numel():
            largest_GK = torch.maximum(largest_GK, logits_BGKqN.amax((0, 3, 4)))
    return largest_GK.flatten() * scale


def _visible(places_q: Tensor, num_keys: int, pairs: Pairs) -> Tensor:
    """[B or 1, q, N]."""
    query_q1, key_N = places_q[:, None], torch.arange(num_keys, device=places_q.device)
    visible_BqN = (key_N <= query_q1)[None]
    if pairs.window is not None:
        visible_BqN = visible_BqN & (query_q1 - key_N < pairs.window)
    if pairs.chunk is not None:
        visible_BqN = visible_BqN & (query_q1 // pairs.chunk == key_N // pairs.chunk)
    if (ids_BN := pairs.document_ids_BN) is not None:
        visible_BqN = visible_BqN & (ids_BN[:, places_q][:, :, None] == ids_BN[:, None])
    return visible_BqN


@triton.jit
def _queries(q_ptr, row, is_row, position_stride, FIRST: tl.constexpr, D: tl.constexpr, BLOCK: tl.constexpr):
    """Elements from FIRST on, [rows, BLOCK]."""
    element = FIRST + tl.arange(0, BLOCK)[None, :]
    offset = row.to(tl.int64)[:, None] * position_stride + element
    return tl.load(q_ptr + offset, mask=is_row[:, None] & (element < D), other=0.0)


@triton.jit
def _keys(k_ptr, column, is_key, position_stride, FIRST: tl.constexpr, D: tl.constexpr, BLOCK: tl.constexpr):
    """Elements from FIRST on, [BLOCK, columns]."""
    element = FIRST + tl.arange(0, BLOCK)[:, None]
    offset = column.to(tl.int64)[None, :] * position_stride + element
    return tl.load(k_ptr + offset, mask=is_key[None, :] & (element < D), other=0.0)


@triton.jit
def _first_key(documents_ptr, begin, end, lowest, highest, BLOCK: tl.constexpr):
    """The first key, of those from `begin` to `end`, of a document from `lowest` to `highest`; `end` without one."""
    first = tl.full((BLOCK,), end, tl.int32)
    for start in range(begin, end, BLOCK):
        column = start + tl.arange(0, BLOCK)
        document = tl.load(documents_ptr + column, mask=column < end, other=0)
        is_seen = (column < end) & (document >= lowest) & (document <= highest)
        first = tl.minimum(first, tl.where(is_seen, column, end))
    return tl.min(first)


@triton.jit
def _max_logits_kernel(
    q_ptr, q_batch_stride, q_position_stride, q_head_stride, k_ptr, k_batch_stride, k_position_stride, k_head_stride,
    positions_ptr, documents_ptr, out_ptr, Q, N, window, chunk, scale,
    SHARED: tl.constexpr, D: tl.constexpr, IS_CAUSAL: tl.constexpr, HAS_WINDOW: tl.constexpr, HAS_CHUNKS: tl.constexpr,
    HAS_POSITIONS: tl.constexpr, HAS_DOCUMENTS: tl.constexpr,
    BLOCK_D: tl.constexpr, BLOCK_REST: tl.constexpr, BLOCK_Q: tl.constexpr, BLOCK_N: tl.constexpr,
    BLOCK_DOCUMENTS: tl.constexpr,
):  # fmt: skip
    tile = tl.num_programs(0) - 1 - tl.program_id(0)  # the last queries see most keys: they begin first
    head, batch = tl.program_id(1), tl.program_id(2)
    q_ptr += batch.to(tl.int64) * q_batch_stride + head.to(tl.int64) * q_head_stride
    k_ptr += batch.to(tl.int64) * k_batch_stride + (head // SHARED).to(tl.int64) * k_head_stride
    row = tile * BLOCK_Q + tl.arange(0, BLOCK_Q)
    is_row = row < Q
    place = tl.load(positions_ptr + row, mask=is_row, other=0).to(tl.int32) if HAS_POSITIONS else row
    q = _queries(q_ptr, row, is_row, q_position_stride, 0, D, BLOCK_D)
    if BLOCK_REST > 0:
        q_rest = _queries(q_ptr, row, is_row, q_position_stride, BLOCK_D, D, BLOCK_REST)
    if HAS_DOCUMENTS:
        documents_ptr += batch.to(tl.int64) * N
        q_document = tl.load(documents_ptr + place, mask=is_row, other=0)
    begin, end = 0, N
    if IS_CAUSAL:
        first, last = tl.min(tl.where(is_row, place, N)), tl.max(tl.where(is_row, place, 0))
        end = tl.minimum(last + 1, N)
        if HAS_WINDOW:
            begin = tl.maximum(first - window + 1, 0)
        if HAS_CHUNKS:
            begin = tl.maximum(begin, first // chunk * chunk)
        if HAS_DOCUMENTS:  # packed ones are in order: from the first that a query is of, all keys are seen by some
            lowest = tl.min(tl.load(documents_ptr + place, mask=is_row, other=2**31 - 1))
            highest = tl.max(tl.load(documents_ptr + place, mask=is_row, other=-(2**31)))
            begin = _first_key(documents_ptr, begin, end, lowest, highest, BLOCK_DOCUMENTS)
    largest = tl.full((BLOCK_Q, BLOCK_N), float("-inf"), tl.float32)
    for start in range(begin, end, BLOCK_N):
        column = start + tl.arange(0, BLOCK_N)
        is_key = column < N
        visible = is_row[:, None] & is_key[None, :]
        if IS_CAUSAL:
            visible &= column[None, :] <= place[:, None]
            if HAS_WINDOW:
                visible &= place[:, None] - column[None, :] < window
            if HAS_CHUNKS:
                visible &= place[:, None] // chunk == column[None, :] // chunk
            if HAS_DOCUMENTS:
                k_document = tl.load(documents_ptr + column, mask=is_key, other=0)
                visible &= q_document[:, None] == k_document[None, :]
        k = _keys(k_ptr, column, is_key, k_position_stride, 0, D, BLOCK_D)
        logits = tl.dot(q, k, input_precision="ieee")
        if BLOCK_REST > 0:
            k_rest = _keys(k_ptr, column, is_key, k_position_stride, BLOCK_D, D, BLOCK_REST)
            logits = tl.dot(q_rest, k_rest, logits, input_precision="ieee")
        largest = tl.maximum(largest, tl.where(visible, logits, float("-inf")))
    index = (head * tl.num_programs(2) + batch).to(tl.int64) * tl.num_programs(0) + tile
    tl.store(out_ptr + index, tl.max(tl.max(largest, axis=1), axis=0) * scale)


def _blocks(width: int, *, is_narrow: bool) -> dict[str, int]:
    """Tiles: a head is its largest power of two and the rest, so that 192 elements are not padded to 256."""
    first = max(1 << (width.bit_length() - 1), SMALLEST_DOT)
    rest = max(triton.next_power_of_2(width - first), SMALLEST_DOT) if width > first else 0
    queries, keys = (128, 64) if is_narrow else (32, 32)
    return {"BLOCK_D": first, "BLOCK_REST": rest, "BLOCK_Q": queries, "BLOCK_N": keys, "BLOCK_DOCUMENTS": 1024}


def launch(
    q_BQHD: Tensor, k_BNGD: Tensor, positions_Q: Tensor | None, document_ids_BN: Tensor | None,
    window: int, chunk: int, scale: float, is_causal: bool,
) -> Tensor:  # fmt: skip
    """`max_logits`; a window or chunk of 0 is none."""
    refuse_cpu(q_BQHD, "rotary", "triton")
    q, k = (x if x.stride(-1) == 1 else x.contiguous() for x in (q_BQHD, k_BNGD))
    (batch, num_queries, num_heads, width), (num_keys, num_groups) = q.shape, k.shape[1:3]
    has_documents = is_causal and document_ids_BN is not None
    sizes = _blocks(width, is_narrow=q.dtype.itemsize <= 2)
    grid = triton.cdiv(num_queries, sizes["BLOCK_Q"]), num_heads, batch
    if not all(grid):
        return q.new_full((num_heads,), -torch.inf, dtype=torch.float32)
    out = q.new_empty((num_heads, batch * grid[0]), dtype=torch.float32)
    documents = None if document_ids_BN is None else document_ids_BN.contiguous()
    _max_logits_kernel[grid](
        q, *q.stride()[:3], k, *k.stride()[:3], q if positions_Q is None else positions_Q.contiguous(),
        q if documents is None else documents, out, num_queries, num_keys, window, chunk, scale,
        SHARED=num_heads // num_groups, D=width, IS_CAUSAL=is_causal, HAS_WINDOW=window > 0, HAS_CHUNKS=chunk > 0,
        HAS_POSITIONS=positions_Q is not None, HAS_DOCUMENTS=has_documents, **sizes,
        num_warps=8 if width > 128 or has_documents else 4, num_stages=2,
    )  # fmt: skip
    return out.amax(1)


_max_logits = torch.library.custom_op("titan_moe::max_logits", launch, mutates_args=())
_max_logits.register_fake(lambda q, *_: q.new_empty(q.shape[2], dtype=torch.float32))


@register_flop_formula(torch.ops.titan_moe.max_logits)
def _flops(q_shape: Any, k_shape: Any, *_: Any, **__: Any) -> int:
    """Of all pairs, as PyTorch counts attention's."""
    batch, num_queries, num_heads, width = q_shape
    return int(2 * batch * num_queries * k_shape[1] * num_heads * width)


def max_logits(q_BQHD: Tensor, k_BNGD: Tensor, scale: float, pairs: Pairs = ALL_CAUSAL) -> Tensor:
    """The largest of scale · q · k over all visible pairs and sequences, of each query head, in Triton.

    Shapes: q [B, Q, H, D], k [B, N, G, D] -> fp32 [H], -inf without a pair. `scale` is above 0. It has no gradient.

    Raises: ValueError for fp64.
    """
    if q_BQHD.dtype == torch.float64:
        raise ValueError(f'the Triton kernel computes in fp32, got {q_BQHD.dtype}; take perf.override.rotary = "torch"')
    limits = pairs.positions_Q, pairs.document_ids_BN, pairs.window or 0, pairs.chunk or 0
    return _max_logits(q_BQHD.detach(), k_BNGD.detach(), *limits, scale, pairs.is_causal)


register(Kernel("max_logits", max_logits, max_logits_reference, needs_triton=True))
