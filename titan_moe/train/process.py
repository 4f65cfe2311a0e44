"""The process group of a run, under torchrun or alone, and the signal that ends it early."""

import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any, Self

import torch
import torch.distributed as dist
from torch.distributed.tensor.debug import _clear_sharding_prop_cache

from titan_moe.config import RecipeError
from titan_moe.config.train import RunConfig

EXIT_BY_SIGNAL = 128
"""What shells add to the number of a signal that ended a process."""


@contextmanager
def process_group(config: RunConfig) -> Iterator[torch.device]:
    """Join the other ranks that torchrun started, or be the only one; yields this rank's device.

    Raises: RecipeError if the recipe asks for CUDA and there is none, or none for this rank.
    """
    device = _device(config)
    # gloo stands beside NCCL: stop signals and checkpoint plans are agreed on the host
    backend = "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"
    with _determinism(config.is_deterministic):
        if device.type == "cuda":
            torch.cuda.set_device(device)
        if "RANK" in os.environ:
            dist.init_process_group(backend)
        else:
            dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)
        try:
            yield device
            _leave_together(device)
        finally:
            dist.destroy_process_group()
            # DTensor remembers layouts with their meshes, and meshes keep their groups: none shall outlive the run
            _clear_sharding_prop_cache()


def _device(config: RunConfig) -> torch.device:
    if config.device == "cpu" or (config.device == "auto" and not torch.cuda.is_available()):
        return torch.device("cpu")
    if not torch.cuda.is_available():
        problem = 'run.device = "cuda", but PyTorch sees no GPU; use run.device = "cpu" or a CUDA build of torch'
        raise RecipeError([problem])
    index, num_gpus = int(os.environ.get("LOCAL_RANK", "0")), torch.cuda.device_count()
    if index >= num_gpus:
        problem = f"rank {index} of this host has no GPU, PyTorch sees {num_gpus}; start at most {num_gpus} ranks on it"
        raise RecipeError([problem])
    return torch.device("cuda", index)


def _leave_together(device: torch.device) -> None:
    """Let no rank's memory go while a peer may still read it: what ranks of a node share does not ask its owner."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
        dist.all_reduce(torch.zeros(1))


@contextmanager
def _determinism(is_on: bool) -> Iterator[None]:
    """Allow deterministic algorithms only, or any; the first use of cuBLAS must find its workspace configured."""
    if is_on:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    was_on = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(is_on)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(was_on)


class StopSignal:
    """SIGTERM or Ctrl-C, agreed by all ranks: they stop after the same step even if it reaches them at different ones.

    Used as a context: outside of it the signals mean what they meant before. A second Ctrl-C ends the run at once; a
    second SIGTERM does not, because under SLURM the ranks have it twice, from SLURM and from torchrun.
    """

    def __init__(self) -> None:
        self.number = 0
        """The signal that all ranks agreed on; 0 while there is none."""
        self._received = 0
        self._agreed = torch.zeros(1, dtype=torch.int32)
        self._work: dist.Work | None = None

    def __enter__(self) -> Self:
        self._previous = {number: signal.signal(number, self._receive) for number in (signal.SIGTERM, signal.SIGINT)}
        return self

    def __exit__(self, *_: Any) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, handler)

    def _receive(self, number: int, frame: FrameType | None) -> None:
        if self._received == number == signal.SIGINT:
            raise KeyboardInterrupt
        self._received = number

    def poll(self) -> bool:
        """Call once a step: True on every rank at the step after the first rank had its signal.

        Never waits for the device.
        """
        if self._work is not None:
            self._work.wait()
        self.number = int(self._agreed)
        self._agreed = torch.tensor([self._received], dtype=torch.int32)
        self._work = dist.all_reduce(self._agreed, op=dist.ReduceOp.MAX, async_op=True)
        return self.number > 0
