"""Routed experts against one dense SwiGLU an expert."""

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from titan_moe.dispatch.base import Routed, route
from titan_moe.kernels.choose import choose_expert_mlp
from titan_moe.layers.experts import GroupedExperts

EXPERTS, WIDTH, HIDDEN, ROWS, CHOICES = 5, 16, 8, 11, 3


def built(
    score_on: str = "activation",
    kernels: str = "reference",
    dtype: torch.dtype = torch.float64,
    *,
    has_bias: bool = False,
) -> GroupedExperts:
    torch.manual_seed(0)
    mlp = choose_expert_mlp(kernels, score_on, has_bias)
    experts = GroupedExperts(EXPERTS, WIDTH, HIDDEN, mlp, has_bias=has_bias).to(dtype)
    for weight in experts.parameters():
        torch.nn.init.normal_(weight, std=0.5)
    return experts


def choices(dtype: torch.dtype = torch.float64) -> tuple[Tensor, Tensor, Tensor]:
    """Rows, their choices (-1 for none: some choices, and all choices of rows 3 and 10) and scores."""
    torch.manual_seed(1)
    ids_SK = torch.rand(ROWS, EXPERTS).topk(CHOICES).indices
    ids_SK[torch.rand(ROWS, CHOICES) < 0.3] = -1
    ids_SK[[3, 10]] = -1
    x_SD = torch.randn(ROWS, WIDTH, dtype=dtype, requires_grad=True)
    return x_SD, ids_SK, torch.rand(ROWS, CHOICES, dtype=dtype, requires_grad=True)


def laid_out(x_SD: Tensor, ids_SK: Tensor, scores_SK: Tensor, num_slots: int | None = None) -> Routed:
    exact = int((ids_SK >= 0).sum())
    return route(x_SD, ids_SK, scores_SK, EXPERTS, num_slots or exact, exchange=None)


def densely(experts: GroupedExperts, x_SD: Tensor, ids_SK: Tensor, scores_SK: Tensor, score_on: str) -> Tensor:
    """Token by token, choice by choice."""
    rows, has_bias = [], experts.down_bias is not None
    for x_D, ids, scores in zip(x_SD, ids_SK.tolist(), scores_SK, strict=True):
        y_D = torch.zeros_like(x_D)
        for expert, score in zip(ids, scores, strict=True):
            if expert >= 0:
                read_D = x_D * score if score_on == "input" else x_D
                gate_F, up_F = experts.gate_up[expert] @ read_D
                if has_bias:
                    gate_F, up_F = gate_F + experts.gate_up_bias[expert, 0], up_F + experts.gate_up_bias[expert, 1]
                out_D = experts.down[expert] @ (F.silu(gate_F) * up_F)
                out_D = out_D + experts.down_bias[expert] if has_bias else out_D
                y_D = y_D + (out_D if score_on == "input" else score * out_D)
        rows.append(y_D)
    return torch.stack(rows)


@pytest.mark.parametrize("has_bias", [False, True])
@pytest.mark.parametrize("score_on", ["activation", "input"])
def test_equals_dense_experts(score_on: str, has_bias: bool) -> None:
    experts, (x_SD, ids_SK, scores_SK) = built(score_on, has_bias=has_bias), choices()
    actual = experts(laid_out(x_SD, ids_SK, scores_SK))
    expected = densely(experts, x_SD, ids_SK, scores_SK, score_on)
    torch.testing.assert_close(actual, expected, atol=1e-12, rtol=1e-12)
    direction, inputs = torch.randn_like(expected), (x_SD, scores_SK, *experts.parameters())
    actual_gradients, expected_gradients = (torch.autograd.grad(y, inputs, direction) for y in (actual, expected))
    torch.testing.assert_close(actual_gradients, expected_gradients, atol=1e-12, rtol=1e-12)


def test_the_two_places_of_the_score_differ() -> None:
    routed = laid_out(*choices())
    assert not torch.allclose(built("activation")(routed), built("input")(routed), atol=1e-2)


@pytest.mark.parametrize("has_bias", [False, True])
@pytest.mark.parametrize("kernels", ["grouped_mm", "reference"])
@pytest.mark.parametrize("score_on", ["activation", "input"])
def test_garbage_past_the_last_slot_is_never_read(kernels: str, score_on: str, has_bias: bool) -> None:
    experts = built(score_on, kernels, torch.float32, has_bias=has_bias)
    x_SD, ids_SK, scores_SK = choices(torch.float32)
    clean = experts(laid_out(x_SD, ids_SK, scores_SK))
    direction, inputs = torch.randn_like(clean), (x_SD, scores_SK, *experts.parameters())
    clean_gradients = torch.autograd.grad(clean, inputs, direction)

    poison_SD = torch.zeros(ROWS, WIDTH).index_fill(0, torch.tensor([3, 10]), float("nan"))
    routed = laid_out(x_SD + poison_SD, ids_SK, scores_SK, num_slots=ROWS * CHOICES)
    used = int(routed.offsets_e[-1])
    assert used < routed.rows_R.numel()
    tail_R = torch.zeros_like(routed.scores_R).index_fill(0, torch.arange(used, ROWS * CHOICES), float("nan"))
    rows_R = routed.rows_R.clone()
    rows_R[used:] = 3  # a poisoned row
    padded = experts(routed._replace(rows_R=rows_R, scores_R=routed.scores_R + tail_R))
    torch.testing.assert_close(padded, clean)
    assert not padded[[3, 10]].any(), "a row without a slot is zero"
    torch.testing.assert_close(torch.autograd.grad(padded, inputs, direction), clean_gradients)


@pytest.mark.parametrize("kernels", ["grouped_mm", "reference"])
def test_an_expert_without_rows_gets_a_zero_gradient(kernels: str) -> None:
    experts = built(kernels=kernels, dtype=torch.float32, has_bias=True)
    x_SD, ids_SK, scores_SK = choices(torch.float32)
    ids_SK[ids_SK == 2] = -1
    experts(laid_out(x_SD, ids_SK, scores_SK)).sum().backward()
    for weight in experts.parameters():
        assert not weight.grad[2].any() and weight.grad[[0, 1, 3, 4]].flatten(1).any(1).all()


def test_fused_refuses_what_its_gemms_do_not_do() -> None:
    with pytest.raises(ValueError, match='score_on = "activation"; or take "grouped_mm"'):
        choose_expert_mlp("fused", "input")
    biased = built(has_bias=True)
    biased.mlp = choose_expert_mlp("fused", "activation")
    with pytest.raises(ValueError, match='gate_up_bias.*; take "grouped_mm"'):
        biased(laid_out(*choices()))


def test_kernels_agree() -> None:
    routed = laid_out(*choices(torch.float32))
    fast, loop = (built(kernels=kernels, dtype=torch.float32)(routed) for kernels in ("grouped_mm", "reference"))
    torch.testing.assert_close(fast, loop)


@pytest.mark.parametrize("kernels", ["reference", "grouped_mm"])
def test_rows_without_any_slot_are_zero(kernels: str) -> None:
    """A rank that no token has chosen, with exact sizes."""
    experts = built(kernels=kernels, dtype=torch.float32)
    x_SD, ids_SK, scores_SK = choices(torch.float32)
    routed = laid_out(x_SD, torch.full_like(ids_SK, -1), scores_SK)
    assert routed.sizes == (ROWS, 0)
    y_SD = experts(routed)
    y_SD.sum().backward()
    for tensor in (y_SD, x_SD.grad, scores_SK.grad, experts.gate_up.grad, experts.down.grad):
        assert not tensor.any()
