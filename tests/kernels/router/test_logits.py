"""Router logits from bf16 GEMMs with fp32 output are as exact as logits from fp32 GEMMs."""

import pytest
import torch
from torch import Tensor

from titan_moe.kernels.choose import ROUTER_LOGITS
from titan_moe.kernels.router.logits import router_logits, router_logits_reference

DEVICES = [pytest.param("cpu"), pytest.param("cuda", marks=pytest.mark.gpu)]


def results(op, x: Tensor, weight: Tensor, grad: Tensor) -> list[Tensor]:
    x, weight = x.clone().requires_grad_(), weight.clone().requires_grad_()
    logits = op(x, weight)
    logits.backward(grad.to(logits.dtype))
    return [logits.detach(), x.grad, weight.grad]


@pytest.mark.parametrize("device", DEVICES)
def test_router_logits_of_bf16_rows_equal_fp64_reference(device: str) -> None:
    torch.manual_seed(0)
    x, weight = (torch.randn(shape, device=device).bfloat16() for shape in ((3, 33, 64), (16, 64)))
    grad = torch.randn(3, 33, 16, device=device)
    exact = results(router_logits_reference, x.double(), weight.double(), grad)
    logits, dx, dweight = results(router_logits, x, weight, grad)
    assert logits.dtype == torch.float32 and dx.dtype == dweight.dtype == torch.bfloat16
    torch.testing.assert_close(logits.double(), exact[0], rtol=1e-5, atol=1e-4)
    for got, expected in zip((dx, dweight), exact[1:], strict=True):
        # only the result is rounded to bf16, not the incoming gradient
        assert ((got.double() - expected).norm() / expected.norm()) < 2.5e-3
        assert (got == expected.bfloat16()).double().mean() > 0.95


def test_router_logits_test_detects_a_gradient_rounded_to_bf16() -> None:
    torch.manual_seed(0)
    x, weight = torch.randn(33, 64).bfloat16(), torch.randn(16, 64).bfloat16()
    grad = torch.randn(33, 16)
    exact = results(router_logits_reference, x.double(), weight.double(), grad)[1]
    rounded = results(router_logits, x, weight, grad.bfloat16().float())[1]
    assert (rounded == exact.bfloat16()).double().mean() < 0.9


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_router_logits_of_fp32_and_fp64_rows_equal_reference(dtype: torch.dtype) -> None:
    x, weight = torch.randn(5, 8, dtype=dtype), torch.randn(4, 8, dtype=dtype)
    assert torch.equal(ROUTER_LOGITS["triton"](x, weight), ROUTER_LOGITS["torch"](x, weight))
