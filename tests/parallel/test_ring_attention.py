"""Ring attention on several ranks, against PyTorch's attention to whole sequences on one."""

from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from titan_moe.config.context import SequenceShard, ring_backend
from titan_moe.layers.attention import Context
from titan_moe.parallel.attention_block import AttendedBlock, attend_to_block, block_gradients, merge
from titan_moe.parallel.ring_attention import RingAttention

BATCH, TOKENS, HEADS, WIDTH, SCALE = 2, 24, 6, 5, 0.3
WITH_SINKS = 2
"""So many key/value heads have cases with sinks."""


def draw(num_heads: int, seed: int, dtype: torch.dtype) -> Tensor:
    """The same on all ranks: [B, N, heads, D]."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(BATCH, TOKENS, num_heads, WIDTH, dtype=torch.float64, generator=generator).to(dtype)


def sinks_of(dtype: torch.dtype) -> Tensor:
    """A logit of each head, also far from the log-sum-exp of its scores."""
    return torch.tensor([-9.0, 0.0, 1.0, 2.0, 3.0, 9.0], dtype=dtype).requires_grad_()


def whole_attention(num_kv_heads: int, dtype: torch.dtype) -> tuple[Tensor, ...]:
    """Result and gradients of queries, keys, values and sinks of whole sequences, from scores in plain PyTorch."""
    inputs = [draw(heads, seed, dtype) for seed, heads in enumerate((HEADS, num_kv_heads, num_kv_heads))]
    q, k, v = (x.double().requires_grad_() for x in inputs)
    k_BNHD, v_BNHD = (x.repeat_interleave(HEADS // num_kv_heads, dim=2) for x in (k, v))
    scores = torch.einsum("bqhd,bkhd->bhqk", q, k_BNHD) * SCALE
    hidden = torch.ones(TOKENS, TOKENS, dtype=torch.bool).triu(1)
    sinks_H, scores = sinks_of(torch.float64), scores.masked_fill(hidden, float("-inf"))
    if num_kv_heads == WITH_SINKS:
        scores = torch.cat([scores, sinks_H[:, None, None].expand(*scores.shape[:3], 1)], dim=-1)
    out = torch.einsum("bhqk,bkhd->bqhd", scores.softmax(-1)[..., :TOKENS], v_BNHD)
    leaves = (q, k, v, sinks_H)[: 4 if num_kv_heads == WITH_SINKS else 3]
    return out, *torch.autograd.grad(out, leaves, draw(HEADS, 3, dtype).double())


def attend_on_ranks(num_kv_heads: int, dtype: torch.dtype, is_compiled: bool) -> dict[str, Any]:
    """The largest difference of own tokens, and what the operation returns."""
    rank, num_ranks = dist.get_rank(), dist.get_world_size()
    own = [
        place
        for chunk in SequenceShard(rank, num_ranks, is_head_and_tail=True).slices(TOKENS)
        for place in range(chunk.start, chunk.stop)
    ]
    # keys and values are parts of one projection, as in a layer
    fused = torch.cat([draw(heads, s, dtype) for s, heads in enumerate((HEADS, num_kv_heads, num_kv_heads))], dim=2)
    q, k, v = fused[:, own].split([HEADS, num_kv_heads, num_kv_heads], dim=2)
    q, k, v = (x.detach().requires_grad_() for x in (q, k, v))
    attend: Any = RingAttention(dist.group.WORLD, "cpu")
    if is_compiled:
        torch._dynamo.reset()
        attend = torch.compile(attend.__call__, fullgraph=True, backend="aot_eager")
    sinks = (sinks_of(dtype),) if num_kv_heads == WITH_SINKS else ()
    out = attend(q, k, v, Context(torch.empty(0), torch.empty(0), None), SCALE, *sinks)
    grads = list(torch.autograd.grad(out, (q, k, v, *sinks), draw(HEADS, 3, dtype)[:, own]))
    expected = list(whole_attention(num_kv_heads, dtype))
    expected[:4] = [x[:, own] for x in expected[:4]]
    for gradient in grads[3:]:  # each rank has the part of its tokens
        dist.all_reduce(gradient)
    return {
        "errors": [(x.double() - y).abs().max().item() for x, y in zip((out, *grads), expected, strict=True)],
        "dtypes": {str(x.dtype) for x in (out, *grads)},
    }


@pytest.mark.parametrize("num_ranks", [1, 2, 3, 4])
@pytest.mark.parametrize("num_kv_heads", [6, 2, 1])
def test_ring_attention_of_own_tokens_is_that_of_whole_sequences(ranks, num_ranks: int, num_kv_heads: int) -> None:
    for found in ranks(num_ranks, attend_on_ranks, num_kv_heads, torch.float64, False):
        assert max(found["errors"]) < 1e-13
        assert found["dtypes"] == {"torch.float64"}


def test_ring_attention_is_opaque_to_the_compiler(ranks) -> None:
    for found in ranks(2, attend_on_ranks, 2, torch.float64, True):
        assert max(found["errors"]) < 1e-13


def test_ring_attention_merges_in_fp32(ranks) -> None:
    """Results of blocks are rounded to bf16, and so are the inputs of the reference; sums of them are not."""
    for found in ranks(4, attend_on_ranks, 2, torch.bfloat16, False):
        assert max(found["errors"]) < 0.03
        assert found["dtypes"] == {"torch.bfloat16"}


def test_merged_blocks_are_attention_to_all_their_keys() -> None:
    """Also where one block outweighs the other by more than fp32 can hold as a factor."""
    q, k, v = (draw(2, seed, torch.float32) for seed in range(3))
    k = torch.cat([k[:, :10], 40 * k[:, 10:]], dim=1)
    first, second = (attend_to_block(q, k[:, part], v[:, part], "cpu", 1.0, is_causal=False) for part in PARTS)
    total = AttendedBlock(first.out_BnHD.clone(), first.lse_BHn.clone())
    merge(total, second)
    expected = F.scaled_dot_product_attention(*(x.transpose(1, 2).double() for x in (q, k, v)), scale=1.0)
    torch.testing.assert_close(total.out_BnHD.double(), expected.transpose(1, 2), rtol=1e-4, atol=1e-4)
    scores = torch.einsum("bqhd,bkhd->bhqk", q.double(), k.double())
    torch.testing.assert_close(total.lse_BHn.double(), scores.logsumexp(-1), rtol=1e-5, atol=1e-5)


PARTS = slice(10), slice(10, None)


@pytest.mark.parametrize("backend", ["cudnn", "flash"])
def test_operations_of_gpus_take_the_arguments_of_a_block(backend: str) -> None:
    """Their shapes alone: fewer keys than queries, fewer key/value heads."""
    q, k = (torch.empty(2, *size, 64, device="meta", dtype=torch.bfloat16) for size in ((64, 8), (32, 2)))
    block = attend_to_block(q, k, k, backend, SCALE, is_causal=False)
    assert block.out_BnHD.shape == q.shape and block.lse_BHn.shape == (2, 8, 64)
    assert block.lse_BHn.dtype == torch.float32
    grads = block_gradients(torch.empty_like(q), q, k, k, block, backend, SCALE, is_causal=False)
    assert [grad.shape for grad in grads] == [q.shape, k.shape, k.shape]


@pytest.mark.parametrize(
    ("attention", "device", "head_dim", "is_deterministic", "expected"),
    [
        ("auto", "cpu", 64, False, "cpu"),
        ("flash", "cpu", 64, True, "cpu"),
        ("auto", "cuda", 128, False, "cudnn"),
        ("auto", "cuda", 64, True, "flash"),
        ("auto", "cuda", 256, False, "flash"),
        ("flash", "cuda", 64, False, "flash"),
        ("cudnn", "cuda", 64, False, "cudnn"),
        ("cudnn", "cuda", 256, False, "cudnn"),
        ("flex", "cuda", 64, False, "cudnn"),
        ("flex", "cuda", 64, True, "flash"),
    ],
)
def test_ring_attention_takes_the_kernels_of_the_recipe(
    attention: str, device: str, head_dim: int, is_deterministic: bool, expected: str
) -> None:
    assert ring_backend(attention, device, head_dim=head_dim, is_deterministic=is_deterministic) == expected
