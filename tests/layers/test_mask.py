"""Dense and block masks, compared with two loops over queries and keys."""

import pytest
import torch
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask, create_block_mask

from titan_moe.layers.mask import BLOCK_TOKENS, MaskSpec, block_mask, dense_mask, mask_mod

CPU = torch.device("cpu")
LENGTHS = [1, 7, 128, 129, 300, 512]
WINDOWS = [1, 3, 127, 128, 129, 257, 1000]


def packed(num_tokens: int) -> Tensor:
    """Long and short documents in the first sequence, one document in the second, one per token in the third."""
    mixed = (torch.arange(num_tokens)[:, None] >= torch.tensor([2, 5, 130, 131, 260, 400])).sum(1)
    return torch.stack([mixed, torch.zeros_like(mixed), torch.arange(num_tokens)]).int()


def scattered(num_tokens: int) -> Tensor:
    return torch.randint(3, (2, num_tokens), generator=torch.Generator().manual_seed(0))


IDS = {"none": lambda num_tokens: None, "packed": packed, "scattered": scattered}


def make_spec(num_tokens: int, window: int = 10**6, documents: str = "none") -> MaskSpec:
    return MaskSpec(num_tokens, min(window, num_tokens), IDS[documents](num_tokens), CPU)


def mask_by_loops(spec: MaskSpec) -> Tensor:
    ids = torch.zeros(1, spec.num_tokens) if spec.document_ids_BN is None else spec.document_ids_BN
    tokens = range(spec.num_tokens)
    return torch.tensor(
        [
            [[[q - spec.window < k <= q and documents[q] == documents[k] for k in tokens] for q in tokens]]
            for documents in ids.tolist()
        ]
    )


@pytest.mark.parametrize("documents", IDS)
@pytest.mark.parametrize("num_tokens", [1, 7, 130])
def test_mask_dense_equals_loops(num_tokens: int, documents: str) -> None:
    for window in (1, 3, 128, 1000):
        spec = make_spec(num_tokens, window, documents)
        assert torch.equal(dense_mask(spec), mask_by_loops(spec)), window


@pytest.mark.parametrize("documents", IDS)
def test_mask_of_chunks_equals_loops_and_its_blocks(documents: str) -> None:
    for num_tokens, chunk in ((7, 3), (130, 128), (300, 7), (520, 130), (520, 256), (130, 130)):
        places = torch.arange(num_tokens) // chunk
        spec = make_spec(num_tokens, documents=documents)
        expected = dense_mask(spec) & (places[:, None] == places)
        spec = spec._replace(chunk=chunk)
        mask, padding = dense_mask(spec), -num_tokens % BLOCK_TOKENS
        assert torch.equal(mask, expected), (num_tokens, chunk)
        visited, padded = visited_blocks(block_mask(spec)), torch.nn.functional.pad(mask, (0, padding, 0, padding))
        blocks = padded.unflatten(-1, (-1, BLOCK_TOKENS)).unflatten(-3, (-1, BLOCK_TOKENS)).transpose(-2, -3)
        assert not (visited["full"] & ~blocks.flatten(-2).all(-1)).any(), (num_tokens, chunk)
        assert not (blocks.flatten(-2).any(-1) & ~visited["partial"] & ~visited["full"]).any(), (num_tokens, chunk)


def test_mask_of_chunks_of_some_queries_equals_rows_of_the_whole() -> None:
    places_Q = torch.cat([torch.arange(0, 130), torch.arange(390, 520)])
    whole = make_spec(520, documents="packed")._replace(chunk=131)
    some = whole._replace(query_positions_Q=places_Q)
    mask, padding = dense_mask(some), -len(places_Q) % BLOCK_TOKENS
    assert torch.equal(mask, dense_mask(whole)[:, :, places_Q])
    visited = visited_blocks(block_mask(some))
    padded = torch.nn.functional.pad(mask, (0, -520 % BLOCK_TOKENS, 0, padding))
    blocks = padded.unflatten(-1, (-1, BLOCK_TOKENS)).unflatten(-3, (-1, BLOCK_TOKENS)).transpose(-2, -3)
    assert not (visited["full"] & ~blocks.flatten(-2).all(-1)).any()
    assert not (blocks.flatten(-2).any(-1) & ~visited["partial"] & ~visited["full"]).any()


def listed(num_blocks: Tensor, indices: Tensor) -> Tensor:
    """The blocks that a kernel visits: the first `num_blocks` indices of each row."""
    visited = torch.zeros_like(indices, dtype=torch.bool)
    return visited.scatter(-1, indices.long(), torch.arange(indices.shape[-1]) < num_blocks[..., None])


def visited_blocks(mask: BlockMask) -> dict[str, Tensor]:
    """Partial and full blocks, from the lists of key blocks (forward) and of query blocks (backward)."""
    return {
        "partial": listed(mask.kv_num_blocks, mask.kv_indices),
        "full": listed(mask.full_kv_num_blocks, mask.full_kv_indices),
        "partial to queries": listed(mask.q_num_blocks, mask.q_indices).transpose(-1, -2),
        "full to queries": listed(mask.full_q_num_blocks, mask.full_q_indices).transpose(-1, -2),
    }


@pytest.mark.parametrize("documents", IDS)
@pytest.mark.parametrize("num_tokens", LENGTHS)
def test_mask_blocks_contain_every_visible_pair(num_tokens: int, documents: str) -> None:
    for window in WINDOWS:
        spec = make_spec(num_tokens, window, documents)
        visited = visited_blocks(block_mask(spec))
        assert torch.equal(visited["partial"], visited["partial to queries"])
        assert torch.equal(visited["full"], visited["full to queries"])
        mask, padding = dense_mask(spec), -num_tokens % BLOCK_TOKENS
        mask = torch.nn.functional.pad(mask, (0, padding, 0, padding))
        blocks = mask.unflatten(-1, (-1, BLOCK_TOKENS)).unflatten(-3, (-1, BLOCK_TOKENS)).transpose(-2, -3)
        assert torch.equal(visited["full"], blocks.flatten(-2).all(-1)), window
        is_needed = blocks.flatten(-2).any(-1)
        assert not (is_needed & ~visited["partial"] & ~visited["full"]).any(), window
        if documents != "scattered":
            assert torch.equal(visited["partial"] | visited["full"], is_needed), f"window {window}: empty blocks"


def test_mask_blocks_equal_those_of_pytorch() -> None:
    spec = make_spec(300, 130, "packed")
    expected = visited_blocks(create_block_mask(mask_mod(spec), 3, None, 300, 300, device="cpu"))
    actual = visited_blocks(block_mask(spec))
    assert all(torch.equal(actual[name], expected[name]) for name in expected)


@pytest.mark.parametrize("documents", IDS)
@pytest.mark.parametrize(("num_tokens", "num_queries"), [(300, 150), (260, 130), (130, 1)])
def test_mask_blocks_of_some_queries_contain_every_visible_pair(
    num_tokens: int, num_queries: int, documents: str
) -> None:
    """Queries from both ends, as a rank has them."""
    half = num_queries // 2
    tokens_N = torch.arange(num_tokens)
    positions_Q = torch.cat([tokens_N[half : 2 * half], tokens_N[num_tokens - num_queries + half :]])
    for window in (3, 128, 1000):
        whole = make_spec(num_tokens, window, documents)
        spec = whole._replace(query_positions_Q=positions_Q)
        mask = mask_by_loops(whole)[:, :, positions_Q]
        assert torch.equal(dense_mask(spec), mask), window
        padding = -num_queries % BLOCK_TOKENS, -num_tokens % BLOCK_TOKENS
        mask = torch.nn.functional.pad(mask, (0, padding[1], 0, padding[0]))
        blocks = mask.unflatten(-1, (-1, BLOCK_TOKENS)).unflatten(-3, (-1, BLOCK_TOKENS)).transpose(-2, -3)
        made = block_mask(spec)
        visited = visited_blocks(made)
        assert torch.equal(visited["partial"], visited["partial to queries"])
        assert not (visited["full"] & ~blocks.flatten(-2).all(-1)).any(), window
        is_needed = blocks.flatten(-2).any(-1)
        assert not (is_needed & ~visited["partial"] & ~visited["full"]).any(), window
        rows_Q = torch.arange(num_queries)[:, None]
        listed_mask = made.mask_mod(torch.zeros_like(rows_Q), torch.zeros_like(rows_Q), rows_Q, tokens_N)
        assert torch.equal(listed_mask, mask[0, 0, :num_queries, :num_tokens]), window


@pytest.mark.parametrize("make", [dense_mask, block_mask])
def test_mask_is_built_without_host_reads(make) -> None:
    """Meta tensors have no values, so a host read would fail."""
    ids = torch.empty(2, 300, dtype=torch.int32, device="meta")
    assert make(MaskSpec(300, 40, ids, ids.device)) is not None


def test_mask_spec_is_causal_only_without_window_and_documents() -> None:
    assert make_spec(300).is_causal_only and make_spec(300, 300).is_causal_only
    assert not make_spec(300, 299).is_causal_only and not make_spec(300, 300, "packed").is_causal_only


@pytest.mark.parametrize(("window", "partial", "full"), [(1, 8, 0), (128, 8 + 7, 0), (256, 8 + 6, 7), (1024, 8, 28)])
def test_mask_blocks_of_a_window(window: int, partial: int, full: int) -> None:
    """The eight blocks on the diagonal are never full. Those below are full unless the window cuts them."""
    visited = visited_blocks(block_mask(make_spec(1024, window)))
    assert (visited["partial"].sum(), visited["full"].sum()) == (partial, full)
