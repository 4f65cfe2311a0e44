"""Start and name the process group of a run, also when the run is one process that no launcher started."""

import os
from datetime import timedelta

import torch
import torch.distributed as dist


def init_distributed(device_type: str, timeout_s: float = 1800.0) -> torch.device:
    """Initialise the default process group and return this rank's device.

    Under torchrun the ranks find each other through its environment; otherwise the group has one rank and opens no
    port. CUDA runs get NCCL for device tensors and gloo for host ones (asynchronous checkpoints need it), CPU runs
    get gloo. torchtitan's function of this name is not used: it picks the backend by what the host has instead of what
    the run uses, needs a launcher, and overwrites NCCL's environment variables.

    Raises: RuntimeError when the run wants CUDA and the host has none, or more local ranks than GPUs.
    """
    device = _local_device(device_type)
    if dist.is_initialized():
        return device
    backend = "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"
    timeout = timedelta(seconds=timeout_s)
    if "WORLD_SIZE" in os.environ:
        dist.init_process_group(backend, timeout=timeout)
    else:
        dist.init_process_group(backend, timeout=timeout, store=dist.HashStore(), rank=0, world_size=1)
    return device


def _local_device(device_type: str) -> torch.device:
    """The device of this process: GPU number LOCAL_RANK, or the CPU."""
    if device_type == "cpu":
        return torch.device("cpu")
    local_rank, num_gpus = int(os.environ.get("LOCAL_RANK", "0")), torch.cuda.device_count()
    if local_rank >= num_gpus:
        raise RuntimeError(
            f"run.device = {device_type!r} needs a GPU for local rank {local_rank}, but this host shows {num_gpus}; "
            f"start at most {num_gpus} ranks here, or set run.device = 'cpu'"
        )
    device = torch.device("cuda", local_rank)
    torch.cuda.set_device(device)
    return device
