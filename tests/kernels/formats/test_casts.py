"""Casts give the bits of torch and torchao, keep zeros, show NaN, and scale as finely as their format says."""

import pytest
import torch
from torch import Tensor

from titan_moe.config.formats import Format
from titan_moe.kernels.formats import nvfp4
from titan_moe.kernels.formats.blocks import spread
from titan_moe.kernels.formats.casts import Role, block_of, dequantize, quantize, round_to

SCALED: tuple[Format, ...] = ("fp8_tensorwise", "fp8_rowwise", "fp8_blockwise", "mxfp8", "nvfp4")
FP8: tuple[Format, ...] = ("fp8_tensorwise", "fp8_rowwise", "fp8_blockwise")
ROLES: tuple[Role, ...] = ("activation", "weight", "gradient")


def wide(*shape: int, octaves: int = 20) -> Tensor:
    """Numbers over many powers of two."""
    return torch.randn(shape) * torch.exp2(torch.randint(-octaves, octaves, shape))


def all_fp32_exponents() -> Tensor:
    """Every finite sign and exponent of fp32 with random mantissas, [2, 255, 64]."""
    bits = torch.arange(255, dtype=torch.int32)[:, None] << 23 | torch.randint(0, 1 << 23, (255, 64), dtype=torch.int32)
    positive = bits.view(torch.float32)
    return torch.stack([positive, -positive])


def decibels(actual: Tensor, exact: Tensor) -> float:
    """Ratio of signal to noise."""
    return float(10 * torch.log10(exact.double().square().sum() / (actual.double() - exact.double()).square().sum()))


@pytest.mark.parametrize("dim", [-1, -2, 0, 1])
@pytest.mark.parametrize("role", ROLES)
@pytest.mark.parametrize("format", FP8)
def test_fp8_codes_are_torch_casts_of_scaled_numbers(format: Format, role: Role, dim: int) -> None:
    torch.manual_seed(0)
    x_MN = wide(150, 300, octaves=6)
    codes_MN, scales_mn, _ = quantize(x_MN, format, role, dim)
    is_e5m2 = format == "fp8_tensorwise" and role == "gradient"
    dtype, largest = (torch.float8_e5m2, 57344.0) if is_e5m2 else (torch.float8_e4m3fn, 448.0)
    rows, columns = block_of(format, role, dim)
    for i, x_rows in enumerate(x_MN.split(rows or 150)):
        for j, block in enumerate(x_rows.split(columns or 300, dim=1)):
            if i + j < 9 or rows is None or columns is None:
                assert scales_mn[i, j] == block.abs().max() / largest
                code = (block * (1 / scales_mn[i, j])).clamp(-largest, largest).to(dtype)
                here = codes_MN[i * (rows or 150) :, j * (columns or 300) :][: block.shape[0], : block.shape[1]]
                assert torch.equal(here.float(), code.float())


def test_mxfp8_has_the_bits_of_torchao() -> None:
    from torchao.prototype.mx_formats.mx_tensor import ScaleCalculationMode, to_dtype, to_mx

    torch.manual_seed(0)
    for x_MN in (wide(96, 64), wide(96, 64).bfloat16(), torch.zeros(64, 64), *all_fp32_exponents()[:, :224]):
        scales, codes = to_mx(x_MN.contiguous(), torch.float8_e4m3fn, 32, ScaleCalculationMode.RCEIL)
        ours = quantize(x_MN, "mxfp8", "activation", -1)
        transposed = quantize(x_MN.mT.contiguous(), "mxfp8", "activation", -2)
        for codes_MN, scales_mn, _ in (ours, [*(tensor.mT for tensor in transposed[:2]), None]):
            assert torch.equal(codes_MN.view(torch.uint8), codes.view(torch.uint8))
            assert torch.equal(scales_mn.view(torch.uint8), scales.view(torch.uint8))
        expected = to_dtype(codes, scales, torch.float8_e4m3fn, 32, torch.float32)
        assert torch.equal(dequantize(ours, "mxfp8", "activation", -1), expected)


def test_mxfp8_scales_are_the_next_powers_of_two() -> None:
    """Also an ulp above a power, where torchao's logarithm in fp32 is the power's; so no code saturates."""
    amax = 1.75 * torch.exp2(torch.arange(-110, 127).double())
    for ulps in (-1, 0, 1, 40):
        x_MN = torch.zeros(len(amax), 32)
        x_MN[:, 0] = (amax.float().view(torch.int32) + ulps).view(torch.float32)
        scales_mn = quantize(x_MN, "mxfp8", "activation", -1).scales.float().double()
        assert torch.equal(scales_mn[:, 0], torch.exp2(torch.ceil(torch.log2(x_MN[:, 0].double() / 448))))


def test_nvfp4_has_the_bits_of_torchao() -> None:
    from torchao.prototype.mx_formats.kernels import pack_uint4
    from torchao.prototype.mx_formats.nvfp4_tensor import NVFP4Tensor, nvfp4_quantize, per_tensor_amax_to_scale

    torch.manual_seed(0)
    for x_MN in (torch.randn(96, 64), wide(96, 64), wide(96, 64, octaves=3).bfloat16()):
        tensor_scale = per_tensor_amax_to_scale(x_MN.abs().amax())
        scales, codes = nvfp4_quantize(x_MN, 16, tensor_scale)
        ours = quantize(x_MN, "nvfp4", "activation", -1)
        assert ours.tensor_scale is not None and ours.tensor_scale.item() == tensor_scale.item()
        assert torch.equal(pack_uint4(ours.codes), codes)
        assert torch.equal(ours.scales.view(torch.uint8), scales.view(torch.uint8))
        theirs = NVFP4Tensor.to_nvfp4(x_MN.float(), 16, tensor_scale).dequantize(torch.float32)
        assert torch.equal(dequantize(ours, "nvfp4", "activation", -1), theirs)


def test_e2m1_rounds_as_torchao_does() -> None:
    from torchao.prototype.mx_formats.kernels import f4_unpacked_to_f32, f32_to_f4_unpacked

    ties = torch.arange(-48, 49) / 8
    x = torch.cat([ties, ties.nextafter(torch.tensor(9.0)), ties.nextafter(torch.tensor(-9.0)), torch.tensor([-0.0])])
    x = x.clamp(-6, 6)
    codes = nvfp4.to_e2m1(x)
    assert torch.equal(codes, f32_to_f4_unpacked(x))
    assert torch.equal(nvfp4.from_e2m1(codes), f4_unpacked_to_f32(codes))


def test_square_blocks_of_nvfp4_weights_are_the_same_transposed() -> None:
    torch.manual_seed(0)
    weight_OI = torch.randn(50, 70)
    over_I, over_O = round_to(weight_OI, "nvfp4", "weight", -1), round_to(weight_OI, "nvfp4", "weight", -2)
    assert torch.equal(over_I, over_O)
    assert torch.equal(over_I, round_to(weight_OI.T.contiguous(), "nvfp4", "weight", -1).T)


def test_square_blocks_share_torchaos_bits_where_a_block_is_constant_along_rows() -> None:
    """torchao's kernel for square blocks runs on Blackwell only; there each row's scale is that of the square."""
    from torchao.prototype.mx_formats.nvfp4_tensor import nvfp4_quantize, per_tensor_amax_to_scale

    torch.manual_seed(0)
    signs, magnitudes = torch.randn(96, 64).sign(), wide(6, 64, octaves=3).abs().repeat_interleave(16, 0)
    x_MN = signs * magnitudes
    scales, _ = nvfp4_quantize(x_MN, 16, per_tensor_amax_to_scale(x_MN.abs().amax()))
    ours = quantize(x_MN, "nvfp4", "weight", -1)
    assert torch.equal(ours.scales.repeat_interleave(16, 0).view(torch.uint8), scales.view(torch.uint8))


@pytest.mark.parametrize("dim", [-1, -2])
@pytest.mark.parametrize("role", ROLES)
@pytest.mark.parametrize("format", SCALED)
def test_zeros_stay_zeros_and_tiny_or_huge_numbers_are_finite(format: Format, role: Role, dim: int) -> None:
    x_MN = torch.zeros(40, 50)
    assert torch.equal(round_to(x_MN, format, role, dim), x_MN)
    for value in (1e-45, 1e-38, 1e-30, 3e38):
        x_MN[3, 4] = value
        rounded = round_to(x_MN, format, role, dim)
        assert rounded.isfinite().all() and rounded.count_nonzero() <= 1
        if value >= 1e-30:
            torch.testing.assert_close(rounded[3, 4], x_MN[3, 4], rtol=2**-4, atol=0)


@pytest.mark.parametrize("format", SCALED)
def test_nan_is_not_hidden(format: Format) -> None:
    x_MN = torch.randn(32, 64)
    x_MN[3, 4] = float("nan")
    assert round_to(x_MN, format, "activation", -1)[3, 4].isnan()


@pytest.mark.parametrize("dim", [-1, -2])
@pytest.mark.parametrize("role", ROLES)
@pytest.mark.parametrize("format", SCALED)
def test_leading_dimensions_are_separate_tensors(format: Format, role: Role, dim: int) -> None:
    torch.manual_seed(0)
    x_eMN = wide(3, 70, 50, octaves=4)
    together = round_to(x_eMN, format, role, dim)
    assert torch.equal(together, torch.stack([round_to(x_MN, format, role, dim) for x_MN in x_eMN]))


@pytest.mark.parametrize("format", FP8)
def test_scales_of_powers_of_two_are_the_next_ones_above(format: Format) -> None:
    torch.manual_seed(0)
    x_MN = wide(150, 300)
    x_MN[0] = torch.linspace(0, 448, 300)  # its scale is 1 already
    exact = quantize(x_MN, format, "activation", -1).scales
    scales = quantize(x_MN, format, "activation", -1, power_of_two_scales=True).scales
    assert torch.equal(scales.frexp().mantissa, torch.full_like(scales, 0.5))
    assert ((exact <= scales) & (scales < 2 * exact)).all()
    assert scales[0, 0] == 1 or format != "fp8_rowwise"


@pytest.mark.parametrize("format", FP8)
def test_with_powers_of_two_rounded_numbers_are_exact_in_bf16(format: Format) -> None:
    torch.manual_seed(0)
    x_MN = wide(150, 300, octaves=6).bfloat16()
    rounded = round_to(x_MN, format, "activation", -1, power_of_two_scales=True)
    assert rounded.dtype == torch.bfloat16
    assert torch.equal(rounded.float(), round_to(x_MN.float(), format, "activation", -1, power_of_two_scales=True))


def test_compute_is_not_rounded() -> None:
    x_MN = torch.randn(3, 4, dtype=torch.float64)
    assert round_to(x_MN, "compute", "weight", -1) is x_MN
    with pytest.raises(ValueError, match="no scales"):
        quantize(x_MN, "compute", "weight", -1)
    with pytest.raises(ValueError, match="one of the last two"):
        quantize(x_MN[None], "mxfp8", "weight", 0)


def test_finer_scales_keep_small_numbers_beside_large_ones() -> None:
    """Rows over 2^24 and columns over 2^18: what lies too far below the largest number of its scale is lost."""
    torch.manual_seed(0)
    rows = torch.exp2(torch.randint(-12, 13, (256, 1)))
    columns = torch.exp2(torch.linspace(-9, 9, 8).round()).repeat_interleave(128)
    x_MN = torch.randn(256, 1024)
    noise = {f: decibels(round_to(x_MN * rows * columns, f, "activation", -1) / (rows * columns), x_MN) for f in FP8}
    assert noise["fp8_blockwise"] > 30
    assert noise["fp8_blockwise"] > noise["fp8_rowwise"] + 10
    assert noise["fp8_rowwise"] > noise["fp8_tensorwise"] + 4


def test_stochastic_rounding_is_unbiased() -> None:
    torch.manual_seed(0)
    num_draws = 4096
    x = torch.cat([torch.linspace(-6, 6, 241), torch.tensor([0.01, 5.99, 1.75, 3.5])])
    rounded = torch.stack([nvfp4.from_e2m1(nvfp4.to_e2m1(x, torch.rand(x.shape))) for _ in range(num_draws)])
    check_unbiased(x, rounded)


def test_stochastic_rounding_of_numbers_is_unbiased_over_blocks_that_differ_in_one() -> None:
    torch.manual_seed(0)
    x_MN = torch.rand(4, 64) * 12 - 6
    x_MN[:, ::16] = 6.0  # each block's scale is exact, so that nothing is clamped
    blocks_BMN = x_MN.repeat(2048, 1, 1)
    blocks_BMN[..., 15::16] = torch.arange(2048).view(-1, 1, 1) / 1024
    rounded_BMN = round_to(blocks_BMN, "nvfp4", "gradient", -1)
    is_equal_N = torch.arange(64) % 16 != 15
    check_unbiased(x_MN[:, is_equal_N], rounded_BMN[..., is_equal_N])
    assert torch.equal(round_to(blocks_BMN[:8].mT, "nvfp4", "gradient", -2), rounded_BMN[:8].mT)
    assert torch.equal(round_to(blocks_BMN[5], "nvfp4", "gradient", -1), rounded_BMN[5])


def test_stochastic_rounding_is_unbiased_over_blocks() -> None:
    """Their content alone makes their bits random."""
    torch.manual_seed(0)
    x_MN = torch.rand(8192, 64) * 12 - 6
    x_MN[:, ::16] = 6.0
    x_MN[:, 5::16] = 0.1  # the same number in all blocks
    error = (round_to(x_MN, "nvfp4", "gradient", -1) - x_MN).double()
    standard_error = error.std(0) / len(x_MN) ** 0.5
    assert (error.mean(0).abs() <= 4.5 * standard_error + 1e-6).all()
    correlation = (error * x_MN).mean() / (error.std() * x_MN.std())
    assert correlation.abs() < 4 / error.numel() ** 0.5


def check_unbiased(x: Tensor, rounded: Tensor) -> None:
    """The mean over the first dimension is within 4 standard errors of x for each element, and of all together."""
    num_draws = rounded.shape[0]
    error = rounded.double().mean(0) - x.double()
    deviation = (rounded.double().var(0) / num_draws).sqrt()
    assert (error.abs() <= 4.5 * deviation + 1e-6).all()
    assert error.sum().abs() <= 4 * deviation.square().sum().sqrt() + 1e-5


def test_random_numbers_are_uniform_and_independent_of_the_place() -> None:
    torch.manual_seed(0)
    x_MN = torch.randn(512, 64).bfloat16()
    random_MN = nvfp4.draw(x_MN, -1)
    assert 0 <= random_MN.min() and random_MN.max() < 1
    for bit in range(1, 9):
        share = ((random_MN * 2**bit).int() % 2).float().mean()
        assert (share - 0.5).abs() < 4 * 0.5 / random_MN.numel() ** 0.5
    lanes = random_MN.view(-1, 16).double()
    correlations = torch.corrcoef(lanes.T) - torch.eye(16)
    assert correlations.abs().max() < 4.5 / lanes.shape[0] ** 0.5
    order = torch.randperm(512)
    assert torch.equal(nvfp4.draw(x_MN[order], -1), random_MN[order])
    assert not (nvfp4.draw(2 * x_MN, -1) == random_MN).view(-1, 16).all(-1).any()


def test_only_gradients_are_rounded_at_random() -> None:
    """The sign of one number changes the bits of a gradient's block, and not its scale."""
    torch.manual_seed(0)
    x_MN = torch.randn(32, 64)
    other_MN = x_MN.clone()
    other_MN[:, ::16] *= -1
    for role in ROLES:
        one, other = (round_to(x_MN, "nvfp4", role, -1) for x_MN in (x_MN, other_MN))
        assert torch.equal(one.abs(), other.abs()) == (role != "gradient")


def test_hadamard_is_orthogonal_and_keeps_products() -> None:
    torch.manual_seed(0)
    matrix = nvfp4.random_hadamard(torch.eye(16, dtype=torch.float64), -2)
    assert torch.equal(matrix @ matrix.T, torch.eye(16, dtype=torch.float64))
    grad_TO, x_TI = torch.randn(64, 24, dtype=torch.float64), torch.randn(64, 40, dtype=torch.float64)
    product = nvfp4.random_hadamard(grad_TO, -2).T @ nvfp4.random_hadamard(x_TI, -2)
    torch.testing.assert_close(product, grad_TO.T @ x_TI, rtol=1e-13, atol=1e-12)
    assert torch.equal(nvfp4.random_hadamard(x_TI.T.contiguous(), -1).T, nvfp4.random_hadamard(x_TI, -2))


def test_hadamard_is_torchaos() -> None:
    from torchao.prototype.moe_training.nvfp4_training.hadamard_utils import get_rht_matrix

    signs = tuple(-1 if nvfp4.NEGATIVE_SIGNS >> lane & 1 else 1 for lane in range(16))
    theirs = get_rht_matrix(signs, "cpu", torch.float64, 16)
    assert torch.equal(nvfp4.random_hadamard(torch.eye(16, dtype=torch.float64), -2), theirs.T)


def test_hadamard_spreads_outliers() -> None:
    torch.manual_seed(0)
    x_TI = torch.randn(256, 64)
    x_TI[::16] *= 30
    ratio = x_TI.unflatten(0, (-1, 16)).abs().amax(1) / x_TI.unflatten(0, (-1, 16)).square().mean(1).sqrt()
    mixed = nvfp4.random_hadamard(x_TI, -2).unflatten(0, (-1, 16))
    assert (mixed.abs().amax(1) / mixed.square().mean(1).sqrt()).mean() < 0.6 * ratio.mean()


def test_scales_spread_over_incomplete_blocks() -> None:
    x_MN = torch.zeros(3, 5)
    assert torch.equal(spread(torch.tensor([[1.0, 2.0]]), x_MN, (None, 4))[1], torch.tensor([1.0, 1, 1, 1, 2]))
