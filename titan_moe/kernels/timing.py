"""Time calls on a GPU: the stopwatches of benchmarks."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree
from triton.testing import do_bench

from titan_moe.kernels.recording import forget_recording
from titan_moe.kernels.registry import Sample

Stopwatch = Callable[[Callable[[], Any]], float]
"""A call that has run before -> its milliseconds."""


WARMUP_CALLS, TIMED_CALLS = 5, 12


def median_ms(call: Callable[[], Any], least_ms: float = 100.0) -> float:
    """Median over at least 12 calls and `least_ms` on a GPU, each with a cold L2 cache."""
    estimate_ms = do_bench(call, warmup=1, rep=1)
    warmup_ms, timed_ms = max(least_ms / 4, WARMUP_CALLS * estimate_ms), max(least_ms, TIMED_CALLS * estimate_ms)
    return do_bench(call, warmup=warmup_ms, rep=timed_ms, return_mode="median")


def replayed_ms(call: Callable[[], Any], least_ms: float = 100.0) -> float:
    """`median_ms` of a CUDA graph of the call: the time of the GPU without that of host launches. Launching a small
    operation takes longer than running it; in a run the host is ahead of the GPU, or replays a graph too.

    Call it on another stream than the default one, and create the leaves of autograd on that stream: gradients are
    accumulated on the stream of their leaf, and the default stream cannot be captured.

    Raises: RuntimeError if the call cannot be captured.
    """
    for _ in range(2):  # compiles, and allocates workspaces
        call()
    graph = torch.cuda.CUDAGraph()
    try:
        with torch.cuda.graph(graph, stream=torch.cuda.current_stream()):
            call()
    except RuntimeError:
        forget_recording(torch.cuda.current_stream().device)
        raise
    return median_ms(graph.replay, least_ms)


@contextmanager
def _side_stream(args: tuple[Any, ...]) -> Iterator[None]:
    if not any(isinstance(leaf, Tensor) and leaf.is_cuda for leaf in pytree.tree_leaves(args)):
        yield
        return
    stream, current = torch.cuda.Stream(), torch.cuda.current_stream()
    stream.wait_stream(current)
    with torch.cuda.stream(stream):
        yield
    current.wait_stream(stream)


def forward_and_total_ms(
    op: Callable[..., Any], sample: Sample, stopwatch: Stopwatch = replayed_ms
) -> tuple[float, float]:
    """Time forward, and forward with backward. Both times are equal if no input is differentiable."""
    with _side_stream(sample.args):
        return _forward_and_total_ms(op, sample, stopwatch)


def _forward_and_total_ms(op: Callable[..., Any], sample: Sample, stopwatch: Stopwatch) -> tuple[float, float]:
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
