"""Experts with biases in Triton: values and gradients are those of the reference in fp64, with odd widths, empty
experts and room that no slot takes; and so are the kernels of the biases' gradients by themselves."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from support.kernel_samples import sample_plans
from torch import Tensor

from titan_moe.config.swiglu import PLAIN_SWIGLU, SwiGLU
from titan_moe.kernels.choose import choose_expert_mlp
from titan_moe.kernels.delayed_weight_grads import WeightGradQueue
from titan_moe.kernels.experts import passes
from titan_moe.kernels.experts.bias_grads import (
    add_bias_scores,
    add_bias_scores_reference,
    expert_sums,
    expert_sums_reference,
)
from titan_moe.kernels.experts.composite_mlp import CompositeMLP, ExpertMLP
from titan_moe.kernels.experts.delayed_weight_grads import can_delay, delay_weight_grads
from titan_moe.kernels.experts.formats import FORMATS
from titan_moe.kernels.experts.fp8.format import FP8_ROWWISE
from titan_moe.kernels.experts.fused_mlp import FusedMLP, Keep, biased_expert_mlp
from titan_moe.kernels.experts.grouped_mm import grouped_mm_reference
from titan_moe.kernels.experts.slots import ExpertSlots
from titan_moe.kernels.experts.tiles import plan_tiles
from titan_moe.kernels.experts.weights import BIASES, MATRICES, ExpertWeights

WIDTH, HIDDEN = 72, 48
NAMES = MATRICES + BIASES
CLAMPED = SwiGLU(limit=0.7, alpha=1.702, up_offset=1.0)
DEVICES = [
    pytest.param("cpu", torch.float32, 1e-5, marks=pytest.mark.interpreted),
    pytest.param("cuda", torch.bfloat16, 2e-2, marks=pytest.mark.gpu),
]
PLANS = ("random", "empty_expert", "padded", "no_rows")


def draw(name: str, device: str, dtype: torch.dtype) -> tuple[list[Tensor], list[Tensor]]:
    """Rows, scores and weights; and the plan."""
    torch.manual_seed(0)
    plans = {plan[0]: plan[1:] for plan in sample_plans(torch.device(device))}
    rows_R, slots_SK, offsets_e, e = plans[name]
    sizes = {"gate_up": (e, 2, HIDDEN, WIDTH), "down": (e, WIDTH, HIDDEN), "gate_up_bias": (e, 2, HIDDEN)}
    sizes["down_bias"] = (e, WIDTH)
    x_SD = torch.randn(len(slots_SK), WIDTH, device=device, dtype=dtype)
    weights = [torch.randn(sizes[name], device=device, dtype=dtype) / 6 for name in NAMES]
    return [x_SD, torch.rand(rows_R.numel(), device=device), *weights], [rows_R, slots_SK, offsets_e]


def run(mlp: Callable[..., Tensor], leaves: list[Tensor], plan: list[Tensor]) -> list[Tensor]:
    """Output and gradients."""
    x_SD, scores_R, *weights = leaves = [leaf.detach().clone().requires_grad_() for leaf in leaves]
    rows_R, slots_SK, offsets_e = plan
    y_SD = mlp(x_SD, ExpertSlots(rows_R, slots_SK, scores_R, offsets_e), ExpertWeights.of(weights, NAMES))
    dx_SD, dscores_R, *grads = torch.autograd.grad(y_SD.sin().sum(), leaves)
    return [y_SD.detach(), dx_SD, dscores_R[: int(offsets_e[-1])], *grads]


def fused(activation: SwiGLU = PLAIN_SWIGLU) -> FusedMLP:
    mlp = choose_expert_mlp("fused", "activation", has_bias=True, activation=activation)
    assert isinstance(mlp, FusedMLP)
    return mlp


def assert_near(actual: list[Tensor], expected: list[Tensor], limit: float) -> None:
    for name, ours, theirs in zip(("y", "x", "scores", *NAMES), actual, expected, strict=True):
        assert ours.shape == theirs.shape and (ours - theirs).norm() <= limit * theirs.norm(), name


@pytest.mark.parametrize(("device", "dtype", "limit"), DEVICES)
@pytest.mark.parametrize("activation", [PLAIN_SWIGLU, CLAMPED], ids=["plain", "clamped"])
def test_experts_with_biases_are_those_of_the_reference(
    activation: SwiGLU, device: str, dtype: torch.dtype, limit: float
) -> None:
    for name in PLANS:
        leaves, plan = draw(name, device, dtype)
        exact = [leaf.double() for leaf in leaves]
        expected = run(CompositeMLP(grouped_mm_reference, activation=activation), exact, plan)
        assert_near(run(fused(activation), leaves, plan), expected, limit)
        if name != "no_rows":
            silent = [*leaves[:-1], torch.zeros_like(leaves[-1])]
            other = run(CompositeMLP(grouped_mm_reference, activation=activation), [*map(Tensor.double, silent)], plan)
            assert (other[2] - expected[2]).norm() > 0.1 * expected[2].norm(), "scores weigh the down bias"


@pytest.mark.parametrize(("device", "dtype", "limit"), DEVICES)
def test_parts_of_the_hidden_width_add_up(device: str, dtype: torch.dtype, limit: float) -> None:
    """Each part adds its share of the down bias (parallel.etp)."""
    leaves, plan = draw("empty_expert", device, dtype)

    def in_parts(x_SD: Tensor, slots: ExpertSlots, weights: ExpertWeights) -> Tensor:
        gate_up, down, gate_up_bias, down_bias = (weight.own for weight in weights[:4] if weight is not None)
        y_SD = torch.zeros_like(x_SD)
        for part in (slice(HIDDEN // 2), slice(HIDDEN // 2, HIDDEN)):
            own = [gate_up[:, :, part], down[..., part], gate_up_bias[..., part], down_bias / 2]
            y_SD = y_SD + fused(CLAMPED)(x_SD, slots, ExpertWeights.of(own, NAMES))
        return y_SD

    assert_near(run(in_parts, leaves, plan), run(fused(CLAMPED), leaves, plan), limit)


def compiled(mlp: ExpertMLP) -> ExpertMLP:
    return torch.compile(mlp, fullgraph=True, backend="aot_eager", dynamic=False)


def delayed(x_SD: Tensor, slots: ExpertSlots, weights: ExpertWeights) -> Tensor:
    uses = delay_weight_grads(weights, fused(CLAMPED))
    return uses.mlp(x_SD, slots, uses.weights)


WAYS: dict[str, Callable[[], Callable[..., Tensor]]] = {
    "compiled": lambda: compiled(fused(CLAMPED)),
    "delayed": lambda: delayed,
    "recomputed": lambda: replace(fused(CLAMPED), keeps=Keep.ROWS),
    "wide": lambda: fused(CLAMPED),  # in the same order or not
}


@pytest.mark.few(
    *("delayed-cpu-dtype0-1e-05", "wide-cpu-dtype0-1e-05"),
    *(f"{way}-cuda-dtype1-0.02" for way in WAYS),
)
@pytest.mark.parametrize(("device", "dtype", "limit"), DEVICES)
@pytest.mark.parametrize("way", WAYS)
def test_biases_do_not_depend_on_the_way(
    way: str, device: str, dtype: torch.dtype, limit: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch._dynamo.reset()
    leaves, plan = draw("empty_expert", device, dtype)
    expected = run(fused(CLAMPED), leaves, plan)
    if way == "wide":
        monkeypatch.setattr(passes, "GATHERS_BEFORE_WEIGHT_GRADIENTS_FROM", 1)
    actual = run(WAYS[way](), leaves, plan)
    if way == "wide":
        assert_near(actual, expected, limit)
    else:
        assert all(map(torch.equal, actual, expected))


@pytest.mark.parametrize(("device", "dtype", "limit"), DEVICES)
def test_queued_gradients_include_those_of_biases(device: str, dtype: torch.dtype, limit: float) -> None:
    leaves, (rows_R, slots_SK, offsets_e) = draw("padded", device, dtype)
    results = []
    for queue in (WeightGradQueue(), None):
        own = [leaf.detach().clone().requires_grad_() for leaf in leaves]
        slots, weights = ExpertSlots(rows_R, slots_SK, own[1], offsets_e), ExpertWeights.of(own[2:], NAMES)
        if queue is None:
            fused(CLAMPED)(own[0], slots, weights).sin().sum().backward()
        else:
            with queue.delaying() as pending:
                y_SD = replace(fused(CLAMPED), queue=queue)(own[0], slots, weights)
            y_SD.sin().sum().backward()
            assert all(leaf.grad is None for leaf in own[2:])
            pending.compute()
        results.append([own[0].grad, *(leaf.grad for leaf in own[2:])])
    assert all(map(torch.equal, *results))


@pytest.mark.parametrize(("device", "dtype", "limit"), DEVICES)
@pytest.mark.parametrize("has_base", [False, True])
def test_sums_and_scores_are_those_of_their_references(
    has_base: bool, device: str, dtype: torch.dtype, limit: float
) -> None:
    """Also of rows behind those of other layers, and where thread blocks loop over tiles. What no slot reads is NaN."""
    torch.manual_seed(0)
    ends, first = [70, 70, 203, 210], 5 if has_base else 0
    offsets_e = torch.tensor(ends, dtype=torch.int32, device=device)
    rows_R = torch.randint(0, 31, (ends[-1] + 9,), device=device, dtype=torch.int32)
    scores_R = torch.rand(len(rows_R), device=device)
    scores_R[ends[-1] :] = torch.nan
    rows_SD, slots_RD = (torch.randn(size, WIDTH + 3, device=device).to(dtype) for size in (31, len(rows_R)))
    slots_RD[ends[-1] :] = torch.nan
    bias_eD = torch.randn(len(ends), WIDTH + 3, device=device).to(dtype)
    base = torch.tensor([first, 2], device=device) if has_base else None
    stored = torch.cat([torch.full_like(rows_SD[:first], torch.nan), rows_SD])
    actual = [
        expert_sums(slots_RD, offsets_e),
        expert_sums(stored, offsets_e, rows_R, scores_R, base),
    ]
    expected = [
        expert_sums_reference(slots_RD.double(), offsets_e),
        expert_sums_reference(rows_SD.double(), offsets_e, rows_R, scores_R.double()),
    ]
    dscores_R = torch.randn(ends[-1], device=device)
    expected.append(
        add_bias_scores_reference(dscores_R.double(), rows_SD.double(), rows_R, bias_eD.double(), offsets_e)
    )
    for usual_slots in (None, 1):
        tiles = plan_tiles(offsets_e, len(rows_R), 128, 1, 2, usual_slots)
        own_R = torch.cat([dscores_R, dscores_R.new_full([9], torch.nan)])
        add_bias_scores(own_R, stored, rows_R, bias_eD, tiles, base)
        assert own_R[ends[-1] :].isnan().all()
        for ours, theirs in zip([*actual, own_R[: ends[-1]]], expected, strict=True):
            assert (ours - theirs).norm() < limit * theirs.norm()


def test_a_format_with_biases_has_a_name_of_its_own() -> None:
    for mlp in (biased_expert_mlp, fused(CLAMPED)):
        assert FORMATS[mlp.format.name] == mlp.format and mlp.format.parameters == NAMES
        assert can_delay(mlp) and not can_delay(replace(mlp, keeps=Keep.ROWS))
    assert fused(CLAMPED) is fused(CLAMPED) is not choose_expert_mlp("fused", "activation", activation=CLAMPED)


def test_biases_that_are_missing_or_too_many_are_refused() -> None:
    tensors: list[Any] = [torch.zeros(2, 2, 8, 8), torch.zeros(2, 8, 8), torch.zeros(2, 2, 8), torch.zeros(2, 8)]
    with pytest.raises(ValueError, match="has_bias = False"):
        biased_expert_mlp.format.operands(ExpertWeights.of(tensors[:2]))
    with pytest.raises(ValueError, match="gate_up_bias.*has_bias = True"):
        choose_expert_mlp("fused", "activation").format.operands(ExpertWeights.of(tensors, NAMES))
    with pytest.raises(ValueError, match="experts in fp8 have no biases"):
        FP8_ROWWISE.operands(ExpertWeights.of(tensors, NAMES))
