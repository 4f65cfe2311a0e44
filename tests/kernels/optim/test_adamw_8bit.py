"""AdamW with moments in 8 bits: codes against torchao's, exact round trips, rounding, skipped steps, Triton."""

import copy

import pytest
import torch
from torch import Tensor
from torchao.optim.adam import single_param_adam
from torchao.optim.subclass_fp8 import OptimStateFp8, quantize_fp8

from titan_moe.kernels.optim.adamw import Rule
from titan_moe.kernels.optim.adamw_8bit import Shard8, adamw_8bit, adamw_8bit_reference, launch_adamw_8bit
from titan_moe.kernels.optim.moments_8bit import NEAREST, Moment, dequantize_reference, quantize_reference

DEVICES = [pytest.param("cpu", marks=pytest.mark.interpreted), pytest.param("cuda", marks=pytest.mark.gpu)]
SIGNS = pytest.mark.parametrize("is_signed", [True, False], ids=["first", "second"])


def quantize(x: Tensor, is_signed: bool, bits: Tensor | int = NEAREST) -> Moment:
    return quantize_reference(x, bits, is_signed=is_signed)


def in_torchao(moment: Moment) -> OptimStateFp8:
    return OptimStateFp8(moment.codes.view(torch.float8_e4m3fn).clone(), moment.scales_B.clone())


def draw(is_signed: bool, num_blocks: int = 64) -> Tensor:
    """Numbers of many magnitudes: blocks that differ, elements in them that differ, zeros, blocks of zeros."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(num_blocks, 256, generator=generator) * 10 ** torch.randn(num_blocks, 256, generator=generator)
    x *= 10 ** (3 * torch.randn(num_blocks, 1, generator=generator))
    x[:, ::7] = 0
    x[3] = 0
    x[4] = torch.randn(256, generator=generator) * 1e-36
    return x if is_signed else x.square()


def draw_shard(shape: tuple[int, ...] = (5, 1024), device: str = "cpu", dtype=torch.float32) -> Shard8:
    torch.manual_seed(0)
    first, second = torch.randn(shape, device=device) * 1e-3, torch.rand(shape, device=device) * 1e-5
    tensors = [torch.randn(shape, device=device).to(dtype), torch.randn(shape, device=device) * 2e-3]
    moments = quantize(first, True), quantize(second, False)
    return Shard8(torch.tensor(7.0, device=device), 5, *tensors, *moments)


def scalar(value: float, device: str = "cpu") -> Tensor:
    return torch.tensor(value, device=device)


def rule(device: str = "cpu", found_inf: float = 0.0, **options) -> Rule:
    scalars = (torch.tensor(value, device=device) for value in (1e-2, found_inf, 0.5))
    return Rule(*scalars, 0.9, 0.95, 1e-8, 0.1, **options)


def stored(shard: Shard8) -> list[Tensor]:
    return [shard.param, *shard.exp_avg, *shard.exp_avg_sq]


@SIGNS
def test_what_was_dequantized_is_quantized_to_the_same_numbers(is_signed: bool) -> None:
    """So a checkpoint in fp32 is exact. bits are none, nearest and all."""
    for bits in (0, NEAREST, 0xFFFF):
        numbers = dequantize_reference(quantize(draw(is_signed), is_signed, bits))
        again = quantize(numbers, is_signed)
        assert torch.equal(dequantize_reference(again), numbers)


@SIGNS
def test_codes_are_torchaos(is_signed: bool) -> None:
    """Dequantised by torchao they are the same numbers, and no farther from the truth than torchao's own."""
    torch.manual_seed(0)
    x = torch.randn(64, 256) * torch.logspace(-3, 3, 64)[:, None]
    x = x if is_signed else x.square()
    moment = quantize(x, is_signed)
    own = OptimStateFp8(*quantize_fp8(x, 256))
    numbers = dequantize_reference(moment)
    assert torch.equal(in_torchao(moment).dequantize(), numbers)
    errors = [((found - x) / x.abs().amax(dim=1, keepdim=True)).norm() for found in (numbers, own.dequantize())]
    assert errors[0] < 1.05 * errors[1]


@SIGNS
def test_rounding_is_right_on_average(is_signed: bool) -> None:
    x = draw(is_signed, 8)
    bits = torch.arange(0, 1 << 16, 1 << 7)  # as even as 512 draws can be
    total = sum(dequantize_reference(quantize(x, is_signed, torch.full_like(x, b).int())) for b in bits)
    largest = x.abs().amax(dim=1, keepdim=True)
    smallest = largest * 1e-5  # below, second moments are rounded up
    is_large = (x.abs() >= smallest) & (largest > 1e-30)
    torch.testing.assert_close((total / len(bits))[is_large], x[is_large], rtol=4e-3, atol=0)


def test_a_second_moment_above_zero_never_becomes_zero() -> None:
    x = torch.tensor([1.0, 1e-12, 0.0]).repeat(256)[:768].view(3, 256)
    numbers = dequantize_reference(quantize(x, False, 0))
    assert torch.equal(numbers == 0, x == 0)
    assert (numbers[x == 1e-12] < 1e-5).all()


def test_a_step_is_torchaos_but_for_scales() -> None:
    """To nearest; the parameter is updated by the moments before they are rounded, as there."""
    shard, options = draw_shard(), rule(is_stochastic=False)
    param = shard.param.clone()
    states = [in_torchao(moment) for moment in (shard.exp_avg, shard.exp_avg_sq)]
    before = [state.dequantize().clone() for state in states]
    adamw_8bit([shard], options)
    lr, step, grad = torch.tensor(1e-2), torch.tensor(7.0), shard.grad * 0.5
    single_param_adam(param, grad, step, *states, None, lr, 0.9, 0.95, 0.1, 1e-8, True, False)
    torch.testing.assert_close(shard.param, param, rtol=1e-6, atol=1e-7)
    for state, moment, old in zip(states, (shard.exp_avg, shard.exp_avg_sq), before, strict=True):
        numbers = state.dequantize()
        assert (numbers - old).norm() > 0.02 * old.norm()
        assert (dequantize_reference(moment) - numbers).norm() < 0.05 * numbers.norm()


def test_found_inf_leaves_codes_and_scales_as_they_are() -> None:
    shard = draw_shard()
    before = copy.deepcopy(stored(shard))
    for bad in (torch.nan, torch.inf, 1.0):
        shard.grad.fill_(bad)
        adamw_8bit([shard], rule(found_inf=1.0))
    assert all(torch.equal(own, old) for own, old in zip(stored(shard), before, strict=True))
    adamw_8bit([shard], rule())
    assert all((own != old).any() for own, old in zip(stored(shard), before, strict=True))


def test_moments_follow_fp32_on_average() -> None:
    """A second moment that falls by less than half a code a step; with rounding to nearest it stays."""
    results = {}
    for is_stochastic in (True, False):
        shard = draw_shard((16, 256))
        # one large element a block keeps the scale
        second = torch.full((16, 256), 0.5).index_fill_(1, torch.tensor([0]), 1.0)
        shard = shard._replace(exp_avg_sq=quantize(second, False), grad=torch.zeros(16, 256))
        shard.grad[:, 0] = 2.0
        for step in range(1000, 1040):
            shard.step.fill_(step)
            adamw_8bit([shard], rule(is_stochastic=is_stochastic)._replace(beta2=0.999))
        start = dequantize_reference(quantize(second, False))[:, 1:].mean().item()
        results[is_stochastic] = dequantize_reference(shard.exp_avg_sq)[:, 1:].mean().item()
    assert results[True] == pytest.approx(0.5 * 0.999**40, rel=0.01)
    assert results[False] == start


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("is_stochastic", [True, False])
def test_triton_adamw_8bit_equals_reference(is_stochastic: bool, dtype: torch.dtype, device: str) -> None:
    """Codes may differ by one where fp32 results differ by an ulp."""
    ours, theirs = (draw_shard((19, 256), device, dtype) for _ in range(2))
    options = rule(device, is_stochastic=is_stochastic)
    launch_adamw_8bit(ours, options)
    adamw_8bit_reference(theirs, options)
    tolerance = 2e-6 if dtype == torch.float32 else 2e-2
    torch.testing.assert_close(ours.param, theirs.param, rtol=tolerance, atol=tolerance)
    for own, other in ((ours.exp_avg, theirs.exp_avg), (ours.exp_avg_sq, theirs.exp_avg_sq)):
        torch.testing.assert_close(own.scales_B, other.scales_B, rtol=1e-6, atol=0)
        apart = (own.codes.int() - other.codes.int()).abs()
        assert apart.max() <= 1 and (apart > 0).float().mean() < 2e-3


@pytest.mark.parametrize("device", DEVICES)
def test_triton_round_trip_is_exact(device: str) -> None:
    """What Triton stores is quantised again to the same numbers, also of elements far below the largest."""
    shard = draw_shard((64, 256), device)
    first, second = (quantize(draw(is_signed).to(device).clamp(-1e15, 1e15), is_signed) for is_signed in (True, False))
    shard = shard._replace(exp_avg=first, exp_avg_sq=second)
    launch_adamw_8bit(shard, rule(device))
    for moment, is_signed in ((first, True), (second, False)):
        numbers = dequantize_reference(moment)
        again = quantize(numbers, is_signed)
        assert torch.equal(dequantize_reference(again), numbers)


@pytest.mark.parametrize("device", DEVICES)
def test_triton_finds_every_code(device: str) -> None:
    """Numbers a quarter of the way between each two neighbours, rounded to nearest; then half of each as it is read."""
    shard = draw_shard((4, 256), device)
    for moment in (shard.exp_avg, shard.exp_avg_sq):
        moment.scales_B.zero_()
    positive = torch.arange(127, dtype=torch.uint8).view(torch.float8_e4m3fn).float() / 448
    for at in (0.25, 0.75):
        for numbers, is_signed in ((torch.cat([-positive.flip(0), positive]), True), (positive, False)):
            between = torch.lerp(numbers[:-1], numbers[1:], at).double()
            x = torch.ones(4, 256, dtype=torch.float64)
            for row in x:
                row[1 : 1 + len(between[:255])] = between[:255]
            shard.grad.copy_((x if is_signed else x.sqrt()).float())
            for other in (shard.exp_avg, shard.exp_avg_sq):
                other.scales_B.zero_()
            still = rule(device, is_stochastic=False)._replace(beta1=0.0, beta2=0.0, grad_factor=scalar(1.0, device))
            launch_adamw_8bit(shard, still)
            moment = shard.exp_avg if is_signed else shard.exp_avg_sq
            expected = quantize(x.float(), is_signed)
            assert torch.equal(moment.codes.cpu(), expected.codes)
            assert torch.equal(moment.scales_B.cpu(), expected.scales_B)
            before = dequantize_reference(moment)
            shard.grad.zero_()
            launch_adamw_8bit(shard, still._replace(beta1=0.5, beta2=0.5))
            torch.testing.assert_close(dequantize_reference(moment), before / 2, rtol=1e-6, atol=0)


def test_triton_adamw_8bit_refuses_fp64() -> None:
    with pytest.raises(ValueError, match="fp32 and was given fp64"):
        launch_adamw_8bit(draw_shard(dtype=torch.float64), rule())
