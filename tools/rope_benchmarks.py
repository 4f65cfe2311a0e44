"""Heads from projections at full size, normed and rotated: 16,384 tokens in sequences of 4,096."""

import torch
from benchmark_case import Benchmark, Case, Ops
from torch import Tensor

from titan_moe.kernels.registry import Sample, load_all

KERNELS = load_all()
BATCH, LENGTH = 4, 4096


def half(device: torch.device, *sizes: int) -> Tensor:
    return torch.randn(sizes, device=device, dtype=torch.bfloat16)


def tables(device: torch.device, num_pairs: int) -> tuple[Tensor, Tensor]:
    frequencies_P = 100.0 ** (-torch.arange(num_pairs, device=device) / num_pairs)
    angles_NP = torch.arange(LENGTH, device=device)[:, None] * frequencies_P
    return 1.2 * angles_NP.cos(), 1.2 * angles_NP.sin()


def rotary(query_heads: int, key_heads: int, has_norm: bool) -> Case:
    """Queries and keys in and out; backward also reads them before the norm, and moves the values' gradient."""
    head_dim = 128
    queries_and_keys, values = (2.0 * BATCH * LENGTH * 128 * heads for heads in (query_heads + key_heads, key_heads))
    backward = (3 if has_norm else 2) * queries_and_keys + 2 * values

    def draw(device: torch.device) -> Sample:
        qkv_BNX = half(device, BATCH, LENGTH, (query_heads + 2 * key_heads) * head_dim)
        weights = [1 + half(device, head_dim) / 8 if has_norm else None for _ in range(2)]
        args = (qkv_BNX, *weights, *tables(device, head_dim // 2), key_heads, head_dim, 1e-6, False)
        return Sample("", args, 3 if has_norm else 1)

    return Case(draw, 0, 0, 2 * queries_and_keys, 2 * queries_and_keys + backward)


def latent_heads(heads: int) -> Case:
    """Of DeepSeek's widths: queries, keys without the shared part and values in, all three out; backward likewise."""
    nope_dim, rope_dim, v_dim = 128, 64, 128
    widths_in, widths_out = 2 * nope_dim + rope_dim + v_dim, 2 * (nope_dim + rope_dim) + v_dim
    moved = 2.0 * BATCH * LENGTH * heads * (widths_in + widths_out)

    def draw(device: torch.device) -> Sample:
        widths = (heads * (nope_dim + rope_dim),), (heads * (nope_dim + v_dim),), (1, rope_dim)
        leaves = [half(device, BATCH, LENGTH, *width) for width in widths]
        return Sample("", (*leaves, *tables(device, rope_dim // 2), nope_dim, v_dim, True), 3)

    return Case(draw, 0, 0, moved, 2 * moved)


def ops(kernel: str) -> Ops:
    """The operation of the registry, and its reference."""
    of = KERNELS[kernel]
    return {"titan_moe": of.op, "torch": of.reference, "torch, compiled": torch.compile(of.reference, fullgraph=True)}


ROPE_BENCHMARKS = {
    "norm_and_rotate": Benchmark(
        {"qwen3": rotary(32, 4, True), "mixtral": rotary(32, 8, False)}, ops("norm_and_rotate")
    ),
    "latent_heads": Benchmark(
        {"deepseek_v2_lite": latent_heads(16), "deepseek_v3": latent_heads(128)}, ops("latent_heads")
    ),
}
