"""Weight gradients that are computed late are those of the fused MLP, bit for bit."""

import pytest
import torch
from torch import Tensor

from titan_moe.kernels.experts.delayed_weight_grads import delay_weight_grads
from titan_moe.kernels.permute.rows import place_scores
from titan_moe.kernels.registry import KERNELS, Sample, load_all

load_all()
DEVICES = [
    pytest.param("cpu", torch.float32, marks=pytest.mark.interpreted),
    pytest.param("cuda", torch.bfloat16, marks=pytest.mark.gpu),
]


def draw(device: str, dtype: torch.dtype) -> list[Sample]:
    torch.manual_seed(0)
    return KERNELS["fused_expert_mlp"].samples(torch.device(device), dtype)


def serve_late(
    x_SD: Tensor, scores_SK: Tensor, gate_up: Tensor, down: Tensor, rows_R: Tensor, slots_SK: Tensor, offsets_e: Tensor
) -> Tensor:
    weights = delay_weight_grads(gate_up, down)
    return weights.serve(x_SD, rows_R, slots_SK, place_scores(scores_SK, slots_SK, rows_R.numel()), offsets_e)


@pytest.mark.parametrize(("device", "dtype"), DEVICES)
def test_gradients_are_those_of_the_fused_mlp(device: str, dtype: torch.dtype) -> None:
    for sample in draw(device, dtype):
        results = []
        for op in (KERNELS["fused_expert_mlp"].op, serve_late):
            inputs = [x.detach().requires_grad_() for x in sample.args[:4]]
            y_SD = op(*inputs, *sample.args[4:])
            results.append([y_SD.detach(), *torch.autograd.grad(y_SD.sin().sum(), inputs)])
        for one, other in zip(*results, strict=True):
            assert torch.equal(one, other), sample.name


@pytest.mark.parametrize(("device", "dtype"), DEVICES)
@pytest.mark.parametrize("frozen", [(2,), (2, 3)])
def test_frozen_weights_owe_nothing(frozen: tuple[int, ...], device: str, dtype: torch.dtype) -> None:
    sample = draw(device, dtype)[0]
    inputs = [x.detach().requires_grad_(index not in frozen) for index, x in enumerate(sample.args[:4])]
    weights = delay_weight_grads(*inputs[2:])
    rows_R, slots_SK, offsets_e = sample.args[4:]
    scores_R = place_scores(inputs[1], slots_SK, rows_R.numel())
    weights.serve(inputs[0], rows_R, slots_SK, scores_R, offsets_e).sum().backward()
    assert weights.debt.compute is None
    assert [x.grad is not None for x in inputs] == [index not in frozen for index in range(4)]


@pytest.mark.parametrize(("device", "dtype"), DEVICES)
def test_what_was_paid_is_let_go(device: str, dtype: torch.dtype) -> None:
    sample = draw(device, dtype)[0]
    x_SD, scores_SK, gate_up, down = (x.detach().clone().requires_grad_() for x in sample.args[:4])
    rows_R, slots_SK, offsets_e = sample.args[4:]
    weights = delay_weight_grads(gate_up, down)
    scores_R = place_scores(scores_SK, slots_SK, rows_R.numel())
    y_SD = weights.serve(x_SD, rows_R, slots_SK, scores_R, offsets_e)
    torch.autograd.grad(y_SD.sum(), x_SD, retain_graph=True)
    assert weights.debt.compute is not None, "nobody has asked for the weights' yet"
    y_SD.sum().backward()
    assert weights.debt.compute is None and gate_up.grad is not None
    with pytest.raises(RuntimeError, match="serve once"):
        weights.serve(x_SD, rows_R, slots_SK, scores_R, offsets_e)
