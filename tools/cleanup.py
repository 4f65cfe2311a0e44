"""What a measurement leaves in the processes of its ranks, and the way to be rid of it before the next one.

To start ranks costs far more than most measurements, so they follow each other in the same processes; each must find
memory, compiler and process groups as a fresh process has them.
"""

import gc

import torch
import torch.distributed as dist
from torch.distributed.tensor.debug import _clear_sharding_prop_cache

GIB = 2**30
MOST_LEFT_GIB = 0.25
"""Libraries keep a little for ever; more than this is something that a measurement should have given back."""


def forget(device: torch.device) -> None:
    """Give back what a job held, memory that ranks share too: all have seen its last all-reduce, so no peer reads there
    any more. No rank goes on before all are here: a job's line is written before a later job can fail."""
    torch.compiler.reset()  # sizes that differed for one candidate would be dynamic for the next
    gc.collect()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
        torch.cuda.empty_cache()
    arrived = torch.zeros((), device=device)
    dist.all_reduce(arrived)
    arrived.item()  # waits for it


def leave_groups() -> None:
    """Leave every process group but the world, on all ranks after `forget`: each holds buffers nobody counts.

    DTensor remembers what it worked out for a mesh by the mesh's shape, and would hand a later mesh of that shape the
    groups that are left here.
    """
    _clear_sharding_prop_cache()
    for group in [group for group in dist.distributed_c10d._world.pg_map if group is not dist.group.WORLD]:
        dist.destroy_process_group(group)


def refuse_leftovers(device: torch.device) -> None:
    """After `forget`. On the CPU nothing is known of single tensors.

    Raises: RuntimeError if so much memory is still held that the next measurement would count it as its own.
    """
    if device.type == "cuda":
        torch._C._cuda_clearCublasWorkspaces()  # one for each stream that ever computed
        held_gib = torch.cuda.memory_allocated(device) / GIB
        if held_gib > MOST_LEFT_GIB:
            raise RuntimeError(f"{held_gib:.1f} GiB were not given back; what follows needs new processes")
