"""The states of what adapts are saved under their names; flat keys of earlier versions are read."""

import json

import torch

from titan_moe.training.capacity_control import CapacityControl, FixedCapacity, LargestNeed
from titan_moe.training.clone_control import CloneControl
from titan_moe.training.progress import Progress
from titan_moe.training.skips import Skips
from titan_moe.training.spikes import Spikes

CLONES = {"are_used": True, "recent": [1.5, 1.25], "steps_to_wait": 7}


def all_that_adapts() -> Progress:
    cpu = torch.device("cpu")
    return Progress([Skips(cpu), Spikes(6.0, cpu), CapacityControl(), LargestNeed(), CloneControl(1.1)])


def test_states_come_back() -> None:
    before, after = all_that_adapts(), all_that_adapts()
    before.step, before.tokens_seen = 3, 96
    before.states["clones"].load_state_dict(CLONES)
    before.states["skips"].load_state_dict({"num_in_row": 2})
    before.states["largest_need"].load_state_dict({"factor": 1.5})
    after.load_state_dict(before.state_dict())
    assert after.state_dict() == before.state_dict()
    assert after.step == 3 and len(before.state_dict()) == 2 + 5


def test_flat_keys_of_earlier_versions_are_read() -> None:
    """The checkpoint's reader has given the two numbers their new names."""
    now = all_that_adapts()
    flat = {"step": 9, "tokens_seen": 288, "spikes": "", "clones": json.dumps(CLONES)}
    now.load_state_dict(now.state_dict() | flat | {"capacity": 1.75, "skips": 4})
    states = {name: each.state_dict() for name, each in now.states.items()}
    assert states["skips"] == {"num_in_row": 4} and states["clones"] == CLONES
    assert states["spikes"]["num_seen"] == 0 and states["capacity"] == {"factor": 0.0}
    changes = now.states["capacity"].follow({"needed_factor": 1.2, "has_overflowed": 0.0})
    assert changes.capacity_factor == 1.75, "after one step"


def test_a_chosen_bound_goes_on_from_a_fixed_one() -> None:
    after = Progress([CapacityControl()])
    after.load_state_dict(Progress([FixedCapacity(1.5)]).state_dict())
    assert after.states["capacity"].follow({"needed_factor": 1.0, "has_overflowed": 0.0}).capacity_factor == 1.5
