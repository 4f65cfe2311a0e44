"""Routed experts with low-rank factors: the MLP of merged weights, and gradients of factors alone."""

import pytest
import torch
from support.kernel_samples import sample_plans
from torch import Tensor

from titan_moe.kernels.experts.adapted_mlp import adapted_mlp
from titan_moe.kernels.experts.composite_mlp import CompositeMLP
from titan_moe.kernels.experts.grouped_mm import GROUPED_GEMM, grouped_mm_reference
from titan_moe.kernels.experts.slots import ExpertSlots
from titan_moe.kernels.experts.weights import ExpertWeights

D, F, RANK, SCALE = 20, 12, 4, 1.5


@pytest.mark.parametrize("kind", ["grouped_mm", "reference"])
@pytest.mark.parametrize("plan", ["random", "empty_expert"])
def test_factors_are_added_to_weights(kind: str, plan: str) -> None:
    torch.manual_seed(0)
    plans = {each[0]: each[1:] for each in sample_plans(torch.device("cpu"))}
    rows_R, slots_SK, offsets_e, num_experts = plans[plan]
    slots = ExpertSlots(rows_R, slots_SK, torch.rand(rows_R.numel()), offsets_e)
    frozen = [torch.randn(num_experts, 2, F, D) / D**0.5, torch.randn(num_experts, D, F) / F**0.5]
    shapes = ((2, RANK, D), (2, F, RANK), (RANK, F), (D, RANK))
    factors = [torch.randn(num_experts, *shape).div(4).requires_grad_() for shape in shapes]
    x_SD = torch.randn(len(slots_SK), D, requires_grad=True)
    saved: list[Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda x: saved.append(x) or x, lambda x: x):
        weights = ExpertWeights.of(frozen)._replace(factors=tuple(factors))
        y_SD = adapted_mlp(CompositeMLP(GROUPED_GEMM[kind]), SCALE)(x_SD, slots, weights)
    num_rows = sum(x.shape == (len(rows_R), D) and x.data_ptr() != x_SD.data_ptr() for x in saved)
    assert num_rows <= 1, "rows of slots are kept for the factor that reads them alone"
    a_up, b_up, a_down, b_down = factors
    merged = [frozen[0] + SCALE * (b_up @ a_up), frozen[1] + SCALE * (b_down @ a_down)]
    expected = CompositeMLP(grouped_mm_reference)(x_SD, slots, ExpertWeights.of(merged))
    torch.testing.assert_close(y_SD, expected, rtol=1e-4, atol=1e-5)
    both = (torch.autograd.grad(y.sin().sum(), [x_SD, *factors]) for y in (y_SD, expected))
    for mine, right in zip(*both, strict=True):
        torch.testing.assert_close(mine, right, rtol=1e-4, atol=1e-4)
