"""Random generators resume where they stopped, also with the states of other ranks and devices."""

import json

import pytest
import torch
import torch.distributed as dist

from titan_moe.checkpoint.rng import RngState


@pytest.fixture(scope="module", autouse=True)
def one_rank():
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def test_rng_state_resumes():
    rng = RngState(torch.device("cpu"))
    torch.manual_seed(3)
    torch.randn(5)
    state = rng.state_dict()
    expected = torch.rand(4)
    torch.manual_seed(99)
    rng.load_state_dict(state)
    assert torch.equal(torch.rand(4), expected)


def test_rng_state_of_other_ranks_and_devices_loads():
    rng = RngState(torch.device("cpu"))
    (own,) = json.loads(rng.state_dict()["ranks"])
    torch.manual_seed(5)
    (other,) = json.loads(rng.state_dict()["ranks"])
    rng.load_state_dict({"ranks": json.dumps([own | {"cuda": "AAAA"}, other])})
    assert json.loads(rng.state_dict()["ranks"]) == [own]
