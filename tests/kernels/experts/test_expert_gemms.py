"""The expert GEMMs compute the same however their work is cut."""

import importlib
from pathlib import Path
from typing import Any

import pytest
import torch
from support import arenas
from support.kernel_samples import SAMPLES, sample_plans
from torch import Tensor

from titan_moe.kernels.experts import passes
from titan_moe.kernels.experts import swiglu_backward as swiglu_backward_file
from titan_moe.kernels.experts.gather_mm import gather_mm
from titan_moe.kernels.experts.slot_mm import slot_mm
from titan_moe.kernels.experts.slots import ExpertSlots
from titan_moe.kernels.experts.swiglu import weighted_swiglu
from titan_moe.kernels.experts.swiglu_backward import swiglu_backward
from titan_moe.kernels.experts.tiles import SLACK, GemmTiles, Tiles, plan_tiles, plan_tiles_reference
from titan_moe.kernels.experts.up import expert_up
from titan_moe.kernels.experts.weight_grad import WeightGradTiles, expert_weight_grad
from titan_moe.kernels.experts.weights import ExpertParameter, ExpertWeights
from titan_moe.kernels.permute.rows import plan_slots
from titan_moe.kernels.registry import KERNELS, load_all

pytestmark = pytest.mark.slow

load_all()
DEVICES = [
    pytest.param("cpu", torch.float32, 1e-5, marks=pytest.mark.interpreted),
    pytest.param("cuda", torch.bfloat16, 2e-2, marks=pytest.mark.gpu),
]
NAMES = ("random", "skewed", "empty_expert", "padded")
WIDTH, HIDDEN = 64, 40


def plan(name: str, device: str) -> tuple[Tensor, Tensor, int]:
    """Rows, borders and number of experts."""
    torch.manual_seed(0)
    plans = {plan[0]: plan[1:] for plan in sample_plans(torch.device(device))}
    rows_R, _, offsets_e, num_experts = plans[name]
    return rows_R, offsets_e, num_experts


def spans(offsets_e: Tensor) -> list[slice]:
    ends = offsets_e.tolist()
    return [slice(begin, end) for begin, end in zip([0, *ends[:-1]], ends, strict=True)]


def assert_close(actual: Tensor, expected: Tensor, tolerance: float) -> None:
    error = (actual.double() - expected.double()).norm() / expected.double().norm().clamp(min=1e-6)
    assert error < tolerance


@pytest.mark.parametrize(("device", "dtype", "tolerance"), DEVICES)
@pytest.mark.parametrize("cut", [GemmTiles(outputs=128), GemmTiles(outputs=128, group=1)], ids=str)
@pytest.mark.parametrize("name", NAMES)
def test_expert_up(name: str, cut: GemmTiles, device: str, dtype: torch.dtype, tolerance: float) -> None:
    rows_R, offsets_e, num_experts = plan(name, device)
    x_SD = torch.randn(17, WIDTH, device=device, dtype=dtype)
    scores_R = torch.rand(rows_R.numel(), device=device)
    weight = torch.randn(num_experts, 2, HIDDEN, WIDTH, device=device, dtype=dtype) / 8
    tiles = plan_tiles(offsets_e, rows_R.numel(), 128)
    hidden_R2F, active_RF = expert_up(x_SD, rows_R, scores_R, weight, tiles, cut)
    for expert, span in enumerate(spans(offsets_e)):
        expected = x_SD[rows_R[span]].double() @ weight[expert].flatten(0, 1).double().T
        assert_close(hidden_R2F[span], expected, tolerance)
        assert_close(active_RF[span], weighted_swiglu(hidden_R2F[span], scores_R[span]), tolerance)


GATHER_CUTS = [
    GemmTiles(),
    GemmTiles(outputs=128, group=3),
]


@pytest.mark.parametrize(("device", "dtype", "tolerance"), DEVICES)
@pytest.mark.parametrize("cut", GATHER_CUTS, ids=str)
@pytest.mark.parametrize("out_width", [304, 232])  # half a cut holds the last columns, or it does not
@pytest.mark.parametrize("name", NAMES)
def test_gather_mm(
    name: str, out_width: int, cut: GemmTiles, device: str, dtype: torch.dtype, tolerance: float
) -> None:
    rows_R, offsets_e, num_experts = plan(name, device)
    x_SD = torch.randn(17, WIDTH, device=device, dtype=dtype)
    weight = torch.randn(num_experts, WIDTH, out_width, device=device, dtype=dtype) / 8
    out_RO = gather_mm(x_SD, rows_R, weight, plan_tiles(offsets_e, rows_R.numel(), 128), cut)
    for expert, span in enumerate(spans(offsets_e)):
        assert_close(out_RO[span], x_SD[rows_R[span]].double() @ weight[expert].double(), tolerance)


CUTS = [
    WeightGradTiles(),
    WeightGradTiles(32, 16, slots=32, group=2),
    WeightGradTiles(width_a=256, width_b=128),
]


@pytest.mark.parametrize(("device", "dtype", "tolerance"), DEVICES)
@pytest.mark.parametrize("cut", CUTS, ids=str)
@pytest.mark.parametrize("name", NAMES)
def test_expert_weight_grad(name: str, cut: WeightGradTiles, device: str, dtype: torch.dtype, tolerance: float) -> None:
    rows_R, offsets_e, _ = plan(name, device)
    x_SD = torch.randn(17, WIDTH, device=device, dtype=dtype)
    grad_RF = torch.randn(rows_R.numel(), HIDDEN, device=device, dtype=dtype)
    end = int(offsets_e[-1])
    grad_RF[end + SLACK :] = float("nan")  # nobody may read it
    plain = expert_weight_grad(grad_RF, x_SD, rows_R, offsets_e, cut=cut)
    transposed = expert_weight_grad(grad_RF, x_SD, rows_R, offsets_e, is_transposed=True, cut=cut)
    for expert, span in enumerate(spans(offsets_e)):
        expected = grad_RF[span].double().T @ x_SD[rows_R[span]].double()
        assert_close(plain[expert], expected, tolerance)
        assert_close(transposed[expert], expected.T, tolerance)


@pytest.mark.parametrize(("device", "dtype", "tolerance"), DEVICES)
def test_wide_experts_gather_first(
    device: str, dtype: torch.dtype, tolerance: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The same sums in another order at most, and in a graph."""
    op = KERNELS["fused_expert_mlp"].op
    compiled = torch.compile(op, fullgraph=True, backend="aot_eager", dynamic=False)
    for sample in SAMPLES["fused_expert_mlp"].draw(torch.device(device), dtype):
        torch._dynamo.reset()
        results = []
        for run, width in ((op, 10_000), (op, 0), (compiled, 0)):
            monkeypatch.setattr(passes, "GATHERS_BEFORE_WEIGHT_GRADIENTS_FROM", width)
            inputs = [x.detach().requires_grad_() for x in sample.args[:4]]
            y_SD = run(*inputs, *sample.args[4:])
            results.append([y_SD.detach(), *torch.autograd.grad(y_SD, inputs, torch.ones_like(y_SD))])
        for fused, *gathered in zip(*results, strict=True):
            for other in gathered:
                assert_close(other, fused, tolerance)


def test_what_the_sweep_times_fits_an_h200(hopper: list[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(Path(__file__).parents[3] / "tools")
    sweep = importlib.import_module("sweep_expert_gemms")
    for problem in sweep.problems("qwen3_ep8", torch.device("meta"), ["up", "down_grad", "weight_grad"]):
        # cuts that differ in the order of their tiles alone are the same code but for a constant
        for cut in {cut._replace(group=0): cut for cut in problem.candidates}.values():
            hopper.clear()
            problem.run(cut)
            assert hopper[-1].fits and hopper[-1].num_matrix_ops > 0, f"{problem.name} {cut}: {hopper[-1]}"


@pytest.mark.parametrize(("device", "dtype", "tolerance"), DEVICES)
def test_slots_behind_the_last_expert_are_zeros_where_weight_gradients_read_them(
    device: str, dtype: torch.dtype, tolerance: float
) -> None:
    """Whatever memory held there: gradients of a bound on slots with room are those of as many slots as there are."""
    torch.manual_seed(0)
    ids_SK = torch.rand(17, 5, device=device).topk(3).indices
    op = KERNELS["fused_expert_mlp"].op
    sample = SAMPLES["fused_expert_mlp"].draw(torch.device(device), dtype)[0]
    results = []
    torch.use_deterministic_algorithms(True)  # fills new memory with NaN
    try:
        for room in (0, 1, SLACK, 3 * SLACK):
            plan = plan_slots(ids_SK, 5, ids_SK.numel() + room)[:3]
            inputs = [x.detach().requires_grad_() for x in sample.args[:4]]
            y_SD = op(*inputs, *plan)
            results.append([y_SD.detach(), *torch.autograd.grad(y_SD, inputs, torch.ones_like(y_SD))])
    finally:
        torch.use_deterministic_algorithms(False)
    for exact, *roomy in zip(*results, strict=True):
        for other in roomy:
            assert_close(other, exact, tolerance)


@pytest.mark.parametrize(("device", "dtype", "tolerance"), DEVICES)
@pytest.mark.parametrize("name", NAMES)
def test_rows_and_pre_activations_may_be_those_of_several_layers(
    name: str, device: str, dtype: torch.dtype, tolerance: float
) -> None:
    """A base on the device changes no bit, and nothing is written but the layer's slots."""
    rows_R, offsets_e, num_experts = plan(name, device)
    num_slots, end, base = rows_R.numel(), int(offsets_e[-1]), arenas.base(device)
    x_SD = torch.randn(17, WIDTH, device=device, dtype=dtype)
    scores_R = torch.rand(num_slots, device=device)
    weight = torch.randn(num_experts, 2, HIDDEN, WIDTH, device=device, dtype=dtype) / 8
    tiles, x_arena = plan_tiles(offsets_e, num_slots, 128), arenas.surround(x_SD, arenas.ROW)
    hidden_R2F, active_RF = expert_up(x_SD, rows_R, scores_R, weight, tiles)
    hidden_R2F[end:] = float("nan")
    arena = arenas.surround(torch.full_like(hidden_R2F, float("nan")), arenas.SLOT)
    written, active = expert_up(x_arena, rows_R, scores_R, weight, tiles, hidden=arena, base=base)
    assert written is arena and arenas.same_bits(arena, arenas.surround(hidden_R2F, arenas.SLOT))
    assert active.shape == active_RF.shape and torch.equal(active[:end], active_RF[:end])

    down = torch.randn(num_experts, WIDTH, HIDDEN, device=device, dtype=dtype) / 8
    dactive_RF = gather_mm(x_SD, rows_R, down, tiles)
    dactive_RF[end:] = float("nan")
    dactive_arena = arenas.surround(torch.full_like(dactive_RF, float("nan")), arenas.SLOT)
    written = gather_mm(x_arena, rows_R, down, tiles, base=base, out=dactive_arena, out_base=base)
    assert written is dactive_arena and arenas.same_bits(written, arenas.surround(dactive_RF, arenas.SLOT))

    expected = swiglu_backward(dactive_RF, hidden_R2F, scores_R, offsets_e)
    actual = swiglu_backward(dactive_arena, arena, scores_R, offsets_e, base, base)
    for one, other in zip(actual, expected, strict=True):
        assert one is not None and other is not None and one.shape == other.shape
        assert torch.equal(one[:end], other[:end])

    dhidden_R2F = actual[0]
    dw = expert_weight_grad(dhidden_R2F, x_arena, rows_R, offsets_e, base=base)
    assert torch.equal(dw, expert_weight_grad(dhidden_R2F, x_SD, rows_R, offsets_e))


@pytest.mark.parametrize(("device", "dtype", "tolerance"), DEVICES)
@pytest.mark.parametrize("gathers_from", [0, 10_000])
def test_weight_gradients_of_rows_of_several_layers(
    gathers_from: int, device: str, dtype: torch.dtype, tolerance: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(passes, "GATHERS_BEFORE_WEIGHT_GRADIENTS_FROM", gathers_from)
    rows_R, offsets_e, _ = plan("random", device)
    x_SD, dy_SD = torch.randn(2, 17, WIDTH, device=device, dtype=dtype)
    factors = [torch.randn(rows_R.numel(), width, device=device, dtype=dtype) for width in (2 * HIDDEN, HIDDEN)]
    slots = ExpertSlots(rows_R, rows_R[:0], torch.rand(rows_R.numel(), device=device), offsets_e)
    expected = passes.dw(dy_SD, x_SD, slots, *factors)
    grads = passes.dw(dy_SD, arenas.surround(x_SD, arenas.ROW), slots, *factors, arenas.base(device))
    assert all(torch.equal(grad, other) for grad, other in zip(grads, expected, strict=True))


@pytest.mark.parametrize(("device", "dtype", "tolerance"), DEVICES)
@pytest.mark.parametrize("gathers_from", [0, 10_000])
def test_delayed_weight_gradients_have_the_bits_of_those_at_once(
    gathers_from: int, device: str, dtype: torch.dtype, tolerance: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What they need is in tensors of its own, or in those of several layers."""
    monkeypatch.setattr(passes, "GATHERS_BEFORE_WEIGHT_GRADIENTS_FROM", gathers_from)
    rows_R, offsets_e, num_experts = plan("random", device)
    num_slots, base = rows_R.numel(), arenas.base(device)
    x_SD, dy_SD = torch.randn(2, 17, WIDTH, device=device, dtype=dtype)
    hidden_R2F = torch.randn(num_slots, 2 * HIDDEN, device=device, dtype=dtype)
    down = torch.randn(num_experts, WIDTH, HIDDEN, device=device, dtype=dtype) / 8
    weights = ExpertWeights(ExpertParameter(down), ExpertParameter(down))
    slots = ExpertSlots(rows_R, rows_R[:0], torch.rand(num_slots, device=device), offsets_e)
    tiles = plan_tiles(offsets_e, num_slots, 128)
    *gradients, _ = passes.d_down(dy_SD, slots, weights, hidden_R2F, tiles)
    expected = passes.dw(dy_SD, x_SD, slots, *gradients, has_bias=True)
    dactive_RF = hidden_R2F.new_full((num_slots, HIDDEN), float("nan"))
    for bases in ((), (base, base)):
        x, dy, hidden, dactive = x_SD, dy_SD, hidden_R2F, dactive_RF
        if bases:
            x, dy = (arenas.surround(rows, arenas.ROW) for rows in (x, dy))
            hidden, dactive = (arenas.surround(of_slots, arenas.SLOT) for of_slots in (hidden, dactive))
        places = dict(zip(("base", "delayed"), bases, strict=False))
        passes.d_down(dy, slots, weights, hidden, tiles, dactive_RF=dactive, **places)
        actual = passes.delayed_dw(dy, x, slots, dactive, hidden, *bases, has_bias=True)
        assert all(map(torch.equal, actual, expected)), bases


def test_a_base_needs_the_tensor_that_it_is_a_place_in() -> None:
    x_SD, scores_R, weight = torch.zeros(4, 8), torch.zeros(4), torch.zeros(1, 2, 8, 8)
    index = torch.zeros(4, dtype=torch.int32)
    tiles = plan_tiles_reference(index[:1], 4, 128)
    with pytest.raises(ValueError, match="hidden"):
        expert_up(x_SD, index, scores_R, weight, tiles, base=arenas.base("cpu"))
    with pytest.raises(ValueError, match="a place in out"):
        gather_mm(x_SD, index, weight[0], tiles, out_base=arenas.base("cpu"))


LOADS = {
    "even": [90, 180, 270, 360],
    "empty_experts": [0, 100, 100, 300],
    "all_on_one": [0, 0, 400, 400],
    "full": [130, 260, 400, 512],
    "nothing": [0, 0, 0, 0],
}


@pytest.mark.parametrize(("device", "dtype", "tolerance"), DEVICES)
@pytest.mark.parametrize("usual", [1, 3, 8, 11, 12])  # of 12 tiles
@pytest.mark.parametrize("name", LOADS)
def test_thread_blocks_that_loop_over_tiles_compute_the_same(
    name: str, usual: int, device: str, dtype: torch.dtype, tolerance: float
) -> None:
    torch.manual_seed(0)
    offsets_e, num_slots = torch.tensor(LOADS[name], device=device, dtype=torch.int32), 512
    x_SD = torch.randn(17, WIDTH, device=device, dtype=dtype)
    rows_R, scores_R = torch.randint(17, (num_slots,), device=device).int(), torch.rand(num_slots, device=device)
    up = torch.randn(4, 2, HIDDEN, WIDTH, device=device, dtype=dtype) / 8
    down = torch.randn(4, WIDTH, 232, device=device, dtype=dtype) / 8
    slots = torch.randn(num_slots, WIDTH, device=device, dtype=dtype)
    cut = GemmTiles(outputs=128, group=3)

    def run(tiles: Tiles) -> list[Tensor]:
        torch.use_deterministic_algorithms(True)  # fills new memory with NaN
        try:
            of_up = expert_up(x_SD, rows_R, scores_R, up, tiles, GemmTiles(outputs=32, group=3))
            gathered, multiplied = gather_mm(x_SD, rows_R, down, tiles, cut), slot_mm(slots, down, tiles, cut=cut)
        finally:
            torch.use_deterministic_algorithms(False)
        return [*of_up, gathered, multiplied]

    tiles = plan_tiles(offsets_e, num_slots, 64)
    for actual, expected in zip(run(tiles._replace(usual=usual)), run(tiles), strict=True):
        assert arenas.same_bits(actual, expected)
        assert actual[offsets_e[-1] :].isnan().all(), "what is past the last expert is not written"


@pytest.mark.parametrize(("device", "dtype", "tolerance"), DEVICES)
@pytest.mark.parametrize("end", [0, 1, 20, 51])
def test_programs_of_swiglu_backward_take_slots_in_turn(
    end: int, device: str, dtype: torch.dtype, tolerance: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch.manual_seed(0)
    num_slots = 2 * SLACK + 51
    offsets_e = torch.tensor([end // 2, end], device=device, dtype=torch.int32)
    dactive_RF, hidden_R2F, scores_R = (
        torch.randn(num_slots, HIDDEN, device=device, dtype=dtype),
        torch.randn(num_slots, 2 * HIDDEN, device=device, dtype=dtype),
        torch.rand(num_slots, device=device),
    )
    torch.use_deterministic_algorithms(True)  # fills new memory with NaN
    try:
        expected = swiglu_backward(dactive_RF, hidden_R2F, scores_R, offsets_e)
        monkeypatch.setattr(swiglu_backward_file, "MAX_PROGRAMS", 3)
        actual = swiglu_backward(dactive_RF, hidden_R2F, scores_R, offsets_e)
    finally:
        torch.use_deterministic_algorithms(False)
    for one, other in zip(actual, expected, strict=True):
        assert one is not None and other is not None and arenas.same_bits(one, other)
    for cleared in actual[:2]:
        assert cleared is not None and not cleared[end : end + SLACK].any() and cleared[end + SLACK :].isnan().all()
