"""Symmetric memory between processes: every rank maps the files of all of its group."""

import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from triton.runtime import interpreter

from titan_moe.dispatch.symm_mem import SymmMemory

mapped: list[Tensor] = []
"""Memory of peers, which nobody but its addresses knows."""


def map_files(folder: str, num_bytes: int, group: dist.ProcessGroup, device: torch.device | None = None) -> SymmMemory:
    """What `open_symm_memory` does, for a folder that nobody used before."""
    _let_others_run()
    # a file is made of zeros, by whoever comes first
    files = [Path(folder, str(peer)) for peer in dist.get_process_group_ranks(group)]
    memories = [torch.from_file(str(file), shared=True, size=num_bytes, dtype=torch.uint8) for file in files]
    mapped.extend(memories)
    dist.barrier(group)
    peer_ptrs_P = torch.tensor([memory.data_ptr() for memory in memories])
    return SymmMemory(memories[dist.get_rank(group)], peer_ptrs_P, dist.get_rank(group))


def _let_others_run() -> None:
    """A rank that waits in a barrier leaves its core to those that it waits for: there are fewer cores than ranks."""
    builder: Any = interpreter.InterpreterBuilder
    try_once = getattr(builder, "try_once", builder.create_atomic_cas)

    def try_and_rest(self: Any, ptr: Any, expected: Any, *args: Any) -> Any:
        found = try_once(self, ptr, expected, *args)
        if (found.data != expected.data).any():
            time.sleep(1e-4)
        return found

    builder.try_once, builder.create_atomic_cas = try_once, try_and_rest
