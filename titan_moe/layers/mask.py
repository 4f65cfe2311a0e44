"""Attention masks, from one specification: a dense mask for SDPA, a block mask for FlexAttention.

A token attends to itself and earlier tokens, in a packed sequence only of its own document, in layers with a sliding
window (arXiv:2310.06825) only within the window, and in layers with chunks (Llama 4) only within its chunk of the
sequence. Plain causal attention needs no mask: every kernel supports it. All other cases need a dense mask [N, N] for
PyTorch's scaled dot product attention, which computes masked pairs too, or a block mask for FlexAttention
(arXiv:2412.05496), which lists the key blocks to visit for each query block.

A mask is built once per forward and shared by all layers with the same window and chunks.

B batch · N sequence, its keys · Q queries: N, or a context-parallel rank's · K blocks of a sequence
"""

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask, and_masks

from titan_moe.kernels.attention.max_logits import Pairs

BLOCK_TOKENS = 128
"""Queries and keys of a block. The tile sizes of FlexAttention's kernels divide it."""

Mask = Tensor | BlockMask | None
"""A dense mask [B or 1, 1, Q, N] of booleans, a block mask, or None for plain causal attention."""
MaskMod = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]
"""FlexAttention's mask_mod: (batch, head, query, key) indices -> whether the query attends to the key."""


class MaskSpec(NamedTuple):
    """The specification of a layer's mask."""

    num_tokens: int
    """Length of the sequences."""
    window: int
    """Number of tokens that a query attends to at most, itself included; `num_tokens` means no window."""
    document_ids_BN: Tensor | None
    """Document of each token, or None for attention across documents."""
    device: torch.device
    query_positions_Q: Tensor | None = None
    """Places in the sequence of the queries, ascending, where a rank has some of them; None: queries of all tokens."""
    query_positions_BQ: Tensor | None = None
    """Places of the queries of each row, where rows have queries of other tokens; only for dense masks."""
    chunk: int | None = None
    """Number of tokens of each chunk of the sequence, in which its tokens attend; None means no chunks."""

    @property
    def is_causal_only(self) -> bool:
        """Whether the mask is plain causal."""
        is_whole = self.query_positions_Q is None and self.query_positions_BQ is None
        return is_whole and self.document_ids_BN is None and not (self.has_window or self.has_chunks)

    @property
    def pairs(self) -> Pairs:
        """The same for kernels that need no mask; not of queries that differ by row."""
        window, chunk = self.window if self.has_window else None, self.chunk if self.has_chunks else None
        return Pairs(True, window, chunk, self.query_positions_Q, self.document_ids_BN)

    @property
    def num_queries(self) -> int:
        """Number of queries of a sequence."""
        if self.query_positions_BQ is not None:
            return self.query_positions_BQ.shape[1]
        return self.num_tokens if self.query_positions_Q is None else len(self.query_positions_Q)

    @property
    def has_window(self) -> bool:
        """Whether the window is shorter than the sequence."""
        return self.window < self.num_tokens

    @property
    def has_chunks(self) -> bool:
        """Whether chunks are shorter than the sequence."""
        return self.chunk is not None and self.chunk < self.num_tokens


def dense_mask(spec: MaskSpec) -> Tensor:
    """Evaluate the mask for every pair: True if the query (row) attends to the key (column). [B or 1, 1, Q, N]"""
    ids = spec.document_ids_BN if spec.query_positions_BQ is None else spec.query_positions_BQ  # one row each
    tokens_N = torch.arange(spec.num_tokens, device=spec.device)
    batch_B = torch.arange(1 if ids is None else len(ids), device=spec.device)
    queries_Q = torch.arange(spec.num_queries, device=spec.device)
    mask_BHQN = mask_mod(spec)(batch_B[:, None, None, None], batch_B[:1], queries_Q[:, None], tokens_N)
    return mask_BHQN.expand(len(batch_B), 1, -1, -1)


def block_mask(spec: MaskSpec) -> BlockMask:
    """List the key blocks of every query block: full ones, for which mask_mod is not evaluated, and partial ones.

    The lists are computed on the device from the lowest and highest document id of each block, with K x K operations.
    If document ids are not sorted, a partial block may have no visible pair; mask_mod still masks it correctly.
    """
    some_BKK, every_BKK = _block_overlap(spec)
    partial, full = (_count_and_order(blocks_BKK[:, None]) for blocks_BKK in (some_BKK & ~every_BKK, every_BKK))
    seq_lengths = (spec.num_queries, spec.num_tokens)
    return BlockMask.from_kv_blocks(
        *partial, *full, BLOCK_SIZE=BLOCK_TOKENS, mask_mod=mask_mod(spec), seq_lengths=seq_lengths
    )


MASKS: dict[str, Callable[[MaskSpec], Tensor | BlockMask]] = {"sdpa": dense_mask, "flex": block_mask}
"""`Kernels.attention` -> the function that builds its masks."""


def mask_mod(spec: MaskSpec) -> MaskMod:
    """The mask as a function of indices of any shape."""
    document_ids_BN, window, positions_Q = spec.document_ids_BN, spec.window, spec.query_positions_Q
    chunk = spec.chunk or spec.num_tokens

    def is_past(batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        return key <= query

    def is_in_window(batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        return query - key < window

    def is_in_chunk(batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        return query // chunk == key // chunk

    def is_same_document(batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        assert document_ids_BN is not None
        return document_ids_BN[batch, query] == document_ids_BN[batch, key]

    mask_mods: list[MaskMod] = [is_past]
    if spec.has_window:
        mask_mods.append(is_in_window)
    if spec.has_chunks:
        mask_mods.append(is_in_chunk)
    if document_ids_BN is not None:
        mask_mods.append(is_same_document)
    all_of = and_masks(*mask_mods)
    if (positions_BQ := spec.query_positions_BQ) is not None:
        return lambda batch, head, query, key: all_of(batch, head, positions_BQ[batch, query], key)
    if positions_Q is None:
        return all_of
    return lambda batch, head, query, key: all_of(batch, head, positions_Q[query], key)


def _block_overlap(spec: MaskSpec) -> tuple[Tensor, Tensor]:
    """For each (query block, key block): whether some pair may be visible, and whether every pair is."""
    num_blocks = -(-spec.num_tokens // BLOCK_TOKENS)
    first_K = torch.arange(num_blocks, device=spec.device) * BLOCK_TOKENS
    last_K = first_K + (BLOCK_TOKENS - 1)
    low_q, high_q, is_complete_q = first_K[:, None], last_K[:, None], last_K[:, None] < spec.num_tokens
    if spec.query_positions_Q is not None:
        low_q, high_q = (places_BK[0, :, None] for places_BK in _block_range(spec.query_positions_Q[None]))
        is_complete_q = last_K[: len(low_q), None] < spec.num_queries
    some_BKK = (first_K <= high_q)[None]
    # an incomplete last block is never full, so the kernels check the sequence end
    every_BKK = ((last_K <= low_q) & is_complete_q)[None]
    if spec.has_window:
        some_BKK = some_BKK & (low_q - last_K < spec.window)
        every_BKK = every_BKK & (high_q - first_K < spec.window)
    if spec.has_chunks:
        low_chunk_q, high_chunk_q, first_chunk_K, last_chunk_K = (
            places // spec.chunk for places in (low_q, high_q, first_K, last_K)
        )
        some_BKK = some_BKK & (low_chunk_q <= last_chunk_K) & (first_chunk_K <= high_chunk_q)
        every_BKK = every_BKK & (low_chunk_q == last_chunk_K) & (first_chunk_K == high_chunk_q)
    if spec.document_ids_BN is not None:
        low_BK, high_BK = _block_range(spec.document_ids_BN)
        low_Bq, high_Bq = low_BK, high_BK
        if spec.query_positions_Q is not None:
            low_Bq, high_Bq = _block_range(spec.document_ids_BN[:, spec.query_positions_Q])
        some_BKK = some_BKK & (low_Bq[:, :, None] <= high_BK[:, None]) & (low_BK[:, None] <= high_Bq[:, :, None])
        # each block's lowest id equals the other's highest: both blocks contain one and the same document
        every_BKK = every_BKK & (low_Bq[:, :, None] == high_BK[:, None]) & (low_BK[:, None] == high_Bq[:, :, None])
    return some_BKK, every_BKK


def _block_range(values_BN: Tensor) -> tuple[Tensor, Tensor]:
    """The lowest and the highest value of each block."""
    num_missing = -values_BN.shape[1] % BLOCK_TOKENS
    last_B1 = values_BN[:, -1:].expand(-1, num_missing)
    values_BKT = torch.cat([values_BN, last_B1], dim=1).unflatten(1, (-1, BLOCK_TOKENS))
    low_BK, high_BK = values_BKT.aminmax(dim=-1)
    return low_BK, high_BK


def _count_and_order(selected: Tensor) -> tuple[Tensor, Tensor]:
    """The number of selected columns of each row, and all columns with the selected ones first; int32."""
    columns = selected.to(torch.int8).argsort(dim=-1, descending=True, stable=True)
    return selected.sum(-1, dtype=torch.int32), columns.to(torch.int32)
