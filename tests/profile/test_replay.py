"""A replayed kernel has the part of the same kernel in a launched step."""

from types import ModuleType

import pytest

from titan_moe.profile.breakdown import break_down
from titan_moe.profile.trace_parsing import read_events


def test_replay_kernels_are_attributed_by_order(trace_events: ModuleType) -> None:
    timeline = read_events(trace_events.REPLAYED_STEPS)
    assert (timeline.start_us, timeline.num_steps) == (2000, 1)
    named = [(span.part, span.is_backward, span.duration_us) for span in timeline.spans]
    assert named == [("attention", False, 30), ("experts", False, 100), ("attention", True, 40), ("other", False, 40)]


def test_replay_gaps_are_not_host_bound(trace_events: ModuleType) -> None:
    result = break_down(read_events(trace_events.REPLAYED_STEPS))
    assert result.step_ms == pytest.approx(0.3) and result.idle_ms == pytest.approx(0.09)
    assert result.host_bound_ms == pytest.approx(0.02 + 0.01), "until the launch, and after the last kernel"


def test_replay_without_a_launched_step_has_no_parts(trace_events: ModuleType) -> None:
    alone = [event for event in trace_events.REPLAYED_STEPS if event["ts"] >= 2000]
    assert {span.part for span in read_events(alone).spans} == {"other"}


def test_replay_ignores_work_of_earlier_steps(trace_events: ModuleType) -> None:
    """The device runs behind the host: the trace starts with kernels that were launched before it."""
    late = [trace_events.kernel(900 + index, "gemm", -50 + 10 * index, -45 + 10 * index) for index in range(2)]
    expected = [span.part for span in read_events(trace_events.REPLAYED_STEPS).spans]
    assert [span.part for span in read_events([*late, *trace_events.REPLAYED_STEPS]).spans] == expected
