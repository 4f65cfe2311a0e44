"""Which keys a query may look at, said once and given to every kind of attention in the form that it can skip by.

A token sees itself and its past; of a packed sequence its own document only; and in layers with a sliding window
(arXiv:2310.06825) no further back than the window. Plain causal attention needs no mask at all: every kernel knows it.
What goes beyond is a table of N x N truth values for PyTorch's scaled dot product attention, which computes what it
hides too, or for FlexAttention (arXiv:2412.05496) a list of the key blocks that each block of queries must visit.

A mask is made once a forward and shared by the layers that window equally far.

B batch · N sequence · K blocks of a sequence
"""

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask, and_masks

BLOCK_TOKENS = 128
"""Queries and keys of a block; FlexAttention's kernels take tiles that divide it."""

Mask = Tensor | BlockMask | None
"""Truth values [B or 1, 1, N, N], blocks to visit, or nothing where causality is all."""
Rule = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]
"""Whether sequence `b` lets a query see a key, from (b, head, query, key)."""


class MaskSpec(NamedTuple):
    """What the tokens of a layer may see."""

    num_tokens: int
    """Length of the sequences."""
    window: int
    """Tokens that a token sees at most, itself included; `num_tokens` is its whole past."""
    document_ids_BN: Tensor | None
    """Document of each token, where tokens must see their own document only."""
    device: torch.device

    @property
    def is_causal_only(self) -> bool:
        """Whether nothing but the future is hidden."""
        return self.document_ids_BN is None and self.window >= self.num_tokens

    @property
    def has_window(self) -> bool:
        """Whether some of the past is too far away."""
        return self.window < self.num_tokens


def dense_mask(spec: MaskSpec) -> Tensor:
    """Evaluate the rule for every pair: True where a query (row) may look at a key (column). [B or 1, 1, N, N]"""
    ids, tokens_N = spec.document_ids_BN, torch.arange(spec.num_tokens, device=spec.device)
    batch_B = torch.arange(1 if ids is None else len(ids), device=spec.device)
    table = rule(spec)(batch_B[:, None, None, None], batch_B[:1], tokens_N[:, None], tokens_N)
    return table.expand(len(batch_B), 1, -1, -1)


def visited_blocks(spec: MaskSpec) -> BlockMask:
    """List the key blocks of every query block: those seen in full, where the rule is not asked, and those in part.

    They come from the lowest and highest document of each block, so that the whole work is on K x K numbers, on the
    device. Where document ids fall somewhere in a sequence, a block may be visited for nothing; the rule decides.
    """
    some_BKK, every_BKK = _overlap(spec)
    partial, full = (_first_listed(blocks_BKK[:, None]) for blocks_BKK in (some_BKK & ~every_BKK, every_BKK))
    seq_lengths = (spec.num_tokens, spec.num_tokens)
    return BlockMask.from_kv_blocks(
        *partial, *full, BLOCK_SIZE=BLOCK_TOKENS, mask_mod=rule(spec), seq_lengths=seq_lengths
    )


MASKS: dict[str, Callable[[MaskSpec], Tensor | BlockMask]] = {"sdpa": dense_mask, "flex": visited_blocks}
"""`Kernels.attention` -> what makes its masks."""


def rule(spec: MaskSpec) -> Rule:
    """Say which pairs may meet, as a function of indices of any shape."""
    document_ids_BN, window = spec.document_ids_BN, spec.window

    def is_past(batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        return key <= query

    def is_near(batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        return query - key < window

    def is_same_document(batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        assert document_ids_BN is not None
        return document_ids_BN[batch, query] == document_ids_BN[batch, key]

    rules: list[Rule] = [is_past]
    if spec.has_window:
        rules.append(is_near)
    if document_ids_BN is not None:
        rules.append(is_same_document)
    return and_masks(*rules)


def _overlap(spec: MaskSpec) -> tuple[Tensor, Tensor]:
    """Whether a block of queries (row) may see some key of a block (column), and whether each sees every key."""
    num_blocks = -(-spec.num_tokens // BLOCK_TOKENS)
    first_K = torch.arange(num_blocks, device=spec.device) * BLOCK_TOKENS
    last_K = first_K + (BLOCK_TOKENS - 1)
    some_BKK = (first_K <= last_K[:, None])[None]
    # a block that the sequence does not fill is never seen in full: the kernels then mind the end
    every_BKK = ((last_K <= first_K[:, None]) & (last_K[:, None] < spec.num_tokens))[None]
    if spec.has_window:
        some_BKK = some_BKK & (first_K[:, None] - last_K < spec.window)
        every_BKK = every_BKK & (last_K[:, None] - first_K < spec.window)
    if spec.document_ids_BN is not None:
        low_BK, high_BK = _lowest_and_highest(spec.document_ids_BN, num_blocks)
        some_BKK = some_BKK & (low_BK[:, :, None] <= high_BK[:, None]) & (low_BK[:, None] <= high_BK[:, :, None])
        # lowest = highest, both ways round: one and the same document fills both blocks
        every_BKK = every_BKK & (low_BK[:, :, None] == high_BK[:, None]) & (low_BK[:, None] == high_BK[:, :, None])
    return some_BKK, every_BKK


def _lowest_and_highest(document_ids_BN: Tensor, num_blocks: int) -> tuple[Tensor, Tensor]:
    missing = num_blocks * BLOCK_TOKENS - document_ids_BN.shape[1]
    last_document_B1 = document_ids_BN[:, -1:].expand(-1, missing)
    ids_BKT = torch.cat([document_ids_BN, last_document_B1], dim=1).unflatten(1, (num_blocks, BLOCK_TOKENS))
    low_BK, high_BK = ids_BKT.aminmax(dim=-1)
    return low_BK, high_BK


def _first_listed(chosen: Tensor) -> tuple[Tensor, Tensor]:
    """How many columns of each row are chosen, and the columns with these in front, as int32."""
    columns = chosen.to(torch.int8).argsort(dim=-1, descending=True, stable=True)
    return chosen.sum(-1, dtype=torch.int32), columns.to(torch.int32)
