"""Low-rank factors beside routed experts at full size, with a rank of 16: a microbatch of 8,192 tokens."""

from collections.abc import Callable

import torch
from benchmark_case import Benchmark, Case
from random_routing import draw_plan
from torch import Tensor

from titan_moe.kernels.experts.adapted_mlp import adapted_mlp
from titan_moe.kernels.experts.composite_mlp import CompositeMLP, ExpertMLP
from titan_moe.kernels.experts.fused_mlp import fused_expert_mlp
from titan_moe.kernels.experts.grouped_mm import grouped_mm
from titan_moe.kernels.experts.slots import ExpertSlots
from titan_moe.kernels.experts.weights import ExpertWeights
from titan_moe.kernels.permute.rows import place_scores
from titan_moe.kernels.registry import Sample

ROWS, EXPERTS, CHOICES, WIDTH, HIDDEN, RANK, SCALE = 8192, 128, 8, 2048, 768, 16, 2.0
SLOTS = ROWS * CHOICES


def half(device: torch.device, *sizes: int) -> Tensor:
    return torch.randn(sizes, device=device, dtype=torch.bfloat16)


def experts_with_factors() -> Case:
    """Gradients are of rows, scores and factors. The least bytes are those of rows, weights and factors."""
    weights, factors = 3 * EXPERTS * WIDTH * HIDDEN, 3 * EXPERTS * RANK * (WIDTH + HIDDEN)
    base, low = 6.0 * SLOTS * WIDTH * HIDDEN, 6.0 * SLOTS * RANK * (WIDTH + HIDDEN)
    moved = 2.0 * (2 * ROWS * WIDTH + weights + factors)

    def draw(device: torch.device) -> Sample:
        plan = draw_plan(ROWS, EXPERTS, CHOICES, device)
        sizes = (2, RANK, WIDTH), (2, HIDDEN, RANK), (RANK, HIDDEN), (WIDTH, RANK)
        drawn = [half(device, EXPERTS, *size) / 32 for size in sizes]
        frozen = half(device, EXPERTS, 2, HIDDEN, WIDTH) / WIDTH**0.5, half(device, EXPERTS, WIDTH, HIDDEN) / 32
        scores_SK = torch.rand(plan[1].shape, device=device)
        return Sample("", (half(device, ROWS, WIDTH), scores_SK, *drawn, *frozen, *plan), 6)

    return Case(draw, base + low, 2 * base + 3 * low, moved, 2 * moved + 4.0 * factors)


def with_factors(expert_mlp: ExpertMLP) -> Callable[..., Tensor]:
    """The MLP of loose tensors."""
    mlp = adapted_mlp(expert_mlp, SCALE)

    def op(x_SD: Tensor, scores_SK: Tensor, *tensors: Tensor) -> Tensor:
        *factors, gate_up, down, rows_R, slots_SK, offsets_e = tensors
        slots = ExpertSlots(rows_R, slots_SK, place_scores(scores_SK, slots_SK, rows_R.numel()), offsets_e)
        return mlp(x_SD, slots, ExpertWeights.of([gate_up, down])._replace(factors=tuple(factors)))

    return op


def without_factors(x_SD: Tensor, scores_SK: Tensor, *tensors: Tensor) -> Tensor:
    """The frozen MLP alone: of its gradients with factors there are zeros."""
    *factors, gate_up, down, rows_R, slots_SK, offsets_e = tensors
    scores_SK = scores_SK + 0 * sum(factor.flatten()[0] for factor in factors)  # all have gradients
    slots = ExpertSlots(rows_R, slots_SK, place_scores(scores_SK, slots_SK, rows_R.numel()), offsets_e)
    return fused_expert_mlp(x_SD, slots, ExpertWeights.of([gate_up, down]))


ADAPTER_BENCHMARKS = {
    "adapted_expert_mlp": Benchmark(
        {"qwen3": experts_with_factors()},
        {
            "titan_moe": with_factors(fused_expert_mlp),
            "grouped_mm, compiled": torch.compile(with_factors(CompositeMLP(grouped_mm)), fullgraph=True),
            "without factors": without_factors,
        },
    ),
}
