"""How fast a run is: tokens and model FLOPs by the clock between two logged steps."""

import resource
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from titan_moe.plan.hardware import find_hardware

GIB = 2**30


class Throughput:
    """A clock that is read at logged steps only, so that steps in between run ahead of the host.

    The first measure after a start covers one step, with everything that happens once (compilation, autotuning); it is
    the reason that the first step is logged, and later measures are free of it. Device work is complete when a measure
    is taken because the caller has read the loss just before.
    """

    def __init__(self, flops_per_token: float, device: torch.device, num_ranks: int) -> None:
        self.flops_per_token = flops_per_token
        self.num_ranks = num_ranks
        known = find_hardware(torch.cuda.get_device_name(device)) if device.type == "cuda" else None
        self.peak_flops = known.bf16_flops if known else None
        self.start()

    def start(self) -> None:
        """Begin an interval now."""
        self._began_s = time.perf_counter()
        self._num_steps = 0
        self._num_tokens = 0

    def count(self, num_tokens: int) -> None:
        """Add a step and its tokens, of all ranks, to the interval."""
        self._num_steps += 1
        self._num_tokens += num_tokens

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Leave what happens inside out of the interval: validation, a save."""
        began_s = time.perf_counter()
        try:
            yield
        finally:
            self._began_s += time.perf_counter() - began_s

    def measure(self) -> dict[str, float | None]:
        """Report the interval and begin the next one.

        Model FLOPs count what the model needs (causal attention halved), not what recomputation repeats; `mfu` is their
        share of the device's bf16 peak, none where the peak is not known.
        """
        seconds = time.perf_counter() - self._began_s
        tokens_per_second = self._num_tokens / seconds / self.num_ranks
        flops = self.flops_per_token * tokens_per_second
        step_ms = 1e3 * seconds / self._num_steps
        self.start()
        return {
            "tokens_per_second_per_gpu": tokens_per_second,
            "tflops_per_gpu": flops / 1e12,
            "mfu": flops / self.peak_flops if self.peak_flops else None,
            "step_ms": step_ms,
        }


def peak_memory_gib(device: torch.device) -> float:
    """The most memory held so far: allocated tensors on a GPU, the resident process on a CPU."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device) / GIB
    unit_bytes = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit_bytes / GIB
