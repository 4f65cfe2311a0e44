"""Linear layers in fp8, by rows and by blocks: casts are those of the references, each GEMM is near that of fp64."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from titan_moe.kernels.experts.fp8.rows import SMALLEST_SCALE, quantize_apart, quantize_rows_reference, unpack
from titan_moe.kernels.linear.fp8 import fp8_linear
from titan_moe.kernels.linear.fp8_blocks import fp8_block_linear
from titan_moe.kernels.linear.transposed import transpose, transpose_reference

DEVICES = [
    pytest.param("cpu", torch.float32, marks=pytest.mark.interpreted),
    pytest.param("cuda", torch.bfloat16, marks=pytest.mark.gpu),
]
T, I, O = 96, 80, 144
Linear = Callable[[Tensor, Tensor], Tensor]
Sizes = tuple[int, int, int]
with_linears = pytest.mark.parametrize(
    ("linear", "sizes"),
    [(fp8_linear, (T, I, O)), (fp8_block_linear, (130, 128, 256))],
    ids=["rows", "blocks"],
)
with_devices = pytest.mark.parametrize(("device", "dtype"), DEVICES)


def decibels(exact: Tensor, rounded: Tensor) -> float:
    exact, rounded = exact.detach().double(), rounded.detach().double()
    return float(10 * torch.log10(exact.square().sum() / (exact - rounded).square().sum()))


def gemms(linear: Linear, x: Tensor, weight_OI: Tensor, dy: Tensor) -> list[Tensor]:
    """Output, and gradients of input and weight."""
    x, weight_OI = x.detach().clone().requires_grad_(), weight_OI.detach().clone().requires_grad_()
    y = linear(x, weight_OI)
    y.backward(dy)
    return [y.detach(), x.grad, weight_OI.grad]


def exact_gemms(x: Tensor, weight_OI: Tensor, dy: Tensor) -> list[Tensor]:
    x_TI, weight, dy_TO = x.double().flatten(0, -2), weight_OI.double(), dy.double().flatten(0, -2)
    return [(x_TI @ weight.T).view(dy.shape), (dy_TO @ weight).view(x.shape), dy_TO.T @ x_TI]


@with_devices
def test_casts_have_the_bits_of_the_references(device: str, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    x_MN = torch.randn(T, I, device=device, dtype=dtype)
    x_MN *= torch.randn(T, 1, device=device).mul(9).exp2().to(dtype)
    x_MN[3], x_MN[4], x_MN[5] = 0.0, 448.0, 449.0
    for actual, expected in zip(quantize_apart(x_MN), unpack(quantize_rows_reference(x_MN)), strict=True):
        assert torch.equal(actual.float(), expected.float())
    codes_MN, scales_M = quantize_apart(x_MN)
    for factors_M in (None, scales_M / scales_M.amax()):
        actual, expected = transpose(codes_MN, factors_M), transpose_reference(codes_MN, factors_M)
        assert torch.equal(actual.float(), expected.float())


@with_linears
@with_devices
@pytest.mark.parametrize("spread", [0.0, 2.0], ids=["normal", "uneven"])
def test_each_gemm_is_near_fp64(linear: Linear, sizes: Sizes, device: str, dtype: torch.dtype, spread: float) -> None:
    """Also where tokens, outputs and inputs have different sizes."""
    torch.manual_seed(0)
    T, I, O = sizes
    magnitudes = [(torch.randn(n, 1, device=device) * spread).exp2().to(dtype) for n in (T, O, T)]
    x, weight_OI, dy = (
        torch.randn(*shape, device=device, dtype=dtype) * magnitude.view(*shape[:-1], 1)
        for shape, magnitude in zip(((2, T // 2, I), (O, I), (2, T // 2, O)), magnitudes, strict=True)
    )
    dy *= 1e-4
    for exact, actual in zip(exact_gemms(x, weight_OI, dy), gemms(linear, x, weight_OI, dy), strict=True):
        assert actual.dtype == dtype and 26 < decibels(exact, actual) < 40


@with_linears
@with_devices
def test_tokens_without_gradient_take_nothing_from_others(
    linear: Linear, sizes: Sizes, device: str, dtype: torch.dtype
) -> None:
    torch.manual_seed(0)
    T, I, O = sizes
    x, weight_OI = torch.randn(T, I, device=device, dtype=dtype), torch.randn(O, I, device=device, dtype=dtype)
    dy = 1e-6 * torch.randn(T, O, device=device, dtype=dtype)
    dy[::3] = 0
    assert decibels(exact_gemms(x, weight_OI, dy)[2], gemms(linear, x, weight_OI, dy)[2]) > 26
    assert not any(grad.any() for grad in gemms(linear, x, weight_OI, torch.zeros_like(dy))[1:])
    codes_TO, scales_T = quantize_apart(dy)
    assert scales_T[0] == SMALLEST_SCALE and not codes_TO[0].float().any()


@with_linears
@with_devices
def test_what_is_not_finite_stays_so(linear: Linear, sizes: Sizes, device: str, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    T, I, O = sizes
    x, weight_OI, dy = (torch.randn(*shape, device=device, dtype=dtype) for shape in ((T, I), (O, I), (T, O)))
    for number in (float("inf"), float("nan")):
        for index, reached in ((0, (0, 2)), (2, (1, 2))):
            args = [x, weight_OI, dy]
            args[index] = args[index].clone()
            args[index][5, 3] = number
            results = gemms(linear, *args)
            assert all(not results[place].isfinite().all() for place in reached)


@with_linears
@with_devices
def test_only_needed_gradients_are_computed(linear: Linear, sizes: Sizes, device: str, dtype: torch.dtype) -> None:
    _, I, O = sizes
    x, weight_OI = torch.randn(T, I, device=device, dtype=dtype), torch.randn(O, I, device=device, dtype=dtype)
    for frozen in range(2):
        tensors = [tensor.clone().requires_grad_(index != frozen) for index, tensor in enumerate((x, weight_OI))]
        linear(*tensors).sum().backward()
        assert [tensor.grad is None for tensor in tensors] == [index == frozen for index in range(2)]


@with_linears
@with_devices
def test_no_tokens_have_no_gradient(linear: Linear, sizes: Sizes, device: str, dtype: torch.dtype) -> None:
    _, I, O = sizes
    x = torch.randn(0, I, device=device, dtype=dtype, requires_grad=True)
    weight_OI = torch.randn(O, I, device=device, dtype=dtype, requires_grad=True)
    y = linear(x, weight_OI)
    y.sum().backward()
    assert y.shape == (0, O) and x.grad.shape == x.shape and not weight_OI.grad.any()
