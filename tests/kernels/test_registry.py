"""Every registered operation against its reference: values, gradients, compiled as one graph."""

import copy
import os
from collections.abc import Callable
from typing import Any

import pytest
import torch
from support.kernel_samples import SAMPLES
from torch import Tensor

from titan_moe.kernels.registry import KERNELS, Kernel, Output, Sample, load_all

load_all()
IS_INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
TOLERANCE = {torch.float64: 1e-10, torch.float32: 2e-5, torch.bfloat16: 3e-2}


def evaluate(
    op: Callable[..., Output], sample: Sample, kernel: Kernel, unpromised: float, dtype: torch.dtype | None = None
) -> list[Tensor]:
    """What the operation promises of output and gradients; the rest of the output's gradient is `unpromised`."""
    args = list(copy.deepcopy(sample.args))
    for index in range(sample.num_differentiable):
        args[index] = (args[index] if dtype is None else args[index].to(dtype)).detach().requires_grad_()
    outs = SAMPLES[kernel.name].outputs(op(*args))
    if not sample.num_differentiable:
        return [promised_part(SAMPLES[kernel.name].valid, out, sample) for out in outs]
    grads = [torch.full_like(out, unpromised, requires_grad=False) for out in outs]
    for grad in grads:
        promised = promised_part(SAMPLES[kernel.name].valid, grad, sample)
        promised.copy_(torch.linspace(-1, 1, promised.numel(), device=grad.device).view(promised.shape))
    torch.autograd.backward(outs, grads)
    grads = [args[index].grad for index in range(sample.num_differentiable)]
    return [
        *(promised_part(SAMPLES[kernel.name].valid, out.detach(), sample) for out in outs),
        promised_part(SAMPLES[kernel.name].valid_grad, grads[0], sample),
        *grads[1:],
    ]


def promised_part(select: Callable[..., Tensor] | None, tensor: Tensor, sample: Sample) -> Tensor:
    return tensor if select is None else select(tensor, sample.args)


def check(kernel: Kernel, op: Callable[..., Output], sample: Sample, dtype: torch.dtype) -> None:
    """Compare with the reference in fp64; what nobody promised is NaN, and must not spread."""
    actual = evaluate(op, sample, kernel, float("nan"))
    expected = evaluate(kernel.reference, sample, kernel, 0.0, torch.float64)
    grads = [f"grad {index}" for index in range(sample.num_differentiable)]
    names = [*(f"out {index}" for index in range(len(actual) - len(grads))), *grads]
    for name, got, wanted in zip(names, actual, expected, strict=True):
        error = (got.double() - wanted.double()).norm() / wanted.double().norm().clamp(min=1e-6)
        assert error < (SAMPLES[kernel.name].tolerance or TOLERANCE[dtype]), (
            f"{kernel.name}/{sample.name}: {name} differs by {error:.2e}"
        )


def cases() -> list[Any]:
    """Every kernel wherever it runs: Triton on GPUs, and in fp32 in its interpreter; grouped GEMMs on GPUs in bf16."""
    found = []
    for kernel in KERNELS.values():
        for dtype in SAMPLES[kernel.name].dtypes if kernel.name in SAMPLES else ():
            name = f"{kernel.name}-{dtype}"
            if not kernel.needs_triton:
                found.append(pytest.param(kernel, dtype, "cpu", id=f"{name}-cpu"))
            elif dtype == torch.float32:
                found.append(pytest.param(kernel, dtype, "cpu", id=f"{name}-cpu", marks=pytest.mark.interpreted))
            if dtype == torch.bfloat16 or kernel.name not in ("grouped_mm", "fused_expert_mlp"):
                found.append(pytest.param(kernel, dtype, "cuda", id=f"{name}-cuda", marks=pytest.mark.gpu))
    return found


def test_every_operation_has_samples() -> None:
    assert SAMPLES.keys() == KERNELS.keys()
    assert all(samples.dtypes and samples.draw(torch.device("cpu"), torch.float32) for samples in SAMPLES.values())


@pytest.mark.parametrize(("kernel", "dtype", "device"), cases())
def test_equals_reference(kernel: Kernel, dtype: torch.dtype, device: str) -> None:
    torch.manual_seed(0)
    for sample in SAMPLES[kernel.name].draw(torch.device(device), dtype):
        check(kernel, kernel.op, sample, dtype)


@pytest.mark.slow
@pytest.mark.parametrize(("kernel", "dtype", "device"), cases())
def test_compiles_as_one_graph(kernel: Kernel, dtype: torch.dtype, device: str) -> None:
    torch.manual_seed(0)
    torch._dynamo.reset()
    compiled = torch.compile(kernel.op, fullgraph=True, backend="aot_eager" if device == "cpu" else "inductor")
    with torch._dynamo.config.patch(recompile_limit=32):  # samples that differ in more than size take a graph each
        samples = SAMPLES[kernel.name].draw(torch.device(device), dtype)
        for sample in samples[:2] if IS_INTERPRETED else samples:  # slow there, and the values are known by now
            check(kernel, compiled, sample, dtype)


def test_grouped_mm_takes_an_expanded_gradient() -> None:
    grouped_mm = KERNELS["grouped_mm"].op
    x_RI, weight = torch.randn(8, 16, requires_grad=True), torch.randn(3, 24, 16, requires_grad=True)
    grouped_mm(x_RI, weight, None, torch.tensor([3, 3, 8], dtype=torch.int32)).sum().backward()
    assert x_RI.grad is not None and weight.grad is not None
    torch.testing.assert_close(weight.grad[0, 0], x_RI[:3].sum(0))
