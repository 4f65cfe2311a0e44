"""The device of a rank: its own GPU, or one that ranks share."""

import os

import pytest
import torch

from titan_moe.config import RecipeError
from titan_moe.config.train import RunConfig
from titan_moe.run.device import device_of_rank

SET_FOR_SHARED_GPUS = ("NCCL_HOSTID", "TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES", "CUDA_MPS_ACTIVE_THREAD_PERCENTAGE")


@pytest.fixture
def of_local_rank(monkeypatch: pytest.MonkeyPatch):
    """The device of a local rank on a host with two GPUs, which this test pretends to have."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    for name in ("LOCAL_RANK", *SET_FOR_SHARED_GPUS):
        monkeypatch.setenv(name, "of an earlier test")  # what it sets ends with the test
        monkeypatch.delenv(name)

    def device(local_rank: int, ranks_per_gpu: int = 1) -> torch.device:
        monkeypatch.setenv("LOCAL_RANK", str(local_rank))
        return device_of_rank(RunConfig(ranks_per_gpu=ranks_per_gpu))

    return device


def test_each_rank_has_its_own_gpu(of_local_rank) -> None:
    assert [of_local_rank(rank).index for rank in range(2)] == [0, 1]
    assert not os.environ.keys() & set(SET_FOR_SHARED_GPUS)
    with pytest.raises(RecipeError, match="local rank 2 has no GPU, PyTorch finds 2; start at most 2 ranks per host"):
        of_local_rank(2)


def test_ranks_share_a_gpu(of_local_rank) -> None:
    hosts = set()
    for rank in range(8):
        assert of_local_rank(rank, ranks_per_gpu=4).index == rank // 4
        hosts.add(os.environ["NCCL_HOSTID"])
    assert len(hosts) == 8, "NCCL refuses two ranks of one host on one GPU"
    assert os.environ["CUDA_MPS_ACTIVE_THREAD_PERCENTAGE"] == "25"
    with pytest.raises(RecipeError, match="finds 2 for 4 ranks each; start at most 8 ranks per host"):
        of_local_rank(8, ranks_per_gpu=4)


def test_a_share_of_the_environment_stays(of_local_rank, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_MPS_ACTIVE_THREAD_PERCENTAGE", "10")
    of_local_rank(1, ranks_per_gpu=2)
    assert os.environ["CUDA_MPS_ACTIVE_THREAD_PERCENTAGE"] == "10"
