"""Experts with frozen weights: no weight gradient of theirs is launched, with low-rank factors beside them or without.

The adapter is here alone: a transform that adds its factors, and an MLP that applies them to rows.
"""

from collections import Counter
from typing import Any

import pytest
import torch
from support.kernel_samples import sample_plans
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from titan_moe.dispatch.base import Routed
from titan_moe.kernels.experts.composite_mlp import CompositeMLP
from titan_moe.kernels.experts.format import ExpertFormat
from titan_moe.kernels.experts.fp8.format import FP8_ROWWISE
from titan_moe.kernels.experts.fp8.passes import times_weight
from titan_moe.kernels.experts.fp8.rows import quantize_apart
from titan_moe.kernels.experts.fused_mlp import FusedMLP
from titan_moe.kernels.experts.grouped_mm import grouped_mm, grouped_mm_reference
from titan_moe.kernels.experts.plain import PLAIN
from titan_moe.kernels.experts.slots import ExpertSlots
from titan_moe.kernels.experts.tiles import plan_tiles
from titan_moe.kernels.experts.weights import ExpertUse, ExpertWeights
from titan_moe.layers.experts import GroupedExperts

D, F, RANK = 32, 16, 4


class TimesCodes(torch.autograd.Function):
    """A frozen weight in fp8 times slots, by Triton's kernels; the gradient of slots by its transposed codes."""

    @staticmethod
    def forward(ctx: Any, x_RI: Tensor, offsets_e: Tensor, *codes: Tensor) -> Tensor:
        ctx.save_for_backward(offsets_e, *codes[2:])
        return times_weight(quantize_apart(x_RI), codes[:2], plan_tiles(offsets_e, len(x_RI), 128))

    @staticmethod
    def backward(ctx: Any, dy_RO: Tensor) -> tuple[Tensor | None, ...]:
        offsets_e, *codes = ctx.saved_tensors
        dy = quantize_apart(dy_RO.contiguous())
        return times_weight(dy, codes, plan_tiles(offsets_e, len(dy_RO), 128)), *(None,) * 5


def adapted_mlp(x_SD: Tensor, slots: ExpertSlots, weights: ExpertWeights) -> Tensor:
    """The MLP of frozen weights, or of their codes, with factors of gate_up and down: [e, rank, I] and [e, O, rank]."""
    factors, stored, transposed = iter(weights.factors), iter(weights.codes[:4]), iter(weights.codes[4:])

    def gemm(x_RI: Tensor, own_eOI: Tensor, clones_cOI: Tensor | None, offsets_e: Tensor) -> Tensor:
        low = grouped_mm(grouped_mm(x_RI, next(factors), None, offsets_e), next(factors), None, offsets_e)
        if not weights.codes:
            return low + grouped_mm(x_RI, own_eOI, clones_cOI, offsets_e)
        return low + TimesCodes.apply(x_RI, offsets_e, *(next(way) for way in (stored, stored, transposed, transposed)))

    return CompositeMLP(gemm)(x_SD, slots, weights)


class Adapters(nn.ParameterList):
    """Low-rank factors beside the weights of a layer's experts, which are frozen, and codes where they are rounded."""

    def __init__(self, experts: GroupedExperts, format: ExpertFormat) -> None:
        matrices = [experts.gate_up.requires_grad_(False), experts.down.requires_grad_(False)]
        sizes = [size for matrix in matrices for size in ((RANK, matrix.shape[-1]), (matrix[0, ..., 0].numel(), RANK))]
        super().__init__(nn.Parameter(torch.randn(len(experts.down), *size) / 8) for size in sizes)
        self.codes = tuple(format.quantize(*matrices, False))
        experts.adapters, experts.mlp = self, adapted_mlp
        experts.transforms["adapters"] = self.add

    def add(self, use: ExpertUse) -> ExpertUse:
        return use._replace(weights=use.weights._replace(codes=self.codes, factors=tuple(self)))


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


@pytest.mark.parametrize(
    ("format", "tolerance"),
    [
        pytest.param(PLAIN, 1e-4, id="compute"),
        pytest.param(FP8_ROWWISE, 0.12, id="codes", marks=pytest.mark.interpreted),
    ],
)
def test_adapters_train_beside_frozen_weights(format: ExpertFormat, tolerance: float) -> None:
    x_SD, slots, matrices = draw()
    experts = GroupedExperts(len(matrices[1]), D, F)
    experts.load_state_dict(dict(zip(("gate_up", "down"), matrices, strict=True)))
    factors = [*Adapters(experts, format)]
    with Operations() as operations:
        y_SD = experts(Routed(x_SD, *slots, exchange=None))
        grads = torch.autograd.grad(y_SD.sin().sum(), [x_SD, *factors])
    of_base = 0 if format.is_rounded else 4
    assert operations.of["grouped_mm"] == 8 + of_base and operations.of["grouped_mm_dw"] == 4, "those of the factors"
    assert not any("dw" in name and name != "grouped_mm_dw" for name in operations.of)
    merged = [(out @ into).view_as(w) + w for into, out, w in zip(factors[::2], factors[1::2], matrices, strict=True)]
    exact = CompositeMLP(grouped_mm_reference)(x_SD, slots, ExpertWeights.of(merged))
    expected = torch.autograd.grad(exact.sin().sum(), [x_SD, *factors])
    for mine, right in zip((y_SD, *grads), (exact, *expected), strict=True):
        assert (mine - right).norm() < tolerance * right.norm()


@pytest.mark.interpreted
@pytest.mark.parametrize("format", [PLAIN, FP8_ROWWISE], ids=["compute", "codes"])
def test_frozen_experts_in_triton_compute_no_weight_gradients(format: ExpertFormat) -> None:
    """Also where codes alone stand for weights."""
    x_SD, slots, (gate_up, down) = draw()
    weights = ExpertWeights.of([gate_up, down])._replace(codes=tuple(format.quantize(gate_up, down, False)))
    with Operations() as operations:
        FusedMLP(format)(x_SD, slots, weights).sum().backward()
    assert operations.of == {"expert_mlp": 1, "expert_mlp_dx": 1} and x_SD.grad is not None
