"""How long a call takes on this GPU: the one stopwatch of `titan-moe tune` and of the benchmarks."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from triton.testing import do_bench

from titan_moe.kernels.registry import Sample

Stopwatch = Callable[[Callable[[], Any]], float]
"""Milliseconds of a call that has run before."""


WARMUP_CALLS, TIMED_CALLS = 5, 12


def median_ms(call: Callable[[], Any]) -> float:
    """The median of calls on a GPU, each with a cold L2 cache: at least 12 of them, and at least 0.1 s."""
    estimate_ms = do_bench(call, warmup=1, rep=1)
    warmup_ms, timed_ms = max(25.0, WARMUP_CALLS * estimate_ms), max(100.0, TIMED_CALLS * estimate_ms)
    return do_bench(call, warmup=warmup_ms, rep=timed_ms, return_mode="median")


def forward_and_total_ms(
    op: Callable[..., Any], sample: Sample, stopwatch: Stopwatch = median_ms
) -> tuple[float, float]:
    """Time forward, and forward and backward; they are one where nothing is differentiable."""
    count = sample.num_differentiable
    inputs = [x.detach().requires_grad_() for x in sample.args[:count]]
    args = (*inputs, *sample.args[count:])
    outputs = _differentiable(op(*args))
    grads = [torch.randn_like(output) for output in outputs]

    def both() -> None:
        torch.autograd.grad(_differentiable(op(*args)), inputs, grads)

    forward_ms = stopwatch(lambda: op(*args))
    if not grads:
        return forward_ms, forward_ms
    both()
    return forward_ms, stopwatch(both)


def _differentiable(result: Any) -> list[Tensor]:
    outputs = result if isinstance(result, tuple) else (result,)
    return [output for output in outputs if isinstance(output, Tensor) and output.requires_grad]
