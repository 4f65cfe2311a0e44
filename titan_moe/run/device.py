"""The device of a rank: a GPU of its own, one that it shares with other ranks, or the CPU."""

import os
import socket

import torch

from titan_moe.config import RecipeError
from titan_moe.config.train import RunConfig


def device_of_rank(config: RunConfig) -> torch.device:
    """This rank's device. With `run.ranks_per_gpu` it also tells CUDA, NCCL and symmetric memory that ranks share a
    GPU, so it comes before the first context and the first process group.

    Raises: RecipeError if the recipe needs CUDA and this rank has no GPU.
    """
    if config.device == "cpu" or (config.device == "auto" and not torch.cuda.is_available()):
        return torch.device("cpu")
    if not torch.cuda.is_available():
        way_out = 'use run.device = "cpu" or a CUDA build of torch'
        raise RecipeError([f'run.device = "cuda", but PyTorch finds no GPU; {way_out}'])
    local_rank, num_gpus = int(os.environ.get("LOCAL_RANK", "0")), torch.cuda.device_count()
    if local_rank >= num_gpus * config.ranks_per_gpu:
        found = f"local rank {local_rank} has no GPU, PyTorch finds {num_gpus}"
        if config.ranks_per_gpu > 1:
            found += f" for {config.ranks_per_gpu} ranks each"
        raise RecipeError([f"{found}; start at most {num_gpus * config.ranks_per_gpu} ranks per host"])
    if config.ranks_per_gpu > 1:
        _share_gpu(local_rank, config.ranks_per_gpu)
    return torch.device("cuda", local_rank // config.ranks_per_gpu)


def is_first_of_node() -> bool:
    """Whether this rank does what each host needs once; all ranks where a launcher does not number them."""
    return os.environ.get("LOCAL_RANK", "0") == "0"


def _share_gpu(local_rank: int, num_ranks: int) -> None:
    # NCCL refuses two ranks on one GPU of a host: each is a host of its own, and they talk over sockets
    os.environ["NCCL_HOSTID"] = f"{socket.gethostname()}-{local_rank}"
    os.environ["TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES"] = "1"
    # under the Multi-Process Service, kernels that wait for a peer must leave room for its kernels
    os.environ.setdefault("CUDA_MPS_ACTIVE_THREAD_PERCENTAGE", str(100 // num_ranks))
