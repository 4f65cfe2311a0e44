"""Delayed weight gradients are those of the MLPs in Triton, bit for bit."""

import weakref

import pytest
import torch
from support.kernel_samples import SAMPLES
from torch import Tensor

from titan_moe.kernels.choose import QUEUED_SWIGLU_DOWN
from titan_moe.kernels.delayed_weight_grads import WeightGradQueue
from titan_moe.kernels.experts.delayed_weight_grads import DelayedWeights, delay_weight_grads
from titan_moe.kernels.experts.format import ExpertFormat
from titan_moe.kernels.experts.fp8.format import FP8_ROWWISE, FP8_ROWWISE_PLAIN_WGRAD
from titan_moe.kernels.experts.fused_mlp import FusedMLP
from titan_moe.kernels.experts.plain import PLAIN
from titan_moe.kernels.experts.slots import ExpertSlots
from titan_moe.kernels.experts.swiglu_down import fused_swiglu_down
from titan_moe.kernels.experts.weights import ExpertWeights
from titan_moe.kernels.permute.rows import place_scores
from titan_moe.kernels.registry import KERNELS, Sample, load_all

load_all()
DEVICES = [
    pytest.param("cpu", torch.float32, marks=pytest.mark.interpreted),
    pytest.param("cuda", torch.bfloat16, marks=pytest.mark.gpu),
]


def draw(device: str, dtype: torch.dtype) -> list[Sample]:
    torch.manual_seed(0)
    return SAMPLES["fused_expert_mlp"].draw(torch.device(device), dtype)


def run_with(
    delayed: DelayedWeights, x_SD: Tensor, scores_SK: Tensor, rows_R: Tensor, slots_SK: Tensor, offsets_e: Tensor
) -> Tensor:
    scores_R = place_scores(scores_SK, slots_SK, rows_R.numel())
    return delayed.mlp(x_SD, ExpertSlots(rows_R, slots_SK, scores_R, offsets_e), delayed.weights)


def run_delayed(x_SD: Tensor, scores_SK: Tensor, gate_up: Tensor, down: Tensor, *plan: Tensor) -> Tensor:
    return run_with(delay_weight_grads(ExpertWeights.of([gate_up, down])), x_SD, scores_SK, *plan)


@pytest.mark.parametrize(("device", "dtype"), DEVICES)
def test_gradients_are_those_of_the_fused_mlp(device: str, dtype: torch.dtype) -> None:
    for sample in draw(device, dtype):
        results = []
        for op in (KERNELS["fused_expert_mlp"].op, run_delayed):
            inputs = [x.detach().requires_grad_() for x in sample.args[:4]]
            y_SD = op(*inputs, *sample.args[4:])
            results.append([y_SD.detach(), *torch.autograd.grad(y_SD.sin().sum(), inputs)])
        for one, other in zip(*results, strict=True):
            assert torch.equal(one, other), sample.name


@pytest.mark.parametrize(("device", "dtype"), DEVICES)
@pytest.mark.parametrize("frozen", [(2,), (2, 3)])
def test_frozen_weights_delay_nothing(frozen: tuple[int, ...], device: str, dtype: torch.dtype) -> None:
    sample = draw(device, dtype)[0]
    inputs = [x.detach().requires_grad_(index not in frozen) for index, x in enumerate(sample.args[:4])]
    delayed = delay_weight_grads(ExpertWeights.of(inputs[2:]))
    run_with(delayed, *inputs[:2], *sample.args[4:]).sum().backward()
    assert delayed.grads.pending is None
    assert [x.grad is not None for x in inputs] == [index not in frozen for index in range(4)]


@pytest.mark.parametrize(("device", "dtype"), DEVICES)
def test_what_was_computed_is_freed(device: str, dtype: torch.dtype) -> None:
    sample = draw(device, dtype)[0]
    x_SD, scores_SK, gate_up, down = (x.detach().clone().requires_grad_() for x in sample.args[:4])
    delayed = delay_weight_grads(ExpertWeights.of([gate_up, down]))
    y_SD = run_with(delayed, x_SD, scores_SK, *sample.args[4:])
    torch.autograd.grad(y_SD.sum(), x_SD, retain_graph=True)
    assert delayed.grads.pending is not None, "backward stopped at the rows"
    y_SD.sum().backward()
    assert delayed.grads.pending is None and gate_up.grad is not None
    with pytest.raises(RuntimeError, match="used once"):
        run_with(delayed, x_SD, scores_SK, *sample.args[4:])


def place(sample: Sample) -> tuple[list[Tensor], ExpertSlots]:
    """Rows and weights, of a hidden width that fp8 takes, and slots, whose scores are differentiable."""
    x_SD, scores_SK, gate_up, down, rows_R, slots_SK, offsets_e = sample.args
    gate_up, down = gate_up[:, :, :32].contiguous(), down[..., :32].contiguous()
    scores_R = place_scores(scores_SK.detach(), slots_SK, rows_R.numel()).requires_grad_()
    leaves = [x.detach().clone().requires_grad_() for x in (x_SD, gate_up, down)]
    return leaves, ExpertSlots(rows_R, slots_SK, scores_R, offsets_e)


@pytest.mark.parametrize(("device", "dtype"), DEVICES)
@pytest.mark.parametrize(
    ("format", "has_codes"), [(PLAIN, False), (FP8_ROWWISE, True), (FP8_ROWWISE_PLAIN_WGRAD, False)]
)
def test_queued_gradients_are_those_of_the_mlp(
    format: ExpertFormat, has_codes: bool, device: str, dtype: torch.dtype
) -> None:
    for sample in draw(device, dtype)[: 1 if format.is_rounded else None]:  # the interpreter is slow
        results = []
        for queue in (WeightGradQueue(), None):
            (x_SD, gate_up, down), slots = place(sample)
            weights = ExpertWeights.of([gate_up * 1, down * 1])
            if has_codes:
                weights = weights._replace(codes=tuple(format.quantize(gate_up.detach(), down.detach(), False)))
            if queue is None:
                FusedMLP(format)(x_SD, slots, weights).sin().sum().backward()
            else:
                with queue.delaying() as pending:
                    y_SD = FusedMLP(format, queue)(x_SD, slots, weights)
                y_SD.sin().sum().backward()
                assert gate_up.grad is down.grad is None and x_SD.grad is not None
                ((_, grads),) = pending.uses
                operands = weakref.ref(grads.pending)
                pending.compute()
                assert operands() is None
            end = int(slots.offsets_e[-1])
            results.append([x_SD.grad, slots.scores_R.grad[:end], gate_up.grad, down.grad])
        for one, other in zip(*results, strict=True):
            assert torch.equal(one, other), sample.name


@pytest.mark.parametrize(("device", "dtype"), DEVICES)
def test_queued_gradients_are_those_of_swiglu_down(device: str, dtype: torch.dtype) -> None:
    results = []
    for queue in (WeightGradQueue(), None):
        torch.manual_seed(0)
        hidden, weight = (torch.randn(shape, device=device, dtype=dtype) for shape in ((2, 5, 48), (16, 24)))
        leaves = hidden.requires_grad_(), weight.requires_grad_()
        if queue is None:
            fused_swiglu_down(hidden, weight).sin().sum().backward()
        else:
            with queue.delaying() as pending:
                y = QUEUED_SWIGLU_DOWN[fused_swiglu_down](queue)(hidden, weight)
            y.sin().sum().backward()
            assert weight.grad is None
            pending.compute()
        results.append([leaf.grad for leaf in leaves])
    for one, other in zip(*results, strict=True):
        assert torch.equal(one, other)
