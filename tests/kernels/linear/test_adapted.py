"""A linear layer with low-rank factors in its GEMM, held against the sum of its weight and their product."""

from typing import Any

import pytest
import torch
from torch import Tensor

from titan_moe.kernels.formats.stored import CODES, numbers_reference, scales_shape, store
from titan_moe.kernels.linear.adapted import adapted_linear, adapted_linear_reference

ROWS, WIDTH, RANK, SCALE = (18, 6, 6), 20, 3, 1.5


def draw(base: Any, has_bias: bool) -> tuple[list[Tensor], Tensor, Tensor | None, Tensor]:
    """Input, factors, a bias and a weight in compute's dtype, which are differentiable; the weight, its scales, and its
    numbers."""
    torch.manual_seed(0)
    weight = torch.randn(sum(ROWS), WIDTH, dtype=torch.float64)
    sizes = [(2, 7, WIDTH), (len(ROWS) * RANK, WIDTH), (sum(ROWS), RANK), *([(sum(ROWS),)] if has_bias else [])]
    leaves = [torch.randn(size, dtype=torch.float64, requires_grad=True) for size in sizes]
    if base == "compute":
        return [*leaves, weight.requires_grad_()], weight, None, weight
    codes, scales = torch.empty_like(weight, dtype=CODES), torch.empty(scales_shape(weight.shape, base))
    store(weight.float(), codes, scales)
    return leaves, codes, scales, numbers_reference(codes, scales, torch.float64)


@pytest.mark.parametrize("base", ["compute", "fp8_rowwise", "fp8_blockwise"])
@pytest.mark.parametrize("has_bias", [False, True])
def test_values_and_gradients(base: str, has_bias: bool) -> None:
    leaves, stored, scales, weight = draw(base, has_bias)
    x, a, b = leaves[:3]
    of_bias = leaves[3] if has_bias else None

    def mine() -> Tensor:
        return adapted_linear(x, stored, scales, of_bias, a, b, ROWS, SCALE)

    compiled = torch.compile(mine, backend="aot_eager", fullgraph=True)
    right = adapted_linear_reference(x, weight, of_bias, a, b, ROWS, SCALE)
    expected = torch.autograd.grad(right.sin().sum(), leaves)
    for call in (mine, compiled):
        y = call()
        torch.testing.assert_close(y, right)
        torch.testing.assert_close(torch.autograd.grad(y.sin().sum(), leaves), expected)


def test_what_has_no_gradient_costs_no_product() -> None:
    (x, a, b, weight), *_ = draw("compute", False)
    weight = weight.detach()
    y = adapted_linear(x.detach(), weight, None, None, a, b, ROWS, SCALE)
    right = adapted_linear_reference(x, weight, None, a, b, ROWS, SCALE)
    with torch.utils.flop_counter.FlopCounterMode(display=False) as counter:
        grads = torch.autograd.grad(y.sin().sum(), [a, b])
    torch.testing.assert_close(grads, torch.autograd.grad(right.sin().sum(), [a, b]))
    assert counter.get_total_flops() == 2 * 14 * (2 * sum(ROWS) * RANK + len(ROWS) * RANK * WIDTH)
