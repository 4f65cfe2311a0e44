"""Experts with frozen weights: no weight gradient of theirs is launched, with low-rank factors beside them or without.

The factors are here alone: an MLP is all that a layer with adapters needs.
"""

from collections import Counter
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from support.kernel_samples import sample_plans
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from titan_moe.kernels.experts.composite_mlp import CompositeMLP
from titan_moe.kernels.experts.format import ExpertFormat
from titan_moe.kernels.experts.fp8.format import FP8_ROWWISE
from titan_moe.kernels.experts.fused_mlp import FusedMLP
from titan_moe.kernels.experts.grouped_mm import grouped_mm, grouped_mm_reference
from titan_moe.kernels.experts.plain import PLAIN
from titan_moe.kernels.experts.slots import ExpertSlots
from titan_moe.kernels.experts.weights import ExpertWeights

D, F, RANK = 32, 16, 4


@dataclass
class AdaptedMLP:
    """The MLP with low-rank factors of gate_up and down, applied to rows: [e, rank, I] and [e, O, rank]."""

    factors: list[tuple[Tensor, Tensor]]

    def __call__(self, x_SD: Tensor, slots: ExpertSlots, weights: ExpertWeights) -> Tensor:
        factors = iter(self.factors)

        def gemm(x_RI: Tensor, own_eOI: Tensor, clones_cOI: Tensor | None, offsets_e: Tensor) -> Tensor:
            into, out = next(factors)
            low = grouped_mm(x_RI, into, None, offsets_e)
            return grouped_mm(x_RI, own_eOI, clones_cOI, offsets_e) + grouped_mm(low, out, None, offsets_e)

        return CompositeMLP(gemm)(x_SD, slots, weights)


class Operations(TorchDispatchMode):
    """Counts the operations of this package."""

    def __init__(self) -> None:
        super().__init__()
        self.of: Counter[str] = Counter()

    def __torch_dispatch__(self, op: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        if op.namespace == "titan_moe":
            self.of[op._opname] += 1
        return op(*args, **(kwargs or {}))


def draw() -> tuple[Tensor, ExpertSlots, list[Tensor]]:
    torch.manual_seed(0)
    rows_R, slots_SK, offsets_e, num_experts = {plan[0]: plan[1:] for plan in sample_plans(torch.device("cpu"))}[
        "random"
    ]
    slots = ExpertSlots(rows_R, slots_SK, torch.rand(rows_R.numel()), offsets_e)
    weights = [torch.randn(num_experts, 2, F, D) / D**0.5, torch.randn(num_experts, D, F) / F**0.5]
    return torch.randn(len(slots_SK), D, requires_grad=True), slots, weights


def test_adapters_train_beside_frozen_weights() -> None:
    x_SD, slots, (gate_up, down) = draw()
    num_experts = len(down)
    factors = [
        tuple(torch.randn(num_experts, *shape).div(8).requires_grad_() for shape in ((RANK, into), (out, RANK)))
        for into, out in ((D, 2 * F), (F, D))
    ]
    with Operations() as operations:
        y_SD = AdaptedMLP(factors)(x_SD, slots, ExpertWeights.of([gate_up, down]))
        y_SD.sin().sum().backward()
    assert operations.of["grouped_mm"] == 12 and operations.of["grouped_mm_dw"] == 4, "those of the factors"
    merged = [(out @ into).detach() for into, out in factors]
    sums = [gate_up + merged[0].unflatten(1, (2, F)), down + merged[1]]
    expected = CompositeMLP(grouped_mm_reference)(x_SD, slots, ExpertWeights.of(sums))
    torch.testing.assert_close(y_SD, expected, rtol=1e-4, atol=1e-5)
    assert all(factor.grad is not None for pair in factors for factor in pair) and x_SD.grad is not None


@pytest.mark.interpreted
@pytest.mark.parametrize("format", [PLAIN, FP8_ROWWISE], ids=["compute", "codes"])
def test_frozen_experts_in_triton_compute_no_weight_gradients(format: ExpertFormat) -> None:
    """Also where codes alone stand for weights."""
    x_SD, slots, (gate_up, down) = draw()
    weights = ExpertWeights.of([gate_up, down])._replace(codes=tuple(format.quantize(gate_up, down, False)))
    with Operations() as operations:
        FusedMLP(format)(x_SD, slots, weights).sum().backward()
    assert operations.of == {"expert_mlp": 1, "expert_mlp_dx": 1} and x_SD.grad is not None
