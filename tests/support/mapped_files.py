"""Symmetric memory between processes on CPU: every rank maps one file of each rank of its group."""

import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from triton.runtime import interpreter

from titan_moe.dispatch.symm_mem.memory import SymmMemory

mapped: list[Tensor] = []
"""Keeps the peers' memory mapped: kernels have only its addresses."""
PAUSES_S = (1e-4, 1e-4, 2e-4, 4e-4)
"""In a poll."""


def map_files(folder: str, num_bytes: int, group: dist.ProcessGroup, device: torch.device | None = None) -> SymmMemory:
    """`open_symm_memory` for processes, with files in an empty folder."""
    _yield_in_spin_loops()
    # the first rank to open a file creates it, filled with zeros
    files = [Path(folder, str(peer)) for peer in dist.get_process_group_ranks(group)]
    memories = [torch.from_file(str(file), shared=True, size=num_bytes, dtype=torch.uint8) for file in files]
    mapped.extend(memories)
    dist.barrier(group)
    peer_ptrs_P = torch.tensor([memory.data_ptr() for memory in memories])
    return SymmMemory(memories[dist.get_rank(group)], peer_ptrs_P, dist.get_rank(group))


def _yield_in_spin_loops() -> None:
    """After each failed try of a barrier's spin loop try again without the interpreter, and sleep between: with fewer
    cores than ranks the peers need the core."""
    builder: Any = interpreter.InterpreterBuilder
    try_once = getattr(builder, "try_once", builder.create_atomic_cas)

    def try_and_sleep(self: Any, ptr: Any, expected: Any, *args: Any) -> Any:
        found = try_once(self, ptr, expected, *args)
        for pause_s in PAUSES_S:
            if (found.data == expected.data).all():
                break
            time.sleep(pause_s)
            found = try_once(self, ptr, expected, *args)
        return found

    builder.try_once, builder.create_atomic_cas = try_once, try_and_sleep
