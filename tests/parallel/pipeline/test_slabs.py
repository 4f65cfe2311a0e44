"""Each microbatch in flight has a slab of the arena of its own, the same in every step."""

import pytest
import torch

from titan_moe.dispatch.capacity import ExpertCapacity
from titan_moe.kernels.experts.arena import Arena
from titan_moe.parallel.pipeline.slabs import Slabs
from titan_moe.plan.cost.loads import LayerLoads
from titan_moe.plan.pipeline.schedules import actions_of
from titan_moe.plan.pipeline.simulation import max_delayed, max_held

LAYOUTS = {"1f1b": 1, "interleaved_1f1b": 2, "zbv": 2, "dualpipev": 2}
PP, NUM_MICROBATCHES = 4, 12


def capacity_of(num_slabs: int, **options: int) -> ExpertCapacity:
    capacity = ExpertCapacity(1.5)
    capacity.use_arena(Arena(2, 2, torch.float32, "cpu", num_slabs=num_slabs, **options), LayerLoads(1, 2, 2, 2, 2))
    return capacity


def forwards(capacity: ExpertCapacity, slabs: Slabs, actions: list) -> list[int]:
    """The slab of each forward of a step, and the delayed slab of each split backward."""
    chosen = []
    in_flight: dict[tuple[int, int], int] = {}
    delayed: dict[tuple[int, int], int] = {}
    for action in actions:
        if action.kind == "forward":
            with slabs.forward_of(*action[1:]):
                chosen.append(capacity.slab)
            assert capacity.slab == 0
            assert chosen[-1] not in in_flight.values(), "another one is kept there"
            in_flight[action[1:]] = chosen[-1]
        if action.delays:
            with slabs.backward_of(*action[1:]):
                chosen.append(capacity.arena.delayed_slab)
            assert chosen[-1] not in delayed.values(), "another one waits there"
            delayed[action[1:]] = chosen[-1]
        if action.frees:
            slabs.free(*action[1:])
            del in_flight[action[1:]]
            delayed.pop(action[1:], None)
    assert not slabs.taken and not slabs.delayed
    return chosen


@pytest.mark.parametrize("rank", range(PP))
@pytest.mark.parametrize("schedule", LAYOUTS)
def test_slabs_are_those_of_microbatches_that_have_ended(schedule: str, rank: int) -> None:
    vpp = LAYOUTS[schedule]
    actions = actions_of(schedule, PP, vpp, NUM_MICROBATCHES)[rank]
    ones = dict.fromkeys(range(PP * vpp), 1.0)
    most, most_delayed = round(max_held(actions, ones)), round(max_delayed(actions, ones))
    capacity, stages = capacity_of(most, num_delayed_slabs=most_delayed), frozenset(range(PP * vpp))
    first = forwards(capacity, Slabs(capacity, stages), actions)
    assert set(first) == set(range(most)), "all are used"
    assert forwards(capacity, Slabs(capacity, stages), actions) == first
    if most > 1:
        few = capacity_of(most - 1, num_delayed_slabs=most_delayed)
        with pytest.raises(RuntimeError, match=f"the arena has {most - 1} slabs"):
            forwards(few, Slabs(few, stages), actions)
    if most_delayed > 1:
        few = capacity_of(most, num_delayed_slabs=most_delayed - 1)
        with pytest.raises(RuntimeError, match=f"the arena has {most_delayed - 1} delayed slabs"):
            forwards(few, Slabs(few, stages), actions)


def test_stages_without_experts_and_recomputed_ones_need_no_slab_of_the_arena() -> None:
    capacity = capacity_of(1)
    slabs = Slabs(capacity, frozenset({1}))
    with slabs.forward_of(1, 0):
        pass
    for microbatch in range(2):
        with slabs.forward_of(0, microbatch):
            assert capacity.slab == 0
    assert list(slabs.taken) == [(1, 0)]
    slabs.free(0, 0)
    slabs.free(1, 0)
    assert not slabs.taken
    lifted = capacity_of(1, num_delayed_slabs=1)
    delaying = Slabs(lifted, frozenset({0}))
    with lifted.unbounded():
        for microbatch in range(2):
            with delaying.backward_of(0, microbatch):
                assert not delaying.delayed, "nothing is kept to delay"
    capacity = capacity_of(1, is_checkpointed=True)
    recomputed = Slabs(capacity, frozenset({0}))
    for microbatch in range(2):
        with recomputed.forward_of(0, microbatch):
            assert capacity.slab == 0 and not recomputed.taken, "all share the one slab"
