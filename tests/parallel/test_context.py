"""Attention of whole sequences on ranks that have parts of them: what is exchanged, against plain indexing."""

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from titan_moe.config.context import SequenceShard, sequence_shard
from titan_moe.config.parallel import ParallelConfig
from titan_moe.layers.mask import MaskSpec, dense_mask
from titan_moe.parallel.context import GatherKeys, HeadsToTokens, TokensToHeads

BATCH, HEADS, HEAD_DIM = 2, 8, 3


def positions_by_hand(num_tokens: int, num_ranks: int, rank: int) -> list[int]:
    """Cut the sequence into twice as many chunks as ranks; a rank has one from the start and its mirror image."""
    chunks = torch.arange(num_tokens).chunk(2 * num_ranks)
    return [*chunks[rank].tolist(), *chunks[2 * num_ranks - 1 - rank].tolist()]


@pytest.mark.parametrize(("num_tokens", "num_ranks"), [(8, 2), (16, 4), (12, 3), (4, 2)])
def test_context_shards_are_contiguous_or_a_chunk_from_each_end(num_tokens: int, num_ranks: int) -> None:
    for kind in ("ulysses", "allgather", "ring"):
        parallel, seen = ParallelConfig(cp=num_ranks, cp_kind=kind), []
        for rank in range(num_ranks):
            shard = sequence_shard(parallel, rank)
            own = [place for chunk in shard.slices(num_tokens) for place in range(chunk.start, chunk.stop)]
            by_hand = torch.arange(num_tokens).chunk(num_ranks)[rank].tolist()
            assert own == (by_hand if kind == "ulysses" else positions_by_hand(num_tokens, num_ranks, rank))
            seen += own
        assert sorted(seen) == list(range(num_tokens))


def test_context_shards_of_chunks_from_each_end_have_equal_causal_work() -> None:
    work = [sum(place + 1 for place in positions_by_hand(64, 4, rank)) for rank in range(4)]
    assert len(set(work)) == 1


def test_context_shard_without_ranks_is_the_whole_sequence() -> None:
    assert (
        SequenceShard().slices(7) == [slice(0, 7)] == sequence_shard(ParallelConfig(cp_kind="allgather"), 0).slices(7)
    )


def draw(*shape: int) -> Tensor:
    """The same on all ranks."""
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(len(shape)))


def exchange(num_kv_heads: int, dtype: torch.dtype) -> dict[str, Any]:
    """Own heads of all tokens, the way back, and the gradient of own tokens, beside what they must be."""
    rank, num_ranks = dist.get_rank(), dist.get_world_size()
    num_tokens = 3 * num_ranks
    whole = draw(BATCH, num_tokens, HEADS + 2 * num_kv_heads, HEAD_DIM).to(dtype)
    own = slice(3 * rank, 3 * rank + 3)
    widths = (HEADS * HEAD_DIM, num_kv_heads * HEAD_DIM, num_kv_heads * HEAD_DIM)
    x = whole[:, own].flatten(2).requires_grad_()
    out = TokensToHeads(widths, dist.group.WORLD, HEAD_DIM)(torch.nn.Identity(), (), x)
    heads = [rank * HEADS // num_ranks + head for head in range(HEADS // num_ranks)]
    kv_heads = sorted({head * num_kv_heads // HEADS for head in heads})
    columns = [*heads, *(HEADS + head for head in kv_heads), *(HEADS + num_kv_heads + head for head in kv_heads)]
    (back,) = HeadsToTokens(dist.group.WORLD)(torch.nn.Identity(), (out[..., : len(heads) * HEAD_DIM],))
    direction = draw(BATCH, num_tokens, num_ranks * len(columns), HEAD_DIM).to(dtype)  # of all ranks
    mine = direction[:, :, rank * len(columns) : (rank + 1) * len(columns)].flatten(2)
    (gradient,) = torch.autograd.grad(out, x, mine)
    expected = torch.zeros_like(whole, dtype=torch.float64)
    for other in range(num_ranks):
        theirs = [other * HEADS // num_ranks + head for head in range(HEADS // num_ranks)]
        kv = sorted({head * num_kv_heads // HEADS for head in theirs})
        places = [*theirs, *(HEADS + head for head in kv), *(HEADS + num_kv_heads + head for head in kv)]
        for place, head in enumerate(places):
            expected[:, :, head] += direction[:, :, other * len(columns) + place].double()
    return {
        "heads": torch.equal(out, whole[:, :, columns].flatten(2)),
        "back": torch.equal(back, whole[:, own, :HEADS].flatten(2)),
        "gradient": gradient.double().sub(expected[:, own].flatten(2)).abs().max().item(),
    }


@pytest.mark.parametrize(("num_ranks", "num_kv_heads"), [(2, 4), (4, 4), (4, 2), (4, 1)])
def test_context_exchange_takes_tokens_to_heads_and_back(ranks: Any, num_ranks: int, num_kv_heads: int) -> None:
    for dtype, tolerance in ((torch.float64, 1e-12), (torch.float32, 1e-5), (torch.bfloat16, 0.05)):
        for seen in ranks(num_ranks, exchange, num_kv_heads, dtype):
            assert seen["heads"] and seen["back"]
            assert seen["gradient"] < tolerance


def gather() -> dict[str, Any]:
    """Keys and values of whole sequences, and the gradients of own ones, beside what they must be."""
    rank, num_ranks = dist.get_rank(), dist.get_world_size()
    num_tokens = 4 * num_ranks
    own = positions_by_hand(num_tokens, num_ranks, rank)
    wholes = draw(BATCH, num_tokens, 2, HEAD_DIM), draw(BATCH, num_tokens, 5)
    parts = [whole[:, own].requires_grad_() for whole in wholes]
    gathered = GatherKeys(dist.group.WORLD)(*parts)
    directions = [draw(num_ranks, *whole.shape) for whole in wholes]
    gradients = torch.autograd.grad(gathered, parts, [direction[rank] for direction in directions])
    return {
        "whole": [torch.equal(out, whole) for out, whole in zip(gathered, wholes, strict=True)],
        "gradients": [
            torch.allclose(grad, direction.sum(0)[:, own], atol=1e-12)
            for grad, direction in zip(gradients, directions, strict=True)
        ],
    }


@pytest.mark.parametrize("num_ranks", [2, 4])
def test_context_gather_restores_the_order_of_the_sequence(ranks: Any, num_ranks: int) -> None:
    for seen in ranks(num_ranks, gather):
        assert seen["whole"] == seen["gradients"] == [True, True]


MASKS: dict[str, Callable[[int], SimpleNamespace]] = {
    "causal": lambda n: SimpleNamespace(window=n, ids=None),
    "window": lambda n: SimpleNamespace(window=3, ids=None),
    "documents": lambda n: SimpleNamespace(window=n, ids=(torch.arange(n) > 4).int()[None].repeat(2, 1)),
}


@pytest.mark.parametrize("name", MASKS)
def test_context_masks_of_own_queries_are_rows_of_the_whole_mask(name: str) -> None:
    num_tokens, kind = 16, MASKS[name](16)
    whole = dense_mask(MaskSpec(num_tokens, kind.window, kind.ids, torch.device("cpu")))
    for rank in range(4):
        own = torch.tensor(positions_by_hand(num_tokens, 4, rank))
        spec = MaskSpec(num_tokens, kind.window, kind.ids, torch.device("cpu"), own)
        assert not spec.is_causal_only
        assert torch.equal(dense_mask(spec), whole[:, :, own])
