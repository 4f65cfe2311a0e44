"""Report the rank that did not arrive at an exchange over symmetric memory.

A barrier that times out writes the missing rank into host memory (kernels/symm_mem/barrier.py). The host reads it
without the device: after each step, which is skipped then, and in a thread, because the main thread may wait for a
collective of the missing rank for ever.
"""

import logging
import os
import time
import weakref
from collections.abc import Sequence
from threading import Thread

import torch
from torch import Tensor

from titan_moe.kernels.symm_mem import barrier

logger = logging.getLogger("titan_moe")

SECONDS_BETWEEN_LOOKS = 1.0
SECONDS_TO_END = 300.0
"""Time for the main thread to raise the error and end the run, before the watcher ends the process."""


class MissingRank:
    """The first missing rank of this rank's group, if any."""

    def __init__(self, memory: Tensor, ranks: Sequence[int], limit_seconds: float = barrier.SPIN_LIMIT_SECONDS) -> None:
        """`memory` is this rank's own part of the symmetric memory; `ranks` are the group's global ranks."""
        self.ranks = ranks
        self.word = torch.zeros(1, dtype=torch.int32, pin_memory=memory.is_cuda)
        self.failed = memory.data[:4].view(torch.int32)
        """On the device, int32 [1]: not 0 once an exchange has failed."""
        memory.data[8:16].view(torch.int64).fill_(self.word.data_ptr())
        self._limit_ns = memory.data[16:24].view(torch.int64)
        self.set_limit(limit_seconds)
        Thread(target=_watch, args=(weakref.ref(self),), daemon=True).start()

    def set_limit(self, seconds: float) -> None:
        """Let the barriers from now on wait so long for a rank, also those of recorded graphs."""
        self.limit_seconds = seconds
        self._limit_ns.fill_(int(seconds * 1e9))

    @property
    def message(self) -> str:
        """The error, or an empty string."""
        number = int(self.word)
        if not number:
            return ""
        rank = self.ranks[number - 1]
        return (
            f"rank {rank} did not come to an exchange over symmetric memory within {self.limit_seconds:g} "
            f"seconds; no weight was changed since. It has ended, hangs or runs another recipe: see its log, and start "
            f"the run again"
        )

    def check(self) -> None:
        """Raise RuntimeError if a rank is missing."""
        if message := self.message:
            raise RuntimeError(message)


def _watch(reference: "weakref.ref[MissingRank]") -> None:
    """Log the error, and end the process if nothing else does."""
    while (missing := reference()) is not None:
        message, missing = missing.message, None
        if message:
            logger.critical(message)
            time.sleep(SECONDS_TO_END)
            if reference() is not None:
                os._exit(1)
            return
        time.sleep(SECONDS_BETWEEN_LOOKS)
