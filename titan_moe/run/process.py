"""The process group of a run, with or without torchrun, and the signals that stop it early."""

import logging
import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from datetime import timedelta
from types import FrameType
from typing import Any, Self

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d
from torch.distributed.tensor.debug import _clear_sharding_prop_cache

from titan_moe.config.train import RunConfig
from titan_moe.run.determinism import determinism
from titan_moe.run.device import device_of_rank
from titan_moe.run.failure import ExitedByItself, record_failure

logger = logging.getLogger("titan_moe")

EXIT_BY_SIGNAL = 128
"""The exit code of a process ended by a signal is this plus the signal's number."""
STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1)
"""What ends a run after the step at hand, saved. SLURM sends SIGUSR1 ahead of the end of a job, if it is asked to
(`--signal=USR1@120`)."""
PATIENCE = 6
"""Limit of the first step of a process, which compiles, and of saves and validations, over that of a step. Stages of a
pipeline compile at the same time (parallel/pipeline/rehearsal.py)."""
LEAST_TIMEOUT_MINUTES = 30.0
"""PyTorch's default for gloo."""


@contextmanager
def process_group(config: RunConfig) -> Iterator[torch.device]:
    """Initialise the process group, of torchrun's ranks or of this process alone. Yields this rank's device.

    An error of the enclosed code is recorded for the launcher, and stays the one that is raised. CUDA graphs with
    operations of NCCL must be released before the end (`StepRunner.release`): NCCL waits for that.

    Raises: RecipeError if the recipe needs CUDA and this rank has no GPU.
    """
    device = device_of_rank(config)
    # gloo beside NCCL: stop signals and checkpoint plans are exchanged on the host
    backend = "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"
    with determinism(config.is_deterministic), _timeouts(config.step_timeout_minutes):
        if device.type == "cuda":
            torch.cuda.set_device(device)
        if "RANK" in os.environ:
            dist.init_process_group(backend)
        else:
            dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)
        try:
            yield device
            wait_for_all_ranks(device)
        except BaseException as error:  # not every error of torch.distributed.checkpoint is an Exception
            first = ExitedByItself(error) if isinstance(error, SystemExit) else error
            record_failure(first, config.folder)
            with suppress(Exception):  # the first error's words are the last ones printed
                _destroy_groups()
            if isinstance(first, ExitedByItself):
                logger.error("rank %s: %s", os.environ.get("RANK", "0"), first.words)
                raise first from error
            raise
        finally:
            if dist.is_initialized():
                _destroy_groups()


def wait_for_all_ranks(device: torch.device) -> None:
    """Wait on GPUs until all ranks are here: symmetric memory must not be freed while a peer still reads it."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
        dist.all_reduce(torch.zeros(1))


def _destroy_groups() -> None:
    dist.destroy_process_group()
    # DTensor's caches keep meshes, and with them process groups, alive
    _clear_sharding_prop_cache()


@contextmanager
def _timeouts(minutes: float) -> Iterator[None]:
    """Set the timeouts of NCCL and gloo for every group that is made meanwhile, meshes included. They are a last
    resort: the watchdog's limits are shorter, and a backend names no late rank."""
    defaults = ("default_pg_timeout", "default_pg_nccl_timeout")
    previous = {name: getattr(distributed_c10d, name) for name in defaults}
    timeout = timedelta(minutes=max(LEAST_TIMEOUT_MINUTES, (PATIENCE + 1) * minutes))
    for name in defaults:
        if previous[name] is not None:  # a build without NCCL
            setattr(distributed_c10d, name, timeout)
    try:
        yield
    finally:
        for name, value in previous.items():
            setattr(distributed_c10d, name, value)


class StopSignal:
    """SIGTERM, SIGHUP, SIGUSR1, Ctrl-C or unreadable data, reduced over ranks: all stop after the same step, also if
    they receive a signal at different ones, or if one of them cannot read its data.

    A context manager; on exit it restores the previous handlers. SIGHUP, which a lost terminal sends, stays ignored
    under `nohup`. A second Ctrl-C ends the run at once. A second SIGTERM does so only some seconds later (watchdog.py),
    because under SLURM the ranks receive it twice, from SLURM and from torchrun.
    """

    def __init__(self) -> None:
        self.number = 0
        """The signal received by any rank; 0 if none."""
        self.has_unreadable_data = False
        """Whether any rank cannot read its data of the next step."""
        self.num_bad_rows = 0
        """Sum over ranks."""
        self._received = 0
        self._agreed = torch.zeros(len(STOP_SIGNALS) + 2, dtype=torch.int64)
        self._work: dist.Work | None = None

    def __enter__(self) -> Self:
        heard = [number for number in STOP_SIGNALS if signal.getsignal(number) != signal.SIG_IGN]
        self._previous = {number: signal.signal(number, self._receive) for number in heard}
        return self

    def __exit__(self, *_: Any) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, handler)

    def _receive(self, number: int, frame: FrameType | None) -> None:
        if self._received == number == signal.SIGINT:
            raise KeyboardInterrupt
        self._received = number

    def poll(self, has_unreadable_data: bool = False, num_bad_rows: int = 0) -> bool:
        """Call once per step. Returns True on all ranks at the step after the first rank received its signal, or said
        that it has unreadable data. Does not synchronise with the device."""
        if self._work is not None:
            self._work.wait()
        *received, unreadable, self.num_bad_rows = self._agreed.tolist()
        self.number = max(number if count else 0 for number, count in zip(STOP_SIGNALS, received, strict=True))
        self.has_unreadable_data = unreadable > 0
        received = [number == self._received for number in STOP_SIGNALS]
        self._agreed = torch.tensor([*received, has_unreadable_data, num_bad_rows], dtype=torch.int64)
        self._work = dist.all_reduce(self._agreed, async_op=True)
        return self.number > 0 or self.has_unreadable_data
