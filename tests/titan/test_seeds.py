"""Seeds repeat, and determinism is a switch that also goes off."""

import pytest
import torch

from titan_moe.titan import set_determinism


@pytest.fixture(autouse=True)
def restore():
    yield
    set_determinism(0, is_deterministic=False)


def test_seed_repeats():
    set_determinism(5, is_deterministic=False)
    first = torch.rand(3)
    set_determinism(5, is_deterministic=False)
    assert torch.equal(torch.rand(3), first)
    set_determinism(6, is_deterministic=False)
    assert not torch.equal(torch.rand(3), first)


def test_switch():
    set_determinism(0, is_deterministic=True)
    assert torch.are_deterministic_algorithms_enabled() and torch.backends.cudnn.deterministic
    set_determinism(0, is_deterministic=False)
    assert not torch.are_deterministic_algorithms_enabled() and not torch.backends.cudnn.deterministic
