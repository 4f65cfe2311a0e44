"""The process group of a run, with or without torchrun, and the signals that stop it early."""

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
"""The exit code of a process ended by a signal is this plus the signal's number."""


@contextmanager
def process_group(config: RunConfig) -> Iterator[torch.device]:
    """Initialise the process group, of torchrun's ranks or of this process alone. Yields this rank's device.

    Raises: RecipeError if the recipe needs CUDA and this rank has no GPU.
    """
    device = _device(config)
    # gloo beside NCCL: stop signals and checkpoint plans are exchanged on the host
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
            if device.type == "cuda":  # all ranks: symmetric memory must not be freed while a peer still reads it
                torch.cuda.synchronize(device)
                dist.all_reduce(torch.zeros(1))
        finally:
            dist.destroy_process_group()
            # DTensor's caches keep meshes, and with them process groups, alive
            _clear_sharding_prop_cache()


def _device(config: RunConfig) -> torch.device:
    if config.device == "cpu" or (config.device == "auto" and not torch.cuda.is_available()):
        return torch.device("cpu")
    if not torch.cuda.is_available():
        way_out = 'use run.device = "cpu" or a CUDA build of torch'
        raise RecipeError([f'run.device = "cuda", but PyTorch finds no GPU; {way_out}'])
    index, num_gpus = int(os.environ.get("LOCAL_RANK", "0")), torch.cuda.device_count()
    if index >= num_gpus:
        found = f"local rank {index} has no GPU, PyTorch finds {num_gpus}"
        raise RecipeError([f"{found}; start at most {num_gpus} ranks per host"])
    return torch.device("cuda", index)


@contextmanager
def _determinism(is_on: bool) -> Iterator[None]:
    """Set PyTorch's deterministic mode. cuBLAS reads its workspace setting at its first use."""
    if is_on:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    was_on = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(is_on)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(was_on)


class StopSignal:
    """SIGTERM or Ctrl-C, reduced over ranks: all stop after the same step, also if they receive it at different ones.

    A context manager; on exit it restores the previous handlers. A second Ctrl-C ends the run at once. A second SIGTERM
    does not, because under SLURM the ranks receive it twice, from SLURM and from torchrun.
    """

    def __init__(self) -> None:
        self.number = 0
        """The signal received by any rank; 0 if none."""
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
        """Call once per step. Returns True on all ranks at the step after the first rank received its signal. Does not
        synchronise with the device."""
        if self._work is not None:
            self._work.wait()
        self.number = int(self._agreed)
        self._agreed = torch.tensor([self._received], dtype=torch.int32)
        self._work = dist.all_reduce(self._agreed, op=dist.ReduceOp.MAX, async_op=True)
        return self.number > 0
