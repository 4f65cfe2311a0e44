"""Experts in fp8 with scales of blocks: codes are those of the references, products are those of the emulation and near
fp64, and an outlier spoils its block alone."""

import pytest
import torch
from support import load
from torch import Tensor

from titan_moe.config.formats import GemmFormats
from titan_moe.kernels.experts.composite_mlp import CompositeMLP
from titan_moe.kernels.experts.fp8 import passes
from titan_moe.kernels.experts.fp8.format import FP8_BLOCKWISE, FP8_BLOCKWISE_PLAIN_WGRAD
from titan_moe.kernels.experts.fp8.packed import BLOCK, WHOLE_ROW, codes_width, packed_width
from titan_moe.kernels.experts.fp8.requantized import requantized_rows, requantized_slots
from titan_moe.kernels.experts.fp8.rows import (
    dequantize_rows,
    quantize_rows,
    quantize_rows_reference,
    unpack,
    unpack_rows,
)
from titan_moe.kernels.experts.fp8.swiglu import swiglu
from titan_moe.kernels.experts.fused_mlp import FusedMLP
from titan_moe.kernels.experts.grouped_mm import grouped_mm_reference
from titan_moe.kernels.experts.slots import ExpertSlots
from titan_moe.kernels.experts.tiles import GemmTiles, check_cut
from titan_moe.kernels.experts.weights import ExpertParameter, ExpertWeights
from titan_moe.kernels.formats.casts import quantize
from titan_moe.kernels.formats.grouped import emulated_grouped_mm

rowwise = load("kernels/experts/fp8/test_fp8_mlp")
decibels, run, Case = rowwise.decibels, rowwise.run, rowwise.Case
D, F = 256, 128
BLOCKWISE_MLPS = FusedMLP(FP8_BLOCKWISE), FusedMLP(FP8_BLOCKWISE_PLAIN_WGRAD)
FLOOR_DB = 26.0
"""Of a product."""
EMULATED = emulated_grouped_mm(GemmFormats(*("fp8_blockwise",) * 3), power_of_two_scales=True)
with_devices = pytest.mark.parametrize(("device", "dtype"), rowwise.DEVICES)
with_plans = pytest.mark.parametrize("name", rowwise.PLANS)


def draw(name: str, device: str, dtype: torch.dtype, width: int = D) -> Case:
    return rowwise.draw(name, device, dtype, width, F)


def assert_same(actual: Tensor, expected: Tensor) -> None:
    """Of two sums of equal products: fp32, or rounded to bf16."""
    assert decibels(expected, actual) > (45 if actual.is_cuda else 100)


def spread(scales: Tensor) -> Tensor:
    return scales.repeat_interleave(BLOCK, dim=1)


@pytest.mark.parametrize("columns", [WHOLE_ROW, BLOCK])
def test_packed_rows_are_aligned_and_know_their_codes(columns: int) -> None:
    for width in range(128, 16_384, 128):
        num_bytes = packed_width(width, columns)
        assert num_bytes % 16 == 0 and num_bytes >= width + 4 * (width // columns if columns else 1)
        assert codes_width(num_bytes, columns) == width


@with_devices
def test_casts_have_the_bits_of_the_references(device: str, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    x_SD = torch.randn(33, D, device=device, dtype=dtype) * torch.randn(33, D, device=device).mul(9).exp2().to(dtype)
    x_SD[3], x_SD[4], x_SD[5], x_SD[6, :BLOCK] = 0.0, 448.0, 449.0, 0.0
    ours, reference = quantize_rows(x_SD, BLOCK), quantize_rows_reference(x_SD, BLOCK)
    for actual, expected in zip(unpack(ours, BLOCK), unpack(reference, BLOCK), strict=True):
        assert torch.equal(actual.float(), expected.float())
    unpacked = unpack_rows(ours, torch.float32, columns=BLOCK)
    assert torch.equal(unpacked, dequantize_rows(reference, BLOCK))
    for weight_eOI in (torch.randn(3, 256, D, device=device), torch.randn(2, D, BLOCK, device=device)):
        rowwise.assert_weight_has_the_bits_of_the_reference(weight_eOI, dtype, BLOCK)


@with_devices
@with_plans
def test_factors_of_weight_gradients_are_rounded_along_each_experts_slots(
    name: str, device: str, dtype: torch.dtype
) -> None:
    case = draw(name, device, dtype)
    rows_R, tiles = case.slots.rows_R, case.tiles
    packed = quantize_rows(case.x_SD, BLOCK)
    of_slots = packed[rows_R.long()]
    both = (tensor.contiguous() for tensor in unpack(of_slots, BLOCK))
    ways = requantized_rows(packed, rows_R, tiles), requantized_slots(*both, tiles)
    numbers_RD = dequantize_rows(of_slots, BLOCK)
    for tile in range(int(tiles.count)):
        begin, end = int(tiles.begins_M[tile]), int(tiles.ends_M[tile])
        mine = numbers_RD[begin : min(begin + tiles.rows, end)]
        codes, scales, _ = quantize(mine, "fp8_blockwise", "activation", dim=0, power_of_two_scales=True)
        for all_codes, all_scales in ways:
            of_tile = all_codes[:, tile * tiles.rows : (tile + 1) * tiles.rows].float()
            assert torch.equal(of_tile[:, : len(mine)].T, codes.float())
            assert not of_tile[:, len(mine) :].any()
            assert torch.equal(all_scales[tile], scales[0])


@rowwise.FEW_PLANS
@with_devices
@with_plans
def test_each_product_is_that_of_the_emulation_and_near_fp64(name: str, device: str, dtype: torch.dtype) -> None:
    case = draw(name, device, dtype)
    x_SD, dy_SD, slots, weights = case
    (of, of_back), tiles, n = rowwise.quantized(case, FP8_BLOCKWISE), case.tiles, case.num_slots
    rows = slots.rows_R.long()
    own = [weights.gate_up.own.flatten(1, 2), weights.down.own]

    def check(actual: Tensor, left_RI: Tensor, right_eOI: Tensor) -> None:
        left_RI, right_eOI = left_RI.float(), right_eOI.float()
        assert_same(actual[:n], EMULATED(left_RI, right_eOI, None, slots.offsets_e)[:n])
        exact = grouped_mm_reference(left_RI.double(), right_eOI.double(), None, slots.offsets_e)
        assert decibels(exact[:n], actual[:n]) > FLOOR_DB

    x, dy = quantize_rows(x_SD, BLOCK), quantize_rows(dy_SD, BLOCK)
    hidden_R2F = passes._gather_mm(x, slots, of.gate_up, tiles, None)
    check(hidden_R2F, x_SD[rows], own[0])
    active, kept = passes.up(x, slots, of, tiles)
    gate, up = hidden_R2F[:n].double().chunk(2, dim=1)
    exact_RF = torch.nn.functional.silu(gate) * up * slots.scores_R[:n, None].double()
    active_RF = active.codes_RF.float() * spread(active.scales)
    assert decibels(exact_RF, active_RF[:n]) > FLOOR_DB + 2
    assert decibels(hidden_R2F[:n], dequantize_rows(kept, BLOCK)[:n]) > FLOOR_DB + 2
    assert torch.equal(swiglu(hidden_R2F, slots.scores_R, slots.offsets_e, columns=BLOCK)[1][:n], active.scales[:n])
    check(passes.down(active, of, tiles), active_RF, own[1])

    gradients, _ = passes.d_down(dy, x, slots, of_back, kept, tiles)
    plain, _ = passes.d_down(dy, x, slots, of_back, kept, tiles, rounds_weight_gradients=False)
    check(plain.dactive_RF, dy_SD[rows], own[1].mT)
    dhidden_R2F = gradients.codes_R2F.float() * spread(gradients.scales)
    check(passes.d_up(gradients, of_back, tiles), dhidden_R2F, own[0].mT)

    dgate_up, ddown = passes.dw(dy, x, slots, gradients, tiles)
    again_RF = gradients.active_RF.float() * spread(gradients.factors)
    begins = [0, *slots.offsets_e.tolist()]
    factors = (
        (dgate_up.flatten(1, 2), dhidden_R2F, dequantize_rows(x, BLOCK)[rows]),
        (ddown, dequantize_rows(dy, BLOCK)[rows], again_RF),
    )
    for actual, a_RA, b_RB in factors:
        rounded = EMULATED(b_RB, weight := torch.zeros_like(actual.float()).requires_grad_(), None, slots.offsets_e)
        rounded[:n].backward(a_RA[:n])
        exact = [a_RA[b:e].double().T @ b_RB[b:e].double() for b, e in zip(begins, begins[1:], strict=False)]
        assert_same(actual, weight.grad)
        assert decibels(torch.stack(exact), actual) > FLOOR_DB
        assert not any(bool(actual[i].any()) for i in range(len(actual)) if begins[i] == begins[i + 1])


@with_devices
def test_cuts_give_the_same_bits(device: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    """One block of outputs in a thread block, or two, of which the last may have one."""
    case = draw("random", device, dtype, 3 * BLOCK)
    results = []
    for outputs in (BLOCK, 2 * BLOCK):
        monkeypatch.setattr(passes, "BLOCK_CUT", passes.BLOCK_CUT._replace(outputs=outputs))
        results.append(run(BLOCKWISE_MLPS[0], case))
    assert all(torch.equal(results[0][key], results[1][key]) for key in results[0])


@pytest.mark.few(
    "random-cuda-dtype1",
    "skewed-cpu-dtype0",
    "skewed-cuda-dtype1",
    "empty_expert-cuda-dtype1",
    "padded-cpu-dtype0",
    "padded-cuda-dtype1",
)
@with_devices
@with_plans
def test_the_mlp_is_as_near_fp64_as_its_emulation(name: str, device: str, dtype: torch.dtype) -> None:
    case = draw(name, device, dtype)
    exact = run(CompositeMLP(grouped_mm_reference), case, torch.float64)
    emulated, actual = run(CompositeMLP(EMULATED), case), run(BLOCKWISE_MLPS[0], case)
    for key, expected in exact.items():
        assert actual[key].isfinite().all()
        errors = decibels(expected, actual[key]), decibels(expected, emulated[key])
        assert errors[0] > errors[1] - (2.0 if key == "y" else rowwise.LOSS_OF_KEPT_DB), (key, errors)


@with_devices
def test_an_outlier_spoils_its_block_alone(device: str, dtype: torch.dtype) -> None:
    """A channel that is 2 ** 20 times as large, and no weights for its block: the result is that of other blocks."""
    case = draw("random", device, dtype)
    x_SD, gate_up = case.x_SD.clone(), case.weights.gate_up.own.clone()
    x_SD[:, 5] *= 2.0**20
    gate_up[..., :BLOCK] = 0
    case = case._replace(x_SD=x_SD, weights=case.weights._replace(gate_up=ExpertParameter(gate_up)))
    exact = run(CompositeMLP(grouped_mm_reference), case, torch.float64)
    errors = []
    for mlp in (BLOCKWISE_MLPS[0], rowwise.ROWWISE_MLPS[0]):
        results = run(mlp, case)
        of_others = exact["dgate_up"][..., BLOCK:], results["dgate_up"][..., BLOCK:]
        errors.append((decibels(exact["y"], results["y"]), decibels(*of_others)))
    assert min(errors[0]) > 15 and max(errors[1]) < 3, errors


@pytest.mark.few("inf-cpu-dtype0", "inf-cuda-dtype1", "-inf-cuda-dtype1", "nan-cpu-dtype0", "nan-cuda-dtype1")
@with_devices
@pytest.mark.parametrize("number", [float("inf"), float("-inf"), float("nan")])
def test_what_is_not_finite_stays_so(device: str, dtype: torch.dtype, number: float) -> None:
    rowwise.assert_spoilt(BLOCKWISE_MLPS[0], draw("random", device, dtype), number)


@with_devices
def test_plain_weight_gradients_have_one_rounding_less(device: str, dtype: torch.dtype) -> None:
    rowwise.assert_nearer_with_plain_weight_grads(BLOCKWISE_MLPS, draw("skewed", device, dtype))


@with_devices
def test_codes_stand_for_weights(device: str, dtype: torch.dtype) -> None:
    case = draw("skewed", device, dtype)
    masters = (parameter.own.float() for parameter in case.weights[:2])
    codes = tuple(FP8_BLOCKWISE.quantize(*masters, dtype.itemsize == 2))

    def with_codes(x_SD: Tensor, slots: ExpertSlots, weights: ExpertWeights) -> Tensor:
        unread = [parameter.own * torch.nan for parameter in weights[:2]]
        return BLOCKWISE_MLPS[0](x_SD, slots, ExpertWeights(*map(ExpertParameter, unread), codes=codes))

    expected, actual = run(BLOCKWISE_MLPS[0], case), run(with_codes, case)
    for key in ("y", "dx", "dscores"):
        assert torch.equal(actual[key], expected[key])


@pytest.mark.gpu
@pytest.mark.parametrize("sizes", [(1, 5000, 0, 333), (0, 0, 0, 4097), (128, 256, 127, 129), (0, 0, 0, 0)], ids=str)
def test_experts_of_any_size_are_those_of_the_emulation(sizes: tuple[int, ...]) -> None:
    """At widths of several tiles, with slots past the last expert that hold NaN."""
    torch.manual_seed(0)
    device, width, hidden, num_slots = "cuda", 1024, 384, sum(sizes)
    bf16 = {"device": device, "dtype": torch.bfloat16}
    num_rows = max(num_slots, 1)
    rows_R = torch.cat([torch.randperm(num_rows)[:num_slots], torch.zeros(17, dtype=torch.long)]).int().to(device)
    slots_S1 = torch.full((num_rows, 1), -1, dtype=torch.int32, device=device)
    slots_S1[rows_R[:num_slots].long(), 0] = torch.arange(num_slots, dtype=torch.int32, device=device)
    offsets_e = torch.tensor(sizes, device=device).cumsum(0).int()
    scores_R = torch.rand(num_slots + 17, device=device)
    scores_R[num_slots:] = torch.nan
    gate_up = torch.randn(len(sizes), 2, hidden, width, **bf16) / width**0.5
    down = torch.randn(len(sizes), width, hidden, **bf16) / hidden**0.5
    case = Case(
        torch.randn(num_rows, width, **bf16),
        torch.randn(num_rows, width, **bf16),
        ExpertSlots(rows_R, slots_S1, scores_R, offsets_e),
        ExpertWeights(ExpertParameter(gate_up), ExpertParameter(down)),
    )
    actual = run(BLOCKWISE_MLPS[0], case)
    if not num_slots:
        assert not any(bool(result.any()) for result in actual.values())
        return
    exact = run(CompositeMLP(grouped_mm_reference), case, torch.float64)
    emulated = run(CompositeMLP(EMULATED), case)
    for key, expected in exact.items():
        errors = decibels(expected, actual[key]), decibels(expected, emulated[key])
        assert errors[0] > errors[1] - (2.0 if key == "y" else rowwise.LOSS_OF_KEPT_DB), (key, errors)


def test_widths_that_are_no_blocks_are_refused() -> None:
    weights = ExpertWeights(ExpertParameter(torch.zeros(2, 2, 96, 256)), ExpertParameter(torch.zeros(2, 256, 96)))
    with pytest.raises(ValueError, match='multiples of 128, not 256 and 96; take precision.experts = "fp8_rowwise"'):
        FP8_BLOCKWISE.operands(weights)


def test_cuts_that_are_no_blocks_are_refused() -> None:
    with pytest.raises(ValueError, match="does not fit blocks of 128; take inner=128, outputs=128 or twice that"):
        check_cut(GemmTiles(outputs=256, inner=64), BLOCK)
    check_cut(GemmTiles(outputs=256, inner=128), BLOCK)
