"""Clean up after a measurement, before the next one in the same processes.

Launching ranks takes far longer than most measurements, so several run in the same processes. Each must start with the
memory, compiler state and process groups of a new process.
"""

import gc

import torch
import torch.distributed as dist
from torch.distributed.tensor.debug import _clear_sharding_prop_cache

GIB = 2**30
MAX_HELD_GIB = 0.25
"""Libraries keep a small amount. More than this belongs to a measurement."""


def free_memory(device: torch.device) -> None:
    """Free the memory of a job, symmetric memory included: no peer reads it after the job's last all-reduce.

    Synchronises all ranks, so a job's result is written before a later job can fail.
    """
    torch.compiler.reset()  # otherwise sizes that differ between candidates would become dynamic
    gc.collect()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
        torch.cuda.empty_cache()
    zero = torch.zeros((), device=device)
    dist.all_reduce(zero)
    zero.item()  # waits for the all-reduce


def destroy_subgroups() -> None:
    """Destroy every process group but the world, on all ranks after `free_memory`. Groups hold buffers.

    Also clears DTensor's cache, which is keyed by the shape of a mesh: a later mesh of equal shape would get the
    destroyed groups.
    """
    _clear_sharding_prop_cache()
    for group in [group for group in dist.distributed_c10d._world.pg_map if group is not dist.group.WORLD]:
        dist.destroy_process_group(group)


def check_memory(device: torch.device) -> None:
    """Check after `free_memory` that the next measurement starts without allocated memory. Does nothing on a CPU.

    Raises: RuntimeError if more than MAX_HELD_GIB are allocated.
    """
    if device.type == "cuda":
        torch._C._cuda_clearCublasWorkspaces()  # one per stream
        held_gib = torch.cuda.memory_allocated(device) / GIB
        if held_gib > MAX_HELD_GIB:
            raise RuntimeError(f"{held_gib:.1f} GiB were not freed; the next measurement needs new processes")
