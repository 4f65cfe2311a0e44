"""Throughput: tokens/s, model FLOP/s and MFU between two logged steps."""

import resource
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from titan_moe.kernels.device import device_name
from titan_moe.plan.choice.hardware import find_hardware

GIB = 2**30


class Throughput:
    """A clock that is read only at logged steps, so that the host can run ahead in between.

    The first step after a start is logged separately: it contains compilation and autotuning, and later intervals do
    not. The caller reads the loss before each measurement, so the work of the device is complete.
    """

    def __init__(self, flops_per_token: float | None, device: torch.device, num_ranks: int) -> None:
        self.flops_per_token = flops_per_token
        self.num_ranks = num_ranks
        hardware = find_hardware(device_name(device))
        self.peak_flops = hardware.bf16_flops if hardware else None
        self.start()

    def start(self) -> None:
        """Start an interval."""
        self._started_s = time.perf_counter()
        self._num_steps = 0
        self._num_tokens = 0

    def count(self, num_tokens: int) -> None:
        """Add a step to the interval, with its tokens on all ranks."""
        self._num_steps += 1
        self._num_tokens += num_tokens

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Exclude the enclosed time (validation, a save) from the interval."""
        started_s = time.perf_counter()
        try:
            yield
        finally:
            self._started_s += time.perf_counter() - started_s

    def measure(self) -> dict[str, float | None]:
        """Report the interval and start the next one. Model FLOPs halve causal attention and exclude recomputation.
        `mfu` is their share of the device's bf16 peak. What is unknown is None."""
        seconds = time.perf_counter() - self._started_s
        tokens_per_second = self._num_tokens / seconds / self.num_ranks
        flops = None if self.flops_per_token is None else self.flops_per_token * tokens_per_second
        measured = {
            "tokens_per_second_per_gpu": tokens_per_second,
            "tflops_per_gpu": None if flops is None else flops / 1e12,
            "mfu": None if flops is None or not self.peak_flops else flops / self.peak_flops,
            "step_ms": 1e3 * seconds / self._num_steps,
        }
        self.start()
        return measured


def peak_memory_gib(device: torch.device) -> float:
    """Peak memory so far: allocated tensors on a GPU, the resident set size on a CPU."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device) / GIB
    unit_bytes = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit_bytes / GIB
