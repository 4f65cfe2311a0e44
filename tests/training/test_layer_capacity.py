"""The bound of each layer is doubled, or lifted, once layers exceed it again and again."""

import logging

import pytest

from titan_moe.training.capacity_control import MANY_OVERFLOWS, WINDOW_STEPS, CapacityControl, FixedCapacity
from titan_moe.training.layer_capacity import LayerCapacity


def follow(control: LayerCapacity, overflows: list[bool]) -> list[float | None]:
    """The factors after each step."""
    return [control.follow({"has_overflowed_layer": float(has)}).layer_factor for has in overflows]


def test_many_overflows_double_the_bound_once() -> None:
    control = LayerCapacity(2.0)
    factors = follow(control, [True] * MANY_OVERFLOWS + [False] + [True] * (MANY_OVERFLOWS - 1))
    assert factors == [2.0] * (MANY_OVERFLOWS - 1) + [4.0] * (MANY_OVERFLOWS + 1)
    assert follow(control, [True]) == [8.0]


def test_overflows_far_apart_leave_the_bound() -> None:
    seldom = ([True] * (MANY_OVERFLOWS - 1) + [False] * WINDOW_STEPS) * 3
    assert set(follow(LayerCapacity(2.0), seldom)) == {2.0}


def test_a_bound_without_room_for_more_is_lifted_and_the_run_says_so(caplog: pytest.LogCaptureFixture) -> None:
    asked: list[float] = []
    control = LayerCapacity(2.0, lambda factor: bool(asked.append(factor)))
    with caplog.at_level(logging.WARNING):
        assert follow(control, [True] * MANY_OVERFLOWS + [False] * 9)[-1] == 0.0
    assert asked == [4.0] and len(caplog.messages) == 1
    assert "no room for parallel.expert_layer_capacity_factor = 4. Steps take layers in pieces" in caplog.text
    control.load_state_dict(LayerCapacity(8.0).state_dict())
    assert LayerCapacity(2.0).changes.layer_factor == 2.0 and control.factor == 0.0


def test_a_layer_that_has_no_room_leaves_the_bound_of_all_layers() -> None:
    """Unless all layers together need more, too."""
    metrics = {"has_overflowed": 1.0, "has_overflowed_layer": 1.0, "needed_factor": 1.2}
    control, fixed = CapacityControl(), FixedCapacity(1.25)
    control.factor = 1.25
    for _ in range(MANY_OVERFLOWS):
        assert control.follow(metrics).capacity_factor == 1.375, "it grows ahead, as of any need"
        fixed.follow(metrics)
    assert not control.overflows and fixed.num_reruns == 0
    assert control.follow(metrics | {"needed_factor": 1.5}).capacity_factor > 1.5 and len(control.overflows) == 1
    fixed.follow(metrics | {"needed_factor": 1.5})
    assert fixed.num_reruns == 1
