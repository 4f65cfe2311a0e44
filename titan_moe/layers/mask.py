"""Attention masks, from one specification: a dense mask for SDPA, a block mask for FlexAttention.

A token attends to itself and earlier tokens, in a packed sequence only of its own document, and in layers with a
sliding window (arXiv:2310.06825) only within the window. Plain causal attention needs no mask: every kernel supports
it. All other cases need a dense mask [N, N] for PyTorch's scaled dot product attention, which computes masked pairs
too, or a block mask for FlexAttention (arXiv:2412.05496), which lists the key blocks to visit for each query block.

A mask is built once per forward and shared by all layers with the same window.

B batch · N sequence · K blocks of a sequence
"""

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask, and_masks

BLOCK_TOKENS = 128
"""Queries and keys of a block. The tile sizes of FlexAttention's kernels divide it."""

Mask = Tensor | BlockMask | None
"""A dense mask [B or 1, 1, N, N] of booleans, a block mask, or None for plain causal attention."""
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

    @property
    def is_causal_only(self) -> bool:
        """Whether the mask is plain causal."""
        return self.document_ids_BN is None and self.window >= self.num_tokens

    @property
    def has_window(self) -> bool:
        """Whether the window is shorter than the sequence."""
        return self.window < self.num_tokens


def dense_mask(spec: MaskSpec) -> Tensor:
    """Evaluate the mask for every pair: True if the query (row) attends to the key (column). [B or 1, 1, N, N]"""
    ids, tokens_N = spec.document_ids_BN, torch.arange(spec.num_tokens, device=spec.device)
    batch_B = torch.arange(1 if ids is None else len(ids), device=spec.device)
    mask_BHNN = mask_mod(spec)(batch_B[:, None, None, None], batch_B[:1], tokens_N[:, None], tokens_N)
    return mask_BHNN.expand(len(batch_B), 1, -1, -1)


def block_mask(spec: MaskSpec) -> BlockMask:
    """List the key blocks of every query block: full ones, for which mask_mod is not evaluated, and partial ones.

    The lists are computed on the device from the lowest and highest document id of each block, with K x K operations.
    If document ids are not sorted, a partial block may have no visible pair; mask_mod still masks it correctly.
    """
    some_BKK, every_BKK = _block_overlap(spec)
    partial, full = (_count_and_order(blocks_BKK[:, None]) for blocks_BKK in (some_BKK & ~every_BKK, every_BKK))
    seq_lengths = (spec.num_tokens, spec.num_tokens)
    return BlockMask.from_kv_blocks(
        *partial, *full, BLOCK_SIZE=BLOCK_TOKENS, mask_mod=mask_mod(spec), seq_lengths=seq_lengths
    )


MASKS: dict[str, Callable[[MaskSpec], Tensor | BlockMask]] = {"sdpa": dense_mask, "flex": block_mask}
"""`Kernels.attention` -> the function that builds its masks."""


def mask_mod(spec: MaskSpec) -> MaskMod:
    """The mask as a function of indices of any shape."""
    document_ids_BN, window = spec.document_ids_BN, spec.window

    def is_past(batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        return key <= query

    def is_in_window(batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        return query - key < window

    def is_same_document(batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        assert document_ids_BN is not None
        return document_ids_BN[batch, query] == document_ids_BN[batch, key]

    mask_mods: list[MaskMod] = [is_past]
    if spec.has_window:
        mask_mods.append(is_in_window)
    if document_ids_BN is not None:
        mask_mods.append(is_same_document)
    return and_masks(*mask_mods)


def _block_overlap(spec: MaskSpec) -> tuple[Tensor, Tensor]:
    """For each (query block, key block): whether some pair may be visible, and whether every pair is."""
    num_blocks = -(-spec.num_tokens // BLOCK_TOKENS)
    first_K = torch.arange(num_blocks, device=spec.device) * BLOCK_TOKENS
    last_K = first_K + (BLOCK_TOKENS - 1)
    some_BKK = (first_K <= last_K[:, None])[None]
    # an incomplete last block is never full, so the kernels check the sequence end
    every_BKK = ((last_K <= first_K[:, None]) & (last_K[:, None] < spec.num_tokens))[None]
    if spec.has_window:
        some_BKK = some_BKK & (first_K[:, None] - last_K < spec.window)
        every_BKK = every_BKK & (last_K[:, None] - first_K < spec.window)
    if spec.document_ids_BN is not None:
        low_BK, high_BK = _document_range(spec.document_ids_BN, num_blocks)
        some_BKK = some_BKK & (low_BK[:, :, None] <= high_BK[:, None]) & (low_BK[:, None] <= high_BK[:, :, None])
        # each block's lowest id equals the other's highest: both blocks contain one and the same document
        every_BKK = every_BKK & (low_BK[:, :, None] == high_BK[:, None]) & (low_BK[:, None] == high_BK[:, :, None])
    return some_BKK, every_BKK


def _document_range(document_ids_BN: Tensor, num_blocks: int) -> tuple[Tensor, Tensor]:
    """The lowest and highest document id of each block."""
    num_missing = num_blocks * BLOCK_TOKENS - document_ids_BN.shape[1]
    last_document_B1 = document_ids_BN[:, -1:].expand(-1, num_missing)
    ids_BKT = torch.cat([document_ids_BN, last_document_B1], dim=1).unflatten(1, (num_blocks, BLOCK_TOKENS))
    low_BK, high_BK = ids_BKT.aminmax(dim=-1)
    return low_BK, high_BK


def _count_and_order(selected: Tensor) -> tuple[Tensor, Tensor]:
    """The number of selected columns of each row, and all columns with the selected ones first; int32."""
    columns = selected.to(torch.int8).argsort(dim=-1, descending=True, stable=True)
    return selected.sum(-1, dtype=torch.int32), columns.to(torch.int32)
