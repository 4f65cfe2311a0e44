"""The breakdown of a hand-written trace, exact to the microsecond."""

from types import ModuleType

import pytest

from titan_moe.profile.breakdown import break_down, top_kernels
from titan_moe.profile.trace_parsing import read_events


def test_breakdown_counts_every_instant_once(trace_events: ModuleType) -> None:
    timeline = read_events(trace_events.STEP_ON_GPU)
    result = break_down(timeline)
    assert timeline.is_gpu and timeline.num_steps == 1
    assert result.step_ms == pytest.approx(1.0)
    assert result.idle_ms == pytest.approx(0.260)
    assert (result.exposed_ms, result.hidden_ms) == (pytest.approx(0.140), pytest.approx(0.100))
    times = {part: (time.forward_ms, time.backward_ms, time.exposed_ms) for part, time in result.parts.items()}
    assert times == {
        "attention": pytest.approx((0.100, 0.100, 0)),
        "dispatch": pytest.approx((0, 0, 0.140)),
        "experts": pytest.approx((0.200, 0, 0)),
        "optimizer": pytest.approx((0.175, 0, 0)),  # 50 us at the same time as the copy
        "other": pytest.approx((0.025, 0, 0)),  # the copy, whose launch is not in the trace
    }
    assert result.parts["dispatch"].communication_ms == pytest.approx(0.240)
    total_ms = sum(time.total_ms for time in result.parts.values()) + result.idle_ms
    assert total_ms == pytest.approx(result.step_ms)
    assert result.named_share == pytest.approx(1 - 25 / 740)


def test_breakdown_gap_is_host_bound_until_the_launch(trace_events: ModuleType) -> None:
    # 40 of the first 50 us; 0 of the two gaps of 10 us, whose kernels were launched before; 50 of 70; 120 at the end
    assert break_down(read_events(trace_events.STEP_ON_GPU)).host_bound_ms == pytest.approx(0.210)


def test_breakdown_averages_steps(trace_events: ModuleType) -> None:
    second = [event | {"ts": event["ts"] + 1000} for event in trace_events.STEP_ON_GPU]
    for event in second:
        if "correlation" in event.get("args", {}):
            event["args"] = {"correlation": event["args"]["correlation"] + 100}
    both = break_down(read_events(trace_events.STEP_ON_GPU + second))
    one = break_down(read_events(trace_events.STEP_ON_GPU))
    assert both.step_ms == pytest.approx(one.step_ms) and both.idle_ms == pytest.approx(one.idle_ms)
    assert both.parts["experts"].forward_ms == pytest.approx(one.parts["experts"].forward_ms)


def test_breakdown_excludes_work_of_an_earlier_step(trace_events: ModuleType) -> None:
    """The device runs behind the host: the step starts when the work launched before it is done."""
    earlier = trace_events.kernel(900, "gemm", -100, 40)
    alone, behind = (
        break_down(read_events(events)) for events in (trace_events.STEP_ON_GPU, [earlier, *trace_events.STEP_ON_GPU])
    )
    assert behind.step_ms == pytest.approx(alone.step_ms - 0.04)
    assert behind.idle_ms == pytest.approx(alone.idle_ms - 0.04)
    assert behind.parts == alone.parts


def test_breakdown_includes_work_after_the_host_step(trace_events: ModuleType) -> None:
    late = trace_events.kernel(5, "late", 990, 1200)
    result = break_down(read_events([*trace_events.STEP_ON_GPU, late]))
    assert result.step_ms == pytest.approx(1.2)
    assert result.parts["optimizer"].forward_ms == pytest.approx(0.175 + 0.210)


def test_top_kernels_are_sorted_by_time(trace_events: ModuleType) -> None:
    first, second, third = top_kernels(read_events(trace_events.STEP_ON_GPU), num_names=3)
    assert (first.name, first.count, first.total_ms) == ("gemm", 3, pytest.approx(0.4))
    assert (second.name, second.part) == ("ncclDevKernel_SendRecv", "dispatch")
    assert (third.name, third.total_ms) == ("adamw", pytest.approx(0.2))


def test_breakdown_on_a_cpu_counts_self_time(trace_events: ModuleType) -> None:
    timeline = read_events(
        [
            trace_events.event("user_annotation", "ProfilerStep#1", 0, 100),
            trace_events.part("dispatch", 5, 95),
            trace_events.event("cpu_op", "titan_moe::permute", 10, 50),
            trace_events.event("cpu_op", "aten::sort", 20, 40),
            trace_events.event("cpu_op", "c10d::alltoall_base_", 55, 60),
            trace_events.event("user_annotation", "gloo:all_to_all", 58, 80, 3),
            trace_events.event("cpu_op", "aten::copy_", 59, 70, 3),
        ]
    )
    result = break_down(timeline)
    assert not timeline.is_gpu
    assert {entry.name: (entry.count, round(1e3 * entry.total_ms)) for entry in top_kernels(timeline)} == {
        "titan_moe::permute": (1, 20),
        "aten::sort": (1, 20),
        "c10d::alltoall_base_": (1, 5),
        "gloo:all_to_all": (1, 22),
    }
    dispatch = result.parts["dispatch"]
    assert (dispatch.forward_ms, dispatch.exposed_ms) == (pytest.approx(0.040), pytest.approx(0.025))
    assert result.idle_ms == result.host_bound_ms == pytest.approx(0.035)
