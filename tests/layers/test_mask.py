"""Masks in both forms against two loops over queries and keys."""

import pytest
import torch
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask, create_block_mask

from titan_moe.layers.mask import BLOCK_TOKENS, MaskSpec, dense_mask, rule, visited_blocks

CPU = torch.device("cpu")
LENGTHS = [1, 7, 128, 129, 300, 512]
REACHES = [1, 3, 127, 128, 129, 257, 1000]


def packed(num_tokens: int) -> Tensor:
    """Long and short documents in the first sequence, one in the second, one a token in the third."""
    borders = (torch.arange(num_tokens)[:, None] >= torch.tensor([2, 5, 130, 131, 260, 400])).sum(1)
    return torch.stack([borders, torch.zeros_like(borders), torch.arange(num_tokens)]).int()


def scattered(num_tokens: int) -> Tensor:
    return torch.randint(3, (2, num_tokens), generator=torch.Generator().manual_seed(0))


IDS = {"none": lambda num_tokens: None, "packed": packed, "scattered": scattered}


def spec(num_tokens: int, window: int = 10**6, documents: str = "none") -> MaskSpec:
    return MaskSpec(num_tokens, min(window, num_tokens), IDS[documents](num_tokens), CPU)


def by_loops(seen: MaskSpec) -> Tensor:
    ids = torch.zeros(1, seen.num_tokens) if seen.document_ids_BN is None else seen.document_ids_BN
    table = torch.zeros(len(ids), 1, seen.num_tokens, seen.num_tokens, dtype=torch.bool)
    for sequence, documents in enumerate(ids.tolist()):
        for query in range(seen.num_tokens):
            for key in range(max(0, query - seen.window + 1), query + 1):
                table[sequence, 0, query, key] = documents[query] == documents[key]
    return table


@pytest.mark.parametrize("documents", IDS)
@pytest.mark.parametrize("num_tokens", [1, 7, 130])
def test_the_table_is_what_loops_find(num_tokens: int, documents: str) -> None:
    for window in (1, 3, 128, 1000):
        seen = spec(num_tokens, window, documents)
        assert torch.equal(dense_mask(seen), by_loops(seen)), window


def listed(num_blocks: Tensor, indices: Tensor) -> Tensor:
    """The blocks that a kernel visits: the first so many of each row."""
    visited = torch.zeros_like(indices, dtype=torch.bool)
    return visited.scatter(-1, indices.long(), torch.arange(indices.shape[-1]) < num_blocks[..., None])


def visits(mask: BlockMask) -> dict[str, Tensor]:
    """Partial and full blocks, as queries find their keys and as keys find their queries."""
    return {
        "partial": listed(mask.kv_num_blocks, mask.kv_indices),
        "full": listed(mask.full_kv_num_blocks, mask.full_kv_indices),
        "partial to queries": listed(mask.q_num_blocks, mask.q_indices).transpose(-1, -2),
        "full to queries": listed(mask.full_q_num_blocks, mask.full_q_indices).transpose(-1, -2),
    }


@pytest.mark.parametrize("documents", IDS)
@pytest.mark.parametrize("num_tokens", LENGTHS)
def test_every_pair_lies_in_a_visited_block(num_tokens: int, documents: str) -> None:
    for window in REACHES:
        seen = spec(num_tokens, window, documents)
        found = visits(visited_blocks(seen))
        assert torch.equal(found["partial"], found["partial to queries"])
        assert torch.equal(found["full"], found["full to queries"])
        table, filler = dense_mask(seen), -num_tokens % BLOCK_TOKENS
        table = torch.nn.functional.pad(table, (0, filler, 0, filler))
        blocks = table.unflatten(-1, (-1, BLOCK_TOKENS)).unflatten(-3, (-1, BLOCK_TOKENS)).transpose(-2, -3)
        assert torch.equal(found["full"], blocks.flatten(-2).all(-1)), window
        is_needed = blocks.flatten(-2).any(-1)
        assert not (is_needed & ~found["partial"] & ~found["full"]).any(), window
        if documents != "scattered":
            assert torch.equal(found["partial"] | found["full"], is_needed), f"window {window} visits for nothing"


def test_pytorch_lists_the_same_blocks() -> None:
    seen = spec(300, 130, "packed")
    theirs = visits(create_block_mask(rule(seen), 3, None, 300, 300, device="cpu"))
    ours = visits(visited_blocks(seen))
    assert all(torch.equal(ours[name], theirs[name]) for name in theirs)


@pytest.mark.parametrize("make", [dense_mask, visited_blocks])
def test_nothing_is_read_by_the_host(make) -> None:
    """A tensor without values cannot be read: what runs on it waits for no device."""
    ids = torch.empty(2, 300, dtype=torch.int32, device="meta")
    assert make(MaskSpec(300, 40, ids, ids.device)) is not None


def test_causality_alone_needs_no_mask() -> None:
    assert spec(300).is_causal_only and spec(300, 300).is_causal_only
    assert not spec(300, 299).is_causal_only and not spec(300, 300, "packed").is_causal_only


@pytest.mark.parametrize(("window", "partial", "full"), [(1, 8, 0), (128, 8 + 7, 0), (256, 8 + 6, 7), (1024, 8, 28)])
def test_blocks_of_a_window_by_hand(window: int, partial: int, full: int) -> None:
    """Eight blocks on the diagonal are never full; those below it are, until the window cuts them."""
    found = visits(visited_blocks(spec(1024, window)))
    assert (found["partial"].sum(), found["full"].sum()) == (partial, full)
