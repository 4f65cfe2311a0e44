"""A replayed kernel belongs to the part of its like in a step that was not replayed."""

from types import ModuleType

import pytest

from titan_moe.profile.breakdown import split
from titan_moe.profile.trace_parsing import read_events


def test_replayed_kernels_are_named_by_order(by_hand: ModuleType) -> None:
    timeline = read_events(by_hand.REPLAYED_STEPS, num_steps=1)
    assert (timeline.start_us, timeline.num_steps) == (2000, 1)
    named = [(span.part, span.is_backward, span.duration_us) for span in timeline.spans]
    assert named == [("attention", False, 30), ("experts", False, 100), ("attention", True, 40), ("other", False, 40)]


def test_the_gaps_of_a_replay_are_not_the_hosts(by_hand: ModuleType) -> None:
    result = split(read_events(by_hand.REPLAYED_STEPS, num_steps=1))
    assert result.step_ms == pytest.approx(0.3) and result.idle_ms == pytest.approx(0.09)
    assert result.host_bound_ms == pytest.approx(0.02 + 0.01), "until the launch, and after the last kernel"


def test_without_such_a_step_they_have_no_part(by_hand: ModuleType) -> None:
    alone = [event for event in by_hand.REPLAYED_STEPS if event["ts"] >= 2000]
    assert {span.part for span in read_events(alone).spans} == {"other"}


def test_work_of_earlier_steps_names_nothing(by_hand: ModuleType) -> None:
    """The device is behind: when the trace begins it still runs kernels whose launches nobody saw."""
    late = [by_hand.kernel(900 + index, "gemm", -50 + 10 * index, -45 + 10 * index) for index in range(2)]
    expected = [span.part for span in read_events(by_hand.REPLAYED_STEPS, num_steps=1).spans]
    assert [span.part for span in read_events([*late, *by_hand.REPLAYED_STEPS], num_steps=1).spans] == expected
