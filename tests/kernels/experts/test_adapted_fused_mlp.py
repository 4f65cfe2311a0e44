"""Fused experts of frozen weights with low-rank factors, held against weights to which the factors are added."""

from collections import Counter
from typing import Any

import pytest
import torch
from support.kernel_samples import sample_plans
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from titan_moe.config.swiglu import PLAIN_SWIGLU, SwiGLU
from titan_moe.kernels.experts.adapted_fused_mlp import AdaptedFusedMLP
from titan_moe.kernels.experts.adapted_mlp import AdaptedMLP, adapted_mlp
from titan_moe.kernels.experts.composite_mlp import CompositeMLP
from titan_moe.kernels.experts.fused_mlp import biased_expert_mlp, fused_expert_mlp, with_activation
from titan_moe.kernels.experts.grouped_mm import grouped_mm_reference
from titan_moe.kernels.experts.slots import ExpertSlots
from titan_moe.kernels.experts.weights import ExpertWeights
from titan_moe.kernels.formats.stored import CODES, numbers_in_triton, numbers_reference, scales_shape, store

D, F, RANK, SCALE = 36, 20, 4, 1.5
PLANS = [plan[0] for plan in sample_plans(torch.device("cpu"))]


class Operations(TorchDispatchMode):
    """Counts the operations of this package."""

    def __init__(self) -> None:
        super().__init__()
        self.of: Counter[str] = Counter()

    def __torch_dispatch__(self, op: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        if op.namespace == "titan_moe":
            self.of[op._opname] += 1
        return op(*args, **(kwargs or {}))


def draw(plan: str, base: Any, rank: int = RANK) -> tuple[list[Tensor], ExpertSlots, ExpertWeights, list[Tensor]]:
    """Rows and scores; slots; frozen weights with factors; and the matrices that these are."""
    torch.manual_seed(0)
    rows_R, slots_SK, offsets_e, number = {plan[0]: plan[1:] for plan in sample_plans(torch.device("cpu"))}[plan]
    x_SD = torch.randn(len(slots_SK), D, requires_grad=True)
    slots = ExpertSlots(rows_R, slots_SK, torch.rand(rows_R.numel(), requires_grad=True), offsets_e)
    matrices = [torch.randn(number, 2, F, D) / D**0.5, torch.randn(number, D, F) / F**0.5]
    sizes = (2, rank, D), (2, F, rank), (rank, F), (D, rank)
    factors = tuple(torch.randn(number, *size).div(2 * rank**0.5).requires_grad_() for size in sizes)
    weights = ExpertWeights.of(matrices)
    if base != "compute":
        codes = [torch.empty_like(matrix, dtype=CODES) for matrix in matrices]
        scales = [torch.empty(scales_shape(matrix.shape, base)) for matrix in matrices]
        for stored in zip(matrices, codes, scales, strict=True):
            store(*stored)
        weights = ExpertWeights.of(codes)._replace(scales=tuple(scales))
        matrices = [numbers_reference(*stored, torch.float32) for stored in zip(codes, scales, strict=True)]
    return [x_SD, slots.scores_R], slots, weights._replace(factors=factors), matrices


def merged(matrices: list[Tensor], factors: tuple[Tensor, ...]) -> ExpertWeights:
    pairs = zip(factors[::2], factors[1::2], matrices, strict=True)
    return ExpertWeights.of([weight + SCALE * (b @ a) for a, b, weight in pairs])


@pytest.mark.interpreted
@pytest.mark.parametrize("plan", PLANS)
def test_fused_experts_are_those_of_merged_weights(plan: str) -> None:
    """Values and all gradients; of a step two operations of this package are launched, whatever the load."""
    check(plan, "compute", PLAIN_SWIGLU)


@pytest.mark.interpreted
@pytest.mark.parametrize("rank", [5, 48])
def test_ranks_that_are_no_powers_of_two(rank: int) -> None:
    """Of gate and up together more than one block of columns, which one of gate begins and one of up ends."""
    check("random", "compute", PLAIN_SWIGLU, rank=rank)


@pytest.mark.interpreted
@pytest.mark.parametrize("base", ["fp8_rowwise", "fp8_blockwise"])
def test_codes_are_their_numbers(base: str) -> None:
    check("random", base, SwiGLU(2.0, 1.7, 1.0))


@pytest.mark.parametrize("base", ["compute", "fp8_rowwise", "fp8_blockwise"])
def test_composed_experts_are_those_of_merged_weights(base: str) -> None:
    check("random", base, PLAIN_SWIGLU, CompositeMLP(grouped_mm_reference))


def check(plan: str, base: str, activation: SwiGLU, mlp: Any = None, rank: int = RANK) -> None:
    inputs, slots, weights, matrices = draw(plan, base, rank)
    mlp = adapted_mlp(mlp or with_activation(fused_expert_mlp, activation), SCALE)
    with Operations() as operations:
        y_SD = mlp(inputs[0], slots, weights)
        grads = torch.autograd.grad(y_SD.sin().sum(), [*inputs, *weights.factors])
    if isinstance(mlp, AdaptedFusedMLP):
        assert operations.of == {"adapted_mlp": 1, "adapted_mlp_backward": 1}
    exact = CompositeMLP(grouped_mm_reference, activation=activation)(
        inputs[0], slots, merged(matrices, weights.factors)
    )
    expected = torch.autograd.grad(exact.sin().sum(), [*inputs, *weights.factors])
    num_slots = int(slots.offsets_e[-1])
    for index, (mine, right) in enumerate(zip((y_SD, *grads), (exact, *expected), strict=True)):
        of_slots = slice(num_slots) if index == 2 else slice(None)
        assert (mine[of_slots] - right[of_slots]).norm() <= 1e-5 * right[of_slots].norm() + 1e-7, index


@pytest.mark.interpreted
def test_without_factors_codes_alone_are_read() -> None:
    inputs, slots, weights, matrices = draw("random", "fp8_rowwise")
    y_SD = adapted_mlp(fused_expert_mlp)(inputs[0], slots, weights._replace(factors=()))
    exact = CompositeMLP(grouped_mm_reference)(inputs[0], slots, ExpertWeights.of(matrices))
    assert torch.allclose(y_SD, exact, atol=1e-5)
    mine, right = (torch.autograd.grad(y.sin().sum(), inputs[0])[0] for y in (y_SD, exact))
    assert torch.allclose(mine, right, atol=1e-5)


@pytest.mark.few()
@pytest.mark.interpreted
@pytest.mark.parametrize("base", ["compute", "fp8_rowwise"])
def test_both_operations_compile_into_one_graph(base: str) -> None:
    inputs, slots, weights, _ = draw("random", base)
    mlp = adapted_mlp(fused_expert_mlp, SCALE)

    def run(function: Any) -> list[Tensor]:
        y_SD = function(inputs[0], slots, weights)
        return [y_SD, *torch.autograd.grad(y_SD.sin().sum(), [inputs[0], *weights.factors])]

    compiled = torch.compile(mlp, backend="aot_eager", fullgraph=True)
    assert all(mine.equal(right) for mine, right in zip(run(compiled), run(mlp), strict=True))


@pytest.mark.interpreted
@pytest.mark.parametrize("base", ["fp8_rowwise", "fp8_blockwise"])
def test_numbers_in_triton_are_those_of_the_definition(base: Any) -> None:
    """Of several matrices whose widths are no multiples of a block."""
    weight = torch.randn(2, 2, 150, 300) * torch.logspace(-4, 4, 150)[:, None]
    codes, scales = torch.empty_like(weight, dtype=CODES), torch.empty(scales_shape(weight.shape, base))
    store(weight, codes, scales)
    assert numbers_in_triton(codes, scales, torch.float32).equal(numbers_reference(codes, scales, torch.float32))
    again, same = torch.empty_like(codes), torch.empty_like(scales)
    store(numbers_reference(codes, scales, torch.float32), again, same)
    assert numbers_reference(again, same, torch.float32).equal(numbers_reference(codes, scales, torch.float32))


def test_which_experts_may_be_frozen() -> None:
    fused = adapted_mlp(fused_expert_mlp, 2.0)
    assert isinstance(fused, AdaptedFusedMLP) and adapted_mlp(fused, 3.0) == AdaptedFusedMLP(fused.format, 3.0)
    composed = adapted_mlp(CompositeMLP(grouped_mm_reference), 2.0)
    assert isinstance(composed, AdaptedMLP) and composed.scale == 2.0
    with pytest.raises(TypeError, match="without biases"):
        adapted_mlp(biased_expert_mlp)
