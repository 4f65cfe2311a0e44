"""A run finds its process group and device, alone and under a launcher."""

import pytest
import torch
import torch.distributed as dist

from titan_moe.titan import init_distributed


@pytest.fixture(autouse=True)
def no_group_left():
    yield
    if dist.is_initialized():
        dist.destroy_process_group()


def test_one_process_needs_no_launcher(monkeypatch):
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    assert init_distributed("cpu") == torch.device("cpu")
    assert (dist.get_rank(), dist.get_world_size(), dist.get_backend()) == (0, 1, "gloo")
    total = torch.ones(1)
    dist.all_reduce(total)
    assert total.item() == 1
    assert init_distributed("cpu") == torch.device("cpu")  # a second call finds the group that is there


def test_a_launcher_is_obeyed(monkeypatch):
    environment = {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    init_distributed("cpu")
    assert dist.get_world_size() == 1


def test_more_ranks_than_gpus_are_refused(monkeypatch):
    monkeypatch.setenv("LOCAL_RANK", "3")
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    with pytest.raises(RuntimeError, match=r"run.device = 'cuda' .* local rank 3, but this host shows 2"):
        init_distributed("cuda")
