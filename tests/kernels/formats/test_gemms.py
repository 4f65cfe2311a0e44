"""The three GEMMs of a linear layer and of grouped experts, in every format, against fp64."""

from itertools import pairwise

import pytest
import torch
from torch import Tensor

from titan_moe.config.formats import Format, GemmFormats
from titan_moe.kernels.experts.composite_mlp import CompositeMLP
from titan_moe.kernels.experts.grouped_mm import grouped_mm_loop
from titan_moe.kernels.experts.slots import ExpertSlots
from titan_moe.kernels.experts.weights import ExpertParameter, ExpertWeights
from titan_moe.kernels.formats.grouped import BlockLayout, emulated_grouped_mm
from titan_moe.kernels.formats.linear import emulated_linear

SCALED: tuple[Format, ...] = ("fp8_tensorwise", "fp8_rowwise", "fp8_blockwise", "mxfp8", "nvfp4")
FLOORS: dict[Format, tuple[float, float, float]] = {
    "compute": (120, 120, 120),
    "fp8_tensorwise": (26, 22, 22),  # gradients e5m2
    "fp8_rowwise": (26, 26, 26),
    "fp8_blockwise": (26, 26, 26),
    "mxfp8": (26, 26, 26),
    "nvfp4": (14, 14, 14),
}
"""Least signal to noise in dB: y, dx, dW."""
BORDERS = {
    "unaligned": (100, 333, 340, 490),
    "empty": (0, 0, 17, 17, 500, 500),
    "one_expert": (500,),
    "single_slots": (1, 2, 3, 4, 500),
    "none": (0, 0, 0),
}


def in_all(format: Format) -> GemmFormats:
    return GemmFormats(format, format, format)


def decibels(actual: Tensor, exact: Tensor) -> float:
    """Ratio of signal to noise."""
    exact, noise = exact.detach().double(), (actual - exact).detach().double()
    return float(10 * torch.log10(exact.square().sum() / noise.square().sum()))


def draw(borders: tuple[int, ...], dtype: torch.dtype = torch.float32) -> tuple[Tensor, ...]:
    """x, weights, borders and the gradient of y, with NaN past the last border."""
    torch.manual_seed(0)
    x_RI, grad_RO = torch.randn(500, 96), torch.randn(500, 144) * 1e-3
    x_RI[borders[-1] :] = grad_RO[borders[-1] :] = float("nan")
    weight_eOI = torch.randn(len(borders), 144, 96) * 0.02
    offsets_e = torch.tensor(borders, dtype=torch.int32)
    return x_RI.to(dtype).requires_grad_(), weight_eOI.to(dtype).requires_grad_(), offsets_e, grad_RO.to(dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("format", FLOORS)
def test_noise_of_a_linear_layer(format: Format, dtype: torch.dtype) -> None:
    x, weight_1OI, _, grad = draw((500,), dtype)
    weight_OI = weight_1OI[0]
    y = emulated_linear(x.view(5, 100, 96), weight_OI, in_all(format))
    assert y.shape == (5, 100, 144) and y.dtype == dtype
    actual = y.flatten(0, 1), *torch.autograd.grad(y, [x, weight_OI], grad.view_as(y))
    x, weight_OI, grad = x.double(), weight_OI.double(), grad.double()
    exact = x @ weight_OI.T, grad @ weight_OI, grad.T @ x
    noise = [decibels(*pair) for pair in zip(actual, exact, strict=True)]
    print(format, dtype, [round(value, 1) for value in noise])
    floors = FLOORS[format] if dtype == torch.float32 else [min(floor, 50) for floor in FLOORS[format]]
    assert all(value >= floor for value, floor in zip(noise, floors, strict=True)), noise


@pytest.mark.parametrize("format", ["fp8_tensorwise", "fp8_rowwise", "fp8_blockwise"])
def test_noise_with_scales_of_powers_of_two(format: Format) -> None:
    x_RI, weight_eOI, offsets_e, grad_RO = draw((100, 333, 340, 500))
    y_RO = emulated_grouped_mm(in_all(format), power_of_two_scales=True)(x_RI, weight_eOI, None, offsets_e)
    y_alone = emulated_linear(x_RI[:100], weight_eOI[0], in_all(format), power_of_two_scales=True)
    torch.testing.assert_close(y_RO[:100], y_alone, rtol=1e-5, atol=1e-6)
    exact = grouped_mm_loop(x_RI, weight_eOI, None, offsets_e)
    grads = [torch.autograd.grad(y, [x_RI, weight_eOI], grad_RO) for y in (y_RO, exact)]
    noise = [decibels(y_RO, exact), *(decibels(*pair) for pair in zip(*grads, strict=True))]
    assert all(value >= floor for value, floor in zip(noise, FLOORS[format], strict=True)), noise


@pytest.mark.parametrize("gemm", ["fprop", "dgrad", "wgrad"])
def test_each_gemm_has_a_format_of_its_own(gemm: str) -> None:
    x, weight_1OI, _, grad = draw((500,))
    weight_OI = weight_1OI[0]
    names = ["fprop", "dgrad", "wgrad"]

    def evaluate(formats: GemmFormats) -> list[Tensor]:
        y = emulated_linear(x, weight_OI, formats)
        return [y, *torch.autograd.grad(y, [x, weight_OI], grad)]

    rounded, exact = evaluate(GemmFormats(**{gemm: "mxfp8"})), evaluate(GemmFormats())
    assert [torch.equal(*pair) for pair in zip(rounded, exact, strict=True)] == [name != gemm for name in names]


@pytest.mark.parametrize("borders", BORDERS.values(), ids=BORDERS)
@pytest.mark.parametrize("format", FLOORS)
def test_an_expert_is_a_linear_layer_of_its_own(format: Format, borders: tuple[int, ...]) -> None:
    x_RI, weight_eOI, offsets_e, grad_RO = draw(borders)
    y_RO = emulated_grouped_mm(in_all(format))(x_RI, weight_eOI, None, offsets_e)
    dx_RI, dweight_eOI = torch.autograd.grad(y_RO, [x_RI, weight_eOI], grad_RO)
    for expert, (begin, end) in enumerate(pairwise((0, *borders))):
        x, weight_OI = x_RI[begin:end], weight_eOI[expert]
        y = emulated_linear(x, weight_OI, in_all(format))
        dx, dweight = torch.autograd.grad(y, [x, weight_OI], grad_RO[begin:end])
        torch.testing.assert_close(y_RO[begin:end], y, rtol=1e-5, atol=1e-6)
        torch.testing.assert_close(dx_RI[begin:end], dx, rtol=1e-5, atol=1e-9)
        torch.testing.assert_close(dweight_eOI[expert], dweight, rtol=1e-5, atol=1e-7)
    assert not y_RO[borders[-1] :].any() and not dx_RI[borders[-1] :].any()


@pytest.mark.parametrize("format", SCALED)
def test_noise_of_a_huge_group_beside_small_ones(format: Format) -> None:
    torch.manual_seed(0)
    x_RI, weight_eOI, grad_RO = torch.randn(6000, 64), torch.randn(4, 48, 64) * 0.02, torch.randn(6000, 48) * 1e-3
    x_RI, weight_eOI = x_RI.requires_grad_(), weight_eOI.requires_grad_()
    offsets_e = torch.tensor([3, 5990, 5990, 6000], dtype=torch.int32)
    actual = emulated_grouped_mm(in_all(format))(x_RI, weight_eOI, None, offsets_e)
    actual = actual, *torch.autograd.grad(actual, [x_RI, weight_eOI], grad_RO)
    exact = grouped_mm_loop(x_RI.double(), weight_eOI.double(), None, offsets_e)
    exact = exact, *torch.autograd.grad(exact, [x_RI, weight_eOI], grad_RO.double())
    noise = [decibels(*pair) for pair in zip(actual, exact, strict=True)]
    assert all(value >= floor for value, floor in zip(noise, FLOORS[format], strict=True)), noise


@pytest.mark.parametrize("format", SCALED)
def test_experts_do_not_share_scales(format: Format) -> None:
    """One expert's slots are larger by 2^30; the other's results do not change by a bit."""
    x_RI, weight_eOI, offsets_e, grad_RO = draw((77, 490))
    large = torch.where(torch.arange(500)[:, None] < 77, 2.0**30, 1.0)
    gemm = emulated_grouped_mm(in_all(format))
    results = []
    for factor in (torch.ones(()), large):
        y_RO = gemm(x_RI * factor, weight_eOI, None, offsets_e)
        results.append((y_RO[77:490], *torch.autograd.grad(y_RO, [x_RI, weight_eOI], grad_RO * factor)))
    (y, dx_RI, dweight), (y_beside, dx_beside, dweight_beside) = results
    assert torch.equal(y, y_beside)
    assert torch.equal(dx_RI[77:490], dx_beside[77:490])
    assert torch.equal(dweight[1], dweight_beside[1])


@pytest.mark.parametrize("format", SCALED)
def test_results_do_not_depend_on_experts_beside(format: Format) -> None:
    """Also not the random bits of stochastic rounding: an expert computes the same on any rank."""
    x_RI, weight_eOI, offsets_e, grad_RO = draw((100, 333, 490))
    gemm = emulated_grouped_mm(in_all(format))
    y_RO = gemm(x_RI, weight_eOI, None, offsets_e)
    dx_RI, dweight_eOI = torch.autograd.grad(y_RO, [x_RI, weight_eOI], grad_RO)
    x_alone, weight_alone = x_RI[100:333], weight_eOI[1:2]
    y_alone = gemm(x_alone, weight_alone, None, torch.tensor([233], dtype=torch.int32))
    dx_alone, dweight_alone = torch.autograd.grad(y_alone, [x_alone, weight_alone], grad_RO[100:333])
    torch.testing.assert_close(y_RO[100:333], y_alone, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(dx_RI[100:333], dx_alone, rtol=1e-5, atol=1e-9)
    torch.testing.assert_close(dweight_eOI[1:2], dweight_alone, rtol=1e-5, atol=1e-7)


def test_weights_may_be_transposed_or_have_clones() -> None:
    x_RI, weight_eOI, offsets_e, grad_RO = draw((100, 333, 340, 490))
    gemm = emulated_grouped_mm(in_all("mxfp8"))
    expected = gemm(x_RI, weight_eOI, None, offsets_e)
    assert torch.equal(expected, gemm(x_RI, weight_eOI.mT.contiguous().mT, None, offsets_e))
    own_eOI, clones_cOI = (part.detach().requires_grad_() for part in weight_eOI.split([3, 1]))
    with_clones = gemm(x_RI, own_eOI, clones_cOI, offsets_e)
    assert torch.equal(expected, with_clones)
    (dweight,) = torch.autograd.grad(expected, weight_eOI, grad_RO)
    assert torch.equal(dweight, torch.cat(torch.autograd.grad(with_clones, [own_eOI, clones_cOI], grad_RO)))


@pytest.mark.parametrize("length", [16, 128])
def test_blocks_of_slots_never_cross_borders(length: int) -> None:
    for borders in BORDERS.values():
        layout = BlockLayout.of(torch.tensor(borders, dtype=torch.int32), 500, length)
        x_RC = torch.arange(500.0)[:, None]
        x_nbC = layout.to_blocks(x_RC)
        for expert, (begin, end) in enumerate(pairwise((0, *borders))):
            is_here = (layout.expert_n == expert)[:, None] & layout.is_taken_nb
            assert torch.equal(x_nbC[is_here][:, 0], torch.arange(float(begin), end))
        assert torch.equal(layout.to_slots(x_nbC)[: borders[-1]], x_RC[: borders[-1]])


def test_finer_scales_keep_small_numbers_in_products() -> None:
    """x over 2^24 along tokens and 2^18 along the summed dimension, where the weight is as small as x is large."""
    torch.manual_seed(0)
    tokens = torch.exp2(torch.randint(-12, 13, (256, 1)))
    inputs = torch.exp2(torch.linspace(-9, 9, 8).round()).repeat_interleave(128)
    x_TI, weight_OI = torch.randn(256, 1024) * tokens * inputs, torch.randn(128, 1024) / inputs
    exact = x_TI.double() @ weight_OI.double().T / tokens
    noise = {
        format: decibels(emulated_linear(x_TI, weight_OI, GemmFormats(format)) / tokens, exact) for format in SCALED
    }
    print({format: round(value, 1) for format, value in noise.items()})
    assert noise["fp8_blockwise"] > 26 and noise["mxfp8"] > 26
    assert noise["fp8_blockwise"] > noise["fp8_rowwise"] + 10
    assert noise["fp8_rowwise"] > noise["fp8_tensorwise"] + 3


@pytest.mark.slow
@pytest.mark.parametrize("format", SCALED)
def test_compiled_results_have_the_same_bits(format: Format) -> None:
    x_RI, weight_eOI, offsets_e, grad_RO = draw((100, 333, 340, 490), torch.bfloat16)
    formats, gemm = in_all(format), emulated_grouped_mm(in_all(format))

    def both(x_RI: Tensor, weight_eOI: Tensor) -> Tensor:
        y_RO = gemm(x_RI, weight_eOI, None, offsets_e)
        return y_RO + emulated_linear(x_RI.nan_to_num(), weight_eOI[0], formats)

    results = []
    for function in (both, torch.compile(both, fullgraph=True, backend="aot_eager")):
        y_RO = function(x_RI, weight_eOI)
        results.append([y_RO, *torch.autograd.grad(y_RO, [x_RI, weight_eOI], grad_RO.nan_to_num())])
    assert all(torch.equal(*pair) for pair in zip(*results, strict=True))


def test_equal_formats_share_a_function_and_graphs_take_new_borders() -> None:
    assert emulated_grouped_mm(in_all("mxfp8")) is emulated_grouped_mm(in_all("mxfp8"))
    x_RI, weight_eOI, offsets_e, _ = draw((100, 333, 340, 490))
    gemm = emulated_grouped_mm(in_all("fp8_rowwise"))
    compiled = torch.compile(gemm, fullgraph=True, backend="aot_eager")
    compiled(x_RI, weight_eOI, None, offsets_e)
    other = torch.tensor([1, 2, 300, 490], dtype=torch.int32)
    with torch.compiler.set_stance("fail_on_recompile"):
        assert torch.equal(compiled(x_RI, weight_eOI, None, other), gemm(x_RI, weight_eOI, None, other))


@pytest.mark.parametrize("format", SCALED)
def test_an_expert_mlp_in_a_format(format: Format) -> None:
    """The activation between both GEMMs is rounded by the second one, along F."""
    torch.manual_seed(0)
    num_rows, num_experts, width, hidden = 64, 4, 64, 96
    x_SD = torch.randn(num_rows, width, requires_grad=True)
    ids_SK = torch.rand(num_rows, num_experts).topk(2).indices
    counts = torch.bincount(ids_SK.flatten(), minlength=num_experts)
    order = ids_SK.flatten().argsort(stable=True)
    slots_SK = torch.empty_like(order).scatter_(0, order, torch.arange(order.numel())).view(num_rows, 2).int()
    slots = ExpertSlots((order // 2).int(), slots_SK, torch.rand(2 * num_rows), counts.cumsum(0).int())
    gate_up = (torch.randn(num_experts, 2, hidden, width) * width**-0.5).requires_grad_()
    down = (torch.randn(num_experts, width, hidden) * hidden**-0.5).requires_grad_()
    weights = ExpertWeights(ExpertParameter(gate_up), ExpertParameter(down))
    grad = torch.randn(num_rows, width)
    results = []
    for gemm in (emulated_grouped_mm(in_all(format)), emulated_grouped_mm(GemmFormats()), grouped_mm_loop):
        y_SD = CompositeMLP(gemm)(x_SD, slots, weights)
        results.append([y_SD, *torch.autograd.grad(y_SD, [x_SD, gate_up, down], grad)])
    rounded, not_rounded, exact = results
    for pair in zip(not_rounded, exact, strict=True):
        torch.testing.assert_close(*pair, rtol=1e-4, atol=1e-4)
    noise = [decibels(*pair) for pair in zip(rounded, exact, strict=True)]
    assert min(noise) > min(FLOORS[format]) - 5, noise  # two GEMMs and a product of both halves
