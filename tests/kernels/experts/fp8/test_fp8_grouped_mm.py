"""The grouped GEMM in fp8: products are those of the emulation, weight gradients near those of fp64; with it an MLP has
biases, scores on the input, and clones."""

from typing import Any

import pytest
import torch
from support import load
from torch import Tensor

from titan_moe.kernels.experts.composite_mlp import CompositeMLP
from titan_moe.kernels.experts.fp8.format import FORMATS, Fp8Format
from titan_moe.kernels.experts.grouped_mm import GROUPED_GEMM, grouped_mm_reference
from titan_moe.kernels.experts.slots import ExpertSlots
from titan_moe.kernels.experts.weights import ExpertWeights
from titan_moe.kernels.formats.grouped import emulated_grouped_mm

mlps = load("kernels/experts/fp8/test_fp8_mlp")
D, F, OWN = 128, 256, 2
NAMES = ("gate_up", "down", "gate_up_bias", "down_bias")
FLOOR_OF_MLP_DB = 19.0
"""Three products one after the other."""


def draw(name: str, device: str, dtype: torch.dtype) -> tuple[ExpertSlots, list[Tensor]]:
    """Slots, and leaves: x, scores, matrices and biases."""
    case = mlps.draw(name, device, dtype, D, F)
    matrices = [case.weights.gate_up.own, case.weights.down.own]
    biases = [torch.randn(matrix.shape[:-1], device=device, dtype=dtype) for matrix in matrices]
    leaves = [case.x_SD, case.slots.scores_R, *matrices, *biases]
    return case.slots, [leaf.clone().requires_grad_() for leaf in leaves]


def product(gemm: Any, inputs: list[Tensor], dy_RO: Tensor, offsets_e: Tensor) -> list[Tensor]:
    """Of slots with an expert: the product, and gradients of slots, own weights and clones."""
    leaves = [tensor.detach().requires_grad_() for tensor in inputs]
    y_RO = gemm(*leaves, offsets_e)
    grads = torch.autograd.grad(y_RO, leaves, dy_RO.to(y_RO.dtype))
    return [y_RO[: offsets_e[-1]].detach(), grads[0][: offsets_e[-1]], *grads[1:]]


@pytest.mark.parametrize(("device", "dtype"), mlps.DEVICES)
@pytest.mark.parametrize("format", FORMATS, ids=lambda format: format.name)
def test_products_are_those_of_the_emulation(format: Fp8Format, device: str, dtype: torch.dtype) -> None:
    for name in ("skewed", "empty_expert", "padded"):
        slots, (_, _, _, down, *_) = draw(name, device, dtype)
        x_RF = torch.randn(slots.rows_R.numel(), F, device=device, dtype=dtype)
        inputs, dy_RD = [x_RF, down[:OWN], down[OWN:]], torch.randn(len(x_RF), D, device=device, dtype=dtype)
        dy_RD[int(slots.offsets_e[-1]) :] = float("nan")
        ours = product(GROUPED_GEMM[format.name], inputs, dy_RD, slots.offsets_e)
        emulated = product(emulated_grouped_mm(format.gemms, True), inputs, dy_RD, slots.offsets_e)
        exact = product(
            grouped_mm_reference, [x.double() for x in inputs], dy_RD.nan_to_num().double(), slots.offsets_e
        )
        for mine, theirs in zip(ours[:2], emulated[:2], strict=True):
            torch.testing.assert_close(mine, theirs, rtol=1e-4 if dtype == torch.float32 else 1e-2, atol=1e-3)
        for mine, right in zip(ours[2:], exact[2:], strict=True):
            if right.any():
                assert mlps.decibels(right, mine) > mlps.FLOOR_DB


def run(mlp: CompositeMLP, slots: ExpertSlots, leaves: list[Tensor], dtype: torch.dtype) -> list[Tensor]:
    x_SD, scores_R, *weights = leaves = [leaf.detach().to(dtype).requires_grad_() for leaf in leaves]
    y_SD = mlp(x_SD, slots._replace(scores_R=scores_R), ExpertWeights.of(weights, NAMES))
    grads = torch.autograd.grad(y_SD, leaves, torch.linspace(-1, 1, y_SD.numel()).view_as(y_SD).to(y_SD))
    return [y_SD.detach(), grads[0], grads[1][: slots.offsets_e[-1]], *grads[2:]]


@pytest.mark.parametrize(("device", "dtype"), mlps.DEVICES)
@pytest.mark.parametrize("weighs_input", [False, True])
def test_experts_with_biases_are_near_exact_ones(weighs_input: bool, device: str, dtype: torch.dtype) -> None:
    slots, leaves = draw("skewed", device, dtype)
    exact = run(CompositeMLP(grouped_mm_reference, weighs_input), slots, leaves, torch.float64)
    mlp = CompositeMLP(GROUPED_GEMM["fp8_rowwise"], weighs_input)
    eager = run(mlp, slots, leaves, dtype)
    for mine, right in zip(eager, exact, strict=True):
        assert mlps.decibels(right, mine) > FLOOR_OF_MLP_DB
    if weighs_input:
        return
    compiled = run(torch.compile(mlp, fullgraph=True, backend="aot_eager"), slots, leaves, dtype)
    assert all(map(torch.equal, compiled, eager))
