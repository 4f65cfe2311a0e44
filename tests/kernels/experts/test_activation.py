"""The clamped activation of experts in Triton: values and gradients are those of the reference, where nothing is NaN
that is not NaN there."""

import pytest
import torch
from support.kernel_samples import sample_plans
from torch import Tensor

from titan_moe.config.swiglu import SwiGLU
from titan_moe.kernels.choose import choose_expert_mlp
from titan_moe.kernels.experts.composite_mlp import CompositeMLP, ExpertMLP
from titan_moe.kernels.experts.delayed_weight_grads import can_delay, delay_weight_grads
from titan_moe.kernels.experts.format import ExpertFormat
from titan_moe.kernels.experts.formats import FORMATS
from titan_moe.kernels.experts.fp8.format import FP8_ROWWISE, FP8_ROWWISE_PLAIN_WGRAD
from titan_moe.kernels.experts.fused_mlp import FusedMLP, with_activation, with_scores_first
from titan_moe.kernels.experts.grouped_mm import grouped_mm_reference
from titan_moe.kernels.experts.plain import PLAIN
from titan_moe.kernels.experts.swiglu import weighted_swiglu
from titan_moe.kernels.experts.swiglu_backward import swiglu_backward
from titan_moe.kernels.experts.weights import ExpertWeights

WIDTH, HIDDEN, SIZES = 64, 48, (1.0, 0.12, 0.15)
CLAMPED = SwiGLU(limit=0.7, alpha=1.702, up_offset=1.0)
DEVICES = [
    pytest.param("cpu", torch.float32, marks=pytest.mark.interpreted),
    pytest.param("cuda", torch.bfloat16, marks=pytest.mark.gpu),
]


def results(mlp: ExpertMLP, device: str, dtype: torch.dtype) -> list[Tensor]:
    torch.manual_seed(0)
    _, rows_R, slots_SK, offsets_e, num_experts = next(iter(sample_plans(torch.device(device))))
    shapes = (len(slots_SK), WIDTH), (num_experts, 2, HIDDEN, WIDTH), (num_experts, WIDTH, HIDDEN)
    x_SD, gate_up, down = (
        torch.randn(shape, device=device).mul(size).to(dtype) for shape, size in zip(shapes, SIZES, strict=True)
    )
    scores_SK = torch.rand(slots_SK.shape, device=device)
    inputs = [tensor.requires_grad_() for tensor in (x_SD, scores_SK, gate_up, down)]
    y_SD = with_scores_first(mlp)(*inputs, rows_R, slots_SK, offsets_e)
    return [y_SD.detach(), *torch.autograd.grad(y_SD.sin().sum(), inputs)]


@pytest.mark.parametrize(("device", "dtype"), DEVICES)
@pytest.mark.parametrize(("format", "limit"), [(PLAIN, 2e-2), (FP8_ROWWISE, 0.5), (FP8_ROWWISE_PLAIN_WGRAD, 0.5)])
def test_experts_have_the_activation(format: ExpertFormat, limit: float, device: str, dtype: torch.dtype) -> None:
    """In fp8, pre-activations are rounded across the clamp, and gradients are there or not."""
    expected = results(CompositeMLP(grouped_mm_reference, activation=CLAMPED), device, dtype)
    actual = results(with_activation(FusedMLP(format), CLAMPED), device, dtype)
    plain = results(CompositeMLP(grouped_mm_reference), device, dtype)
    limit = 1e-5 if (format, dtype) == (PLAIN, torch.float32) else limit
    for ours, theirs, other in zip(actual, expected, plain, strict=True):
        assert (ours - theirs).norm() < limit * theirs.norm() < (other - theirs).norm()


@pytest.mark.parametrize(("device", "dtype"), DEVICES)
def test_gradients_stop_at_the_clamp(device: str, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    hidden = (torch.randn(4, 48, device=device) * 2).to(dtype)
    hidden[0, :6], hidden[1, 24:28] = 0.7, torch.tensor([0.7, -0.7, 100, -100], device=device, dtype=dtype)
    hidden[2, 0], scores = torch.nan, torch.rand(4, device=device)
    dactive, leaf = torch.randn(4, 24, device=device).to(dtype), hidden.double().requires_grad_()
    expected = weighted_swiglu(leaf, scores.double(), CLAMPED)
    (dhidden,) = torch.autograd.grad(expected, leaf, dactive.double())
    offsets = torch.tensor([4], dtype=torch.int32, device=device)
    ours = swiglu_backward(dactive, hidden, scores, offsets, activation=CLAMPED)
    tolerance = {"rtol": 1e-2, "atol": 1e-2} if dtype == torch.bfloat16 else {"rtol": 1e-5, "atol": 1e-5}
    ours[0][2, 0] = dhidden[2, 0] = 0.0  # PyTorch's clamp has no gradient there
    for actual, wanted in zip(ours[:2], (dhidden, expected.detach()), strict=True):
        torch.testing.assert_close(actual.double(), wanted, equal_nan=True, **tolerance)


def test_a_format_with_an_activation_has_a_name_of_its_own() -> None:
    for format in (PLAIN, FP8_ROWWISE_PLAIN_WGRAD):
        mlp = with_activation(FusedMLP(format), CLAMPED)
        assert FORMATS[mlp.format.name] == mlp.format != format
        assert mlp is with_activation(FusedMLP(format), CLAMPED)
    with pytest.raises(KeyError):
        FORMATS["fp6 0.7 1.702 1.0"]
    fused = choose_expert_mlp("fused", "activation", activation=CLAMPED)
    assert can_delay(fused) and not can_delay(FusedMLP(FP8_ROWWISE))
    weights = ExpertWeights.of([torch.zeros(2, 2, 8, 8), torch.zeros(2, 8, 8)])
    assert delay_weight_grads(weights, fused).fused is fused
