"""Logits from the matrix units of half precision are as exact as those computed wide."""

import pytest
import torch
from torch import Tensor

from titan_moe.kernels.router.logits import choose_router_logits, router_logits, router_logits_reference

DEVICES = [pytest.param("cpu"), pytest.param("cuda", marks=pytest.mark.gpu)]


def results(op, x: Tensor, weight: Tensor, grad: Tensor) -> list[Tensor]:
    x, weight = x.clone().requires_grad_(), weight.clone().requires_grad_()
    logits = op(x, weight)
    logits.backward(grad.to(logits.dtype))
    return [logits.detach(), x.grad, weight.grad]


@pytest.mark.parametrize("device", DEVICES)
def test_bf16_rows_give_fp32_logits_and_gradients(device: str) -> None:
    torch.manual_seed(0)
    x, weight = (torch.randn(shape, device=device).bfloat16() for shape in ((3, 33, 64), (16, 64)))
    grad = torch.randn(3, 33, 16, device=device)
    exact = results(router_logits_reference, x.double(), weight.double(), grad)
    logits, dx, dweight = results(router_logits, x, weight, grad)
    assert logits.dtype == torch.float32 and dx.dtype == dweight.dtype == torch.bfloat16
    torch.testing.assert_close(logits.double(), exact[0], rtol=1e-5, atol=1e-4)
    for got, expected in zip((dx, dweight), exact[1:], strict=True):
        # nothing but the last rounding to bf16: the gradient itself was not rounded to it
        assert ((got.double() - expected).norm() / expected.norm()) < 2.5e-3
        assert (got == expected.bfloat16()).double().mean() > 0.95


def test_a_gradient_rounded_to_bf16_would_be_seen() -> None:
    torch.manual_seed(0)
    x, weight = torch.randn(33, 64).bfloat16(), torch.randn(16, 64).bfloat16()
    grad = torch.randn(33, 16)
    exact = results(router_logits_reference, x.double(), weight.double(), grad)[1]
    coarse = results(router_logits, x, weight, grad.bfloat16().float())[1]
    assert (coarse == exact.bfloat16()).double().mean() < 0.9


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_wide_rows_are_multiplied_wide(dtype: torch.dtype) -> None:
    x, weight = torch.randn(5, 8, dtype=dtype), torch.randn(4, 8, dtype=dtype)
    assert torch.equal(choose_router_logits("triton")(x, weight), choose_router_logits("torch")(x, weight))


def test_the_operation_is_sound() -> None:
    args = (torch.randn(5, 8).bfloat16().requires_grad_(), torch.randn(4, 8).bfloat16().requires_grad_())
    tests = ("test_schema", "test_faketensor", "test_autograd_registration")
    torch.library.opcheck(torch.ops.titan_moe.router_logits.default, args, test_utils=tests)
