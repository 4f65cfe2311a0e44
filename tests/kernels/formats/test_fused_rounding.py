"""One pass has the bits of the reference, signs of zeros and places of NaN included."""

from itertools import product

import pytest
import torch
from torch import Tensor

from titan_moe.config.formats import Format, GemmFormats
from titan_moe.kernels.formats.casts import Role, block_of
from titan_moe.kernels.formats.fused_rounding import amax_to_merge, round_reference, round_to_format
from titan_moe.kernels.formats.grouped import emulated_grouped_mm
from titan_moe.kernels.formats.linear import emulated_linear

INTERPRETED, ON_GPU = pytest.mark.interpreted, pytest.mark.gpu
DEVICES = [pytest.param("cpu", marks=INTERPRETED), pytest.param("cuda", marks=ON_GPU)]
DTYPES = [
    pytest.param("cpu", torch.float32, marks=INTERPRETED),
    pytest.param("cuda", torch.float32, marks=ON_GPU),
    pytest.param("cuda", torch.bfloat16, marks=ON_GPU),
]
SCALED: tuple[Format, ...] = ("fp8_tensorwise", "fp8_rowwise", "fp8_blockwise", "mxfp8", "nvfp4")
ROLES: tuple[Role, ...] = ("activation", "weight", "gradient")
DIMS = (-1, -2)


def wide(*shape: int, octaves: int = 20) -> Tensor:
    """Numbers over many powers of two."""
    return torch.randn(shape) * torch.exp2(torch.randint(-octaves, octaves, shape))


def bits(x: Tensor) -> Tensor:
    """All NaN are the same."""
    return torch.where(x.isnan(), torch.nan, x).contiguous().view(torch.int32)


def check(x_MN: Tensor, *args: object) -> None:
    """With a CPU's reference, whose arithmetic is that of IEEE 754."""
    on_cpu = [arg.cpu() if isinstance(arg, Tensor) else arg for arg in args]
    expected, actual = round_reference(x_MN.cpu(), *on_cpu), round_to_format(x_MN, *args)
    assert actual.dtype == torch.float32 and actual.is_contiguous()
    assert torch.equal(bits(expected), bits(actual.cpu())), (x_MN.shape, *args)


@pytest.mark.parametrize(("device", "dtype"), DTYPES)
@pytest.mark.parametrize("role", ROLES)
@pytest.mark.parametrize("format", SCALED)
def test_rounded_numbers_have_the_bits_of_the_reference(
    format: Format, role: Role, device: str, dtype: torch.dtype
) -> None:
    torch.manual_seed(0)
    sizes = ((70, 150), (2, 33, 20), (1, 1)) if device == "cpu" else ((300, 520), (5, 128, 96), (1, 1))
    for shape, dim in product(sizes, DIMS):
        for x_MN in (torch.randn(shape), wide(*shape), wide(*shape, octaves=3)):
            x_MN[..., 1::7] = 0
            x_MN[..., : shape[-1] // 3] *= 2.0**-90
            check(x_MN.to(device, dtype), format, role, dim)


@pytest.mark.parametrize(("device", "dtype"), DTYPES)
@pytest.mark.parametrize("role", ["activation", "gradient"])
def test_transformed_numbers_have_the_bits_of_the_reference(role: Role, device: str, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    for shape, dim in product(((70, 150), (2, 33, 20), (2, 16, 16), (1, 1)), DIMS):
        check(wide(*shape, octaves=3).to(device, dtype), "nvfp4", role, dim, None, False, True)


@pytest.mark.parametrize("device", DEVICES)
def test_ties_round_to_even(device: str) -> None:
    """Blocks whose scale is 1: every 64th between codes of e2m1, and every 4096th of a small range of e4m3."""
    ties = torch.arange(-384, 385) / 64
    x_MN = torch.cat([ties, ties.new_zeros(15)]).view(49, 16)
    x_MN[:, 0], x_MN[0, :2] = 6.0, torch.tensor([6.0, 2688.0])  # the tensor's scale is 1
    check(x_MN.to(device), "nvfp4", "activation", -1)
    x_MN = torch.cat([torch.arange(-512, 513) / 4096, torch.tensor([448.0, 0.0, 0.0])]).view(4, 257)
    check(x_MN.to(device), "fp8_tensorwise", "activation", -1)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("format", ["fp8_tensorwise", "fp8_rowwise", "fp8_blockwise"])
def test_scales_of_powers_of_two(format: Format, device: str) -> None:
    torch.manual_seed(0)
    x_MN = wide(40, 130)
    x_MN[0] = torch.linspace(0, 448, 130)  # its scale is 1 already
    for role, dim in product(ROLES, DIMS):
        check(x_MN.to(device), format, role, dim, None, True)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("format", SCALED)
def test_zeros_tiny_and_huge_numbers_and_what_is_not_finite(format: Format, device: str) -> None:
    for value in (0.0, -0.0, 1e-45, 1e-38, 1e-30, 3e38, float("inf"), float("-inf"), float("nan")):
        x_MN = torch.zeros(20, 40)
        x_MN[5:] = 1.0
        x_MN[3, 4] = value
        for role, dim in product(ROLES, DIMS):
            check(x_MN.to(device), format, role, dim)


@pytest.mark.parametrize("device", DEVICES)
def test_equal_gradients_draw_equal_numbers(device: str) -> None:
    torch.manual_seed(0)
    x_MN = torch.randn(16, 64, device=device)
    once, again, other = (
        round_to_format(x_MN, "nvfp4", "gradient", -1) for x_MN in (x_MN, x_MN.clone(), x_MN * x_MN.sign())
    )
    assert torch.equal(once, again) and not torch.equal(once.abs(), other)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("format", SCALED)
def test_parts_of_a_tensor_share_merged_magnitudes(format: Format, device: str) -> None:
    torch.manual_seed(0)
    x_nMN = wide(3, 32, 20, octaves=4).to(device)
    for role, dim in product(("activation", "gradient"), DIMS):
        largest = amax_to_merge(x_nMN, format, role, dim)
        if format != "nvfp4" and block_of(format, role, dim, 3)[0] is not None:
            assert largest is None
            continue
        assert largest is not None
        assert torch.equal(largest, x_nMN.abs().amax(1 if largest.shape[2] > 1 else (1, 2), keepdim=True))
        merged = largest.amax(0, keepdim=True).expand_as(largest)
        check(x_nMN, format, role, dim, merged)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("format", SCALED)
def test_layers_have_the_results_of_the_reference(format: Format, device: str) -> None:
    """Of experts, one without slots and one whose last block is not full, and of a linear layer."""
    torch.manual_seed(0)
    formats = GemmFormats(format, format, format)
    x_RI, weight_eOI, grad_RO = torch.randn(150, 32), torch.randn(4, 48, 32), torch.randn(150, 48)
    offsets_e = torch.tensor([3, 133, 133, 140], dtype=torch.int32, device=device)
    x_RI, weight_eOI, grad_RO = (tensor.to(device) for tensor in (x_RI, weight_eOI, grad_RO))
    results = []
    for in_triton in (False, True):
        x, weight = x_RI.clone().requires_grad_(), weight_eOI.clone().requires_grad_()
        y = emulated_grouped_mm(formats, in_triton=in_triton)(x, weight, None, offsets_e)
        dense = emulated_linear(x, weight[1], formats, False, in_triton)
        grads = [torch.autograd.grad(out, (x, weight), grad_RO, retain_graph=True) for out in (y, dense)]
        results.append([y, dense, *grads[0], *grads[1]])
    for expected, actual in zip(*results, strict=True):
        tolerance = 0.0 if device == "cpu" else 1e-6  # operands lie otherwise in memory: other sums on a GPU
        assert (actual - expected).norm() <= tolerance * expected.norm()
