"""Memory that the GPUs of one node share over NVLink, opened by all of them together."""

import socket
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from titan_moe.config.dispatchers import dispatchers_that


class SymmMemory(NamedTuple):
    """Memory that all ranks of a group can access, for one stream and any number of layers.

    Streams that wait for each other before each exchange count as one, for example that of a step's capture and that of
    the warm-up steps before it.
    """

    local: Tensor
    """uint8, this rank's own memory, initialised to zeros. Its lifetime is that of the mapping of the peers' memory."""
    peer_ptrs_P: Tensor
    """int64, the addresses of all ranks' memory in this rank's address space."""
    rank: int

    def __deepcopy__(self, memo: Any) -> "SymmMemory":
        """A copied model shares the memory: peers have no address of a copy."""
        return self


def open_symm_memory(num_bytes: int, group: dist.ProcessGroup, device: torch.device) -> SymmMemory:
    """Allocate memory that the GPUs of one node access over NVLink. All ranks of the group must call it, with the same
    size.

    `symm_bytes` (kernels/symm_mem/arrays.py) gives the size for a microbatch. The memory comes from the driver, not
    from PyTorch's caching allocator.

    Raises: ValueError if the ranks are not on one node.
    """
    import torch.distributed._symmetric_memory as symmetric

    _refuse_other_hosts(group)
    if symmetric.get_backend(device) != "CUDA":  # the backend with addresses that kernels can use
        symmetric.set_backend("CUDA")
    local = symmetric.empty(num_bytes, dtype=torch.uint8, device=device)
    handle = symmetric.rendezvous(local, group)
    local.zero_()
    torch.cuda.synchronize(device)
    # the memory may be part of a larger buffer, so a peer's address is its buffer's plus an offset. Gathering the
    # offsets also waits until all ranks have written their zeros, which must not overwrite a signal
    offsets = _all_gather_object(local.data_ptr() - handle.buffer_ptrs[handle.rank], group)
    addresses = [buffer + offset for buffer, offset in zip(handle.buffer_ptrs, offsets, strict=True)]
    return SymmMemory(local, torch.tensor(addresses, dtype=torch.int64, device=device), handle.rank)


def close_symm_memory(group: dist.ProcessGroup) -> None:
    """Wait until no rank of the group accesses its peers' memory any more. Then each rank may free its own."""
    torch.cuda.synchronize()
    _all_gather_object(None, group)


def _refuse_other_hosts(group: dist.ProcessGroup) -> None:
    hosts = sorted(set(_all_gather_object(socket.gethostname(), group)))
    if len(hosts) > 1:
        raise ValueError(
            f"symmetric memory connects GPUs of one node, but the {group.size()} ranks of this group are on "
            f"{len(hosts)} nodes: {', '.join(hosts)}; take a smaller parallel.ep, or parallel.dispatcher = "
            f"{dispatchers_that(lambda facts: facts.moves_rows and not facts.is_one_node)}"
        )


def _all_gather_object(value: Any, group: dist.ProcessGroup) -> list[Any]:
    """The values of all ranks, in rank order; a barrier too."""
    values = [None] * group.size()
    dist.all_gather_object(values, value, group=group)
    return values
