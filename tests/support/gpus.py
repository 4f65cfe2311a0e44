"""The GPUs of tests of ranks: one a rank, or with TITAN_MOE_RANKS_PER_GPU=4 one for four of them.

Ranks that share a GPU need the Multi-Process Service: `nvidia-cuda-mps-control -d` before the tests.
"""

import os
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from titan_moe.config.train import RunConfig
from titan_moe.run.device import device_of_rank

RANKS_PER_GPU = int(os.environ.get("TITAN_MOE_RANKS_PER_GPU", "1"))
SHARED = (f"--run.ranks_per_gpu={RANKS_PER_GPU}",)
"""What a command with several ranks says."""
NUM_GPUS = torch.cuda.device_count() * RANKS_PER_GPU
"""How many ranks have one, if shared."""
needs_gpus = pytest.mark.skipif(NUM_GPUS < 2, reason="needs at least two GPUs")


def take_gpu() -> torch.device:
    """The GPU of this rank of a pool, which is its device from now on."""
    with mock.patch.dict(os.environ, LOCAL_RANK=str(dist.get_rank())):
        device = device_of_rank(RunConfig(device="cuda", ranks_per_gpu=RANKS_PER_GPU))
        variables = {name: value for name, value in os.environ.items() if name != "LOCAL_RANK"}
    os.environ.update(variables)  # those of a shared GPU stay
    torch.cuda.set_device(device)
    return device
