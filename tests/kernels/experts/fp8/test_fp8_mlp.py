"""Experts in fp8: casts are those of the references, each product is near that of fp64, and no slot sees another."""

from itertools import chain
from typing import Any, NamedTuple

import pytest
import torch
from support.kernel_samples import sample_plans
from torch import Tensor

from titan_moe.config.formats import GemmFormats
from titan_moe.kernels.experts.composite_mlp import CompositeMLP
from titan_moe.kernels.experts.fp8 import passes
from titan_moe.kernels.experts.fp8.format import FP8_ROWWISE, FP8_ROWWISE_PLAIN_WGRAD, Fp8Format, codes_of
from titan_moe.kernels.experts.fp8.packed import WHOLE_ROW
from titan_moe.kernels.experts.fp8.passes import QuantizedExperts
from titan_moe.kernels.experts.fp8.rows import (
    dequantize_rows,
    quantize_rows,
    quantize_rows_reference,
    unpack_rows,
)
from titan_moe.kernels.experts.fp8.swiglu import swiglu
from titan_moe.kernels.experts.fp8.transposed import transposed_rows
from titan_moe.kernels.experts.fp8.weights import quantize_one_way, quantize_weight, quantize_weight_reference
from titan_moe.kernels.experts.fused_mlp import FusedMLP
from titan_moe.kernels.experts.grouped_mm import grouped_mm_reference
from titan_moe.kernels.experts.slots import ExpertSlots
from titan_moe.kernels.experts.tiles import Tiles, plan_tiles
from titan_moe.kernels.experts.weights import ExpertParameter, ExpertWeights
from titan_moe.kernels.formats.grouped import emulated_grouped_mm

DEVICES = [
    pytest.param("cpu", torch.float32, marks=pytest.mark.interpreted),
    pytest.param("cuda", torch.bfloat16, marks=pytest.mark.gpu),
]
ROWWISE_MLPS = FusedMLP(FP8_ROWWISE), FusedMLP(FP8_ROWWISE_PLAIN_WGRAD)
PLANS = ("random", "skewed", "empty_expert", "padded")
D, F = 64, 48
FLOOR_DB = 26.0
"""Of a product."""
LOSS_OF_KEPT_DB = 8.0
"""Gradients may be so much farther from fp64 than those of the emulation, which keeps pre-activations unrounded."""

FEW_PLANS = pytest.mark.few(
    "random-cuda-dtype1",
    "skewed-cpu-dtype0",
    "skewed-cuda-dtype1",
    "empty_expert-cpu-dtype0",
    "empty_expert-cuda-dtype1",
    "padded-cpu-dtype0",
    "padded-cuda-dtype1",
)
"""Of plans, devices and dtypes."""


class Case(NamedTuple):
    x_SD: Tensor
    dy_SD: Tensor
    slots: ExpertSlots
    weights: ExpertWeights

    @property
    def num_slots(self) -> int:
        return int(self.slots.offsets_e[-1])

    @property
    def tiles(self) -> Tiles:
        return plan_tiles(self.slots.offsets_e, self.slots.rows_R.numel(), 128)


def draw(name: str, device: str, dtype: torch.dtype, D: int = D, F: int = F) -> Case:
    torch.manual_seed(0)
    plans = {plan[0]: plan[1:] for plan in sample_plans(torch.device(device))}
    rows_R, slots_SK, offsets_e, num_experts = plans[name]
    num_rows = slots_SK.shape[0]
    x_SD = torch.randn(num_rows, D, device=device, dtype=dtype)
    x_SD[-1] = 0
    dy_SD = 1e-3 * torch.randn(num_rows, D, device=device, dtype=dtype)
    dy_SD *= torch.randn(num_rows, 1, device=device).exp().to(dtype)
    gate_up = torch.randn(num_experts, 2, F, D, device=device, dtype=dtype) / D**0.5
    down = torch.randn(num_experts, D, F, device=device, dtype=dtype) / F**0.5
    scores_R = torch.rand(rows_R.numel(), device=device)
    slots = ExpertSlots(rows_R, slots_SK, scores_R, offsets_e)
    return Case(x_SD, dy_SD, slots, ExpertWeights(ExpertParameter(gate_up), ExpertParameter(down)))


def decibels(exact: Tensor, rounded: Tensor) -> float:
    exact, rounded = exact.detach().double(), rounded.detach().double()
    return float(10 * torch.log10(exact.square().sum() / (exact - rounded).square().sum()))


def quantized(case: Case, format: Fp8Format = FP8_ROWWISE) -> list[QuantizedExperts]:
    """For forward and for backward."""
    weights = format.operands(case.weights)
    return [codes_of(weights, format.columns, for_backward=way) for way in (False, True)]


def run(mlp: Any, case: Case, dtype: torch.dtype | None = None) -> dict[str, Tensor]:
    """The result and all gradients of an MLP."""
    x_SD, scores_R, *weights = (
        tensor.to(dtype or tensor.dtype).clone().requires_grad_()
        for tensor in (case.x_SD, case.slots.scores_R, case.weights.gate_up.own, case.weights.down.own)
    )
    slots = case.slots._replace(scores_R=scores_R)
    y_SD = mlp(x_SD, slots, ExpertWeights(*(ExpertParameter(weight) for weight in weights)))
    y_SD.backward(case.dy_SD.to(y_SD.dtype))
    tensors = (y_SD, x_SD.grad, scores_R.grad[: case.num_slots], *(weight.grad for weight in weights))
    return dict(zip(("y", "dx", "dscores", "dgate_up", "ddown"), tensors, strict=True))


def assert_weight_has_the_bits_of_the_reference(
    master_eOI: Tensor, dtype: torch.dtype, columns: int = WHOLE_ROW
) -> None:
    """Both ways at once, of a master, and one way, of a weight of compute's dtype."""
    expected = quantize_weight_reference(master_eOI, dtype, columns)
    both = quantize_weight(master_eOI, dtype, columns)
    each = [quantize_one_way(master_eOI.to(dtype), columns, transposed=way) for way in (False, True)]
    for actual in (both, each):
        for ours, theirs in zip(chain(*actual), chain(*expected), strict=True):
            assert ours.shape == theirs.shape and torch.equal(ours.float(), theirs.float())


@pytest.mark.parametrize(("device", "dtype"), DEVICES)
def test_casts_have_the_bits_of_the_references(device: str, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    x_SD = torch.randn(33, D, device=device, dtype=dtype) * torch.randn(33, 1, device=device).mul(9).exp2().to(dtype)
    x_SD[3], x_SD[4], x_SD[5] = 0.0, 448.0, 449.0
    ours, reference = quantize_rows(x_SD), quantize_rows_reference(x_SD)
    assert torch.equal(dequantize_rows(ours), dequantize_rows(reference))
    for weight_eOI in (torch.randn(3, 80, D, device=device), torch.randn(2, 256, 384, device=device)):
        assert_weight_has_the_bits_of_the_reference(weight_eOI, dtype)


@FEW_PLANS
@pytest.mark.parametrize(("device", "dtype"), DEVICES)
@pytest.mark.parametrize("name", PLANS)
def test_each_product_is_near_fp64(name: str, device: str, dtype: torch.dtype) -> None:
    case = draw(name, device, dtype)
    x_SD, dy_SD, slots, weights = case
    (of, of_back), tiles, n = quantized(case), case.tiles, case.num_slots
    rows = slots.rows_R[:n].long()
    gate_up, down = weights.gate_up.own.double().flatten(1, 2), weights.down.own.double()

    def product(left_RI: Tensor, right_eOI: Tensor) -> Tensor:
        return grouped_mm_reference(left_RI.double(), right_eOI, None, slots.offsets_e)[:n]

    x, dy = quantize_rows(x_SD), quantize_rows(dy_SD)
    _, kept = passes.up(x, slots, of, tiles)
    assert decibels(product(x_SD[rows], gate_up), dequantize_rows(kept)[:n]) > FLOOR_DB  # rounded again, as kept
    exact_R2F = product(x_SD[rows], gate_up).to(dtype)
    full_R2F = exact_R2F.new_zeros(slots.rows_R.numel(), 2 * F)
    full_R2F[:n] = exact_R2F
    codes_RF, scales_R, kept = swiglu(full_R2F, slots.scores_R, slots.offsets_e)
    gate, up = exact_R2F.double().chunk(2, dim=1)
    active_RF = torch.nn.functional.silu(gate) * up * slots.scores_R[:n, None].double()
    assert decibels(active_RF, codes_RF[:n].float() * scales_R[:n, None]) > FLOOR_DB + 2
    y_RD = passes.down(passes.Activations(codes_RF, scales_R), of, tiles)[:n]
    assert decibels(product(active_RF, down), y_RD) > FLOOR_DB
    gradients, dscores_R = passes.d_down(dy, x, slots, of_back, kept, tiles)
    plain, _ = passes.d_down(dy, x, slots, of_back, kept, tiles, rounds_weight_gradients=False)
    assert not len(gradients.dactive_RF) and not len(plain.active_RF)
    assert torch.equal(plain.codes_R2F[:n].float(), gradients.codes_R2F[:n].float())
    dactive_RF = product(dy_SD[rows], down.mT)
    assert decibels(dactive_RF, plain.dactive_RF[:n]) > FLOOR_DB
    gate, up = dequantize_rows(kept)[:n].double().chunk(2, dim=1)
    sigmoid = gate.sigmoid()
    weighted = plain.dactive_RF[:n].double() * slots.scores_R[:n, None]
    dgate = weighted * up * (sigmoid + gate * sigmoid * (1 - sigmoid))
    kept_active_RF = gate * sigmoid * up * slots.scores_R[:n, None]
    dhidden_R2F = torch.cat([dgate, weighted * gate * sigmoid], dim=1)
    rounded_R2F = gradients.codes_R2F[:n].float() * gradients.scales[:n, None]
    assert decibels(dhidden_R2F, rounded_R2F) > FLOOR_DB
    dslots_RD = passes.d_up(gradients, of_back, tiles)[:n]
    assert decibels(product(dhidden_R2F, gate_up.mT), dslots_RD) > FLOOR_DB
    dgate_up, ddown = passes.dw(dy, x, slots, gradients, tiles)
    begins = [0, *slots.offsets_e.tolist()]
    for expert, (begin, end) in enumerate(zip(begins, begins[1:], strict=False)):
        if end == begin:
            assert not dgate_up[expert].any() and not ddown[expert].any()
    both = [
        torch.stack([a[b:c].T @ z[b:c] for b, c in zip(begins, begins[1:], strict=False)])
        for a, z in ((dhidden_R2F, x_SD[rows].double()), (dy_SD[rows].double(), kept_active_RF))
    ]
    assert decibels(both[0], dgate_up.flatten(1, 2)) > FLOOR_DB
    assert decibels(both[1], ddown) > FLOOR_DB
    exact_dscores_R = (plain.dactive_RF[:n].double() * gate * sigmoid * up).sum(1)
    assert dscores_R.shape == scales_R.shape and decibels(exact_dscores_R, dscores_R[:n]) > 40


@pytest.mark.few(
    "random-cuda-dtype1",
    "skewed-cpu-dtype0",
    "skewed-cuda-dtype1",
    "empty_expert-cuda-dtype1",
    "padded-cpu-dtype0",
    "padded-cuda-dtype1",
)
@pytest.mark.parametrize(("device", "dtype"), DEVICES)
@pytest.mark.parametrize("name", PLANS)
def test_the_mlp_is_as_near_fp64_as_its_emulation(name: str, device: str, dtype: torch.dtype) -> None:
    case = draw(name, device, dtype)
    exact = run(CompositeMLP(grouped_mm_reference), case, torch.float64)
    rowwise = GemmFormats(*("fp8_rowwise",) * 3)
    emulated = run(CompositeMLP(emulated_grouped_mm(rowwise)), case)
    actual = run(ROWWISE_MLPS[0], case)
    for key, expected in exact.items():
        assert actual[key].isfinite().all()
        errors = decibels(expected, actual[key]), decibels(expected, emulated[key])
        assert errors[0] > errors[1] - (2.0 if key == "y" else LOSS_OF_KEPT_DB), (key, errors)


@pytest.mark.parametrize(("device", "dtype"), DEVICES)
def test_rows_without_gradient_take_nothing_from_others(device: str, dtype: torch.dtype) -> None:
    """Tokens without labels have gradients of exactly zero, and others have small ones."""
    case = draw("random", device, dtype)
    dy_SD = case.dy_SD * 1e-4
    dy_SD[::4] = 0
    case = case._replace(dy_SD=dy_SD)
    exact, actual = run(CompositeMLP(grouped_mm_reference), case, torch.float64), run(ROWWISE_MLPS[0], case)
    for key in ("dgate_up", "ddown"):
        for expected, grad in zip(exact[key], actual[key], strict=True):
            assert not expected.any() or decibels(expected, grad) > 14, key  # of each expert
    nothing = run(ROWWISE_MLPS[0], case._replace(dy_SD=torch.zeros_like(dy_SD)))
    assert not any(bool(nothing[key].any()) for key in ("dx", "dscores", "dgate_up", "ddown"))


def assert_spoilt(mlp: Any, case: Case, number: float) -> None:
    """A number that is not finite reaches all that depends on it."""
    row = int(case.slots.rows_R[0])
    for name, reached in (("x_SD", ("y", "dgate_up")), ("dy_SD", ("dx", "dgate_up", "ddown"))):
        spoilt = getattr(case, name).clone()
        spoilt[row, 3] = number
        results = run(mlp, case._replace(**{name: spoilt}))
        assert all(not results[key].isfinite().all() for key in reached), name


@pytest.mark.few("inf-cpu-dtype0", "inf-cuda-dtype1", "-inf-cuda-dtype1", "nan-cpu-dtype0", "nan-cuda-dtype1")
@pytest.mark.parametrize(("device", "dtype"), DEVICES)
@pytest.mark.parametrize("number", [float("inf"), float("-inf"), float("nan")])
def test_what_is_not_finite_stays_so(device: str, dtype: torch.dtype, number: float) -> None:
    assert_spoilt(ROWWISE_MLPS[0], draw("random", device, dtype), number)


@pytest.mark.parametrize(("device", "dtype"), DEVICES)
def test_unpacked_rows_end_with_the_memory(device: str, dtype: torch.dtype) -> None:
    packed = quantize_rows(torch.randn(16, D, device=device, dtype=dtype))
    base = torch.tensor([12], device=device)
    out = unpack_rows(packed, dtype, base=base, num_rows=9)
    assert out.shape == (9, D) and torch.equal(out[:4].float(), dequantize_rows(packed)[12:])
    assert unpack_rows(packed, dtype, num_rows=0).shape == (0, D)


def assert_nearer_with_plain_weight_grads(mlps: Any, case: Case) -> None:
    """Of experts with rounded and with plain gradients of weights, which differ in these alone."""
    exact = run(CompositeMLP(grouped_mm_reference), case, torch.float64)
    rounded, plain = (run(mlp, case) for mlp in mlps)
    for key in ("y", "dx", "dscores"):
        assert torch.equal(plain[key], rounded[key])
    for key in ("dgate_up", "ddown"):
        assert decibels(exact[key], plain[key]) > decibels(exact[key], rounded[key])


@pytest.mark.parametrize(("device", "dtype"), DEVICES)
def test_plain_weight_gradients_have_one_rounding_less(device: str, dtype: torch.dtype) -> None:
    assert_nearer_with_plain_weight_grads(ROWWISE_MLPS, draw("skewed", device, dtype))


@pytest.mark.parametrize(("device", "dtype"), DEVICES)
def test_codes_stand_for_weights(device: str, dtype: torch.dtype) -> None:
    case = draw("skewed", device, dtype)
    codes = tuple(
        FP8_ROWWISE.quantize(case.weights.gate_up.own.float(), case.weights.down.own.float(), dtype.itemsize == 2)
    )

    def with_codes(x_SD: Tensor, slots: ExpertSlots, weights: ExpertWeights) -> Tensor:
        unread = [parameter.own * torch.nan for parameter in weights[:2]]
        return ROWWISE_MLPS[0](x_SD, slots, ExpertWeights(*map(ExpertParameter, unread), codes=codes))

    expected, actual = run(ROWWISE_MLPS[0], case), run(with_codes, case)
    for key in ("y", "dx", "dscores"):
        assert torch.equal(actual[key], expected[key])


@pytest.mark.parametrize(("device", "dtype"), DEVICES)
def test_transposed_rows_are_the_codes_of_each_slot(device: str, dtype: torch.dtype) -> None:
    case = draw("random", device, dtype)
    x, tiles = quantize_rows(case.x_SD), case.tiles
    columns = transposed_rows(x, case.slots.rows_R, tiles).float()
    for tile in range(int(tiles.count)):
        begin, end = int(tiles.begins_M[tile]), int(tiles.ends_M[tile])
        slots = range(begin, min(begin + tiles.rows, end))
        mine = columns[:, tile * tiles.rows : (tile + 1) * tiles.rows]
        assert torch.equal(mine[:, : len(slots)].T, x[case.slots.rows_R[slots.start : slots.stop].long(), :D].float())
        assert not mine[:, len(slots) :].any()


def test_autograd_keeps_parameters_where_codes_were_not_given() -> None:
    """FSDP frees parameters after forward; codes of all layers would stay."""
    kept = FP8_ROWWISE.operands(
        ExpertWeights(ExpertParameter(torch.zeros(2, 2, 16, 32)), ExpertParameter(torch.zeros(2, 32, 16)))
    )
    assert len(kept) == 2


def test_experts_with_biases_or_with_clones_beside_codes_are_refused() -> None:
    weight = ExpertParameter(torch.zeros(2, 2, 16, 16), torch.zeros(1, 2, 16, 16))
    with pytest.raises(ValueError, match='no biases; take precision.experts = "compute"'):
        FP8_ROWWISE.operands(ExpertWeights(weight, weight, down_bias=weight))
    with pytest.raises(ValueError, match="codes stand for weights here, and clones are of weights"):
        FP8_ROWWISE.operands(ExpertWeights(weight, weight, codes=(weight.own,)))
