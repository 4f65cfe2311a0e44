"""The trace by hand, to the microsecond."""

from types import ModuleType

import pytest

from titan_moe.profile.breakdown import split, top
from titan_moe.profile.trace_parsing import read_events


def test_every_instant_is_counted_once(by_hand: ModuleType) -> None:
    timeline = read_events(by_hand.STEP_ON_GPU)
    result = split(timeline)
    assert timeline.is_gpu and timeline.num_steps == 1
    assert result.step_ms == pytest.approx(1.0)
    assert result.idle_ms == pytest.approx(0.260)
    assert (result.exposed_ms, result.hidden_ms) == (pytest.approx(0.140), pytest.approx(0.100))
    times = {part: (time.forward_ms, time.backward_ms, time.exposed_ms) for part, time in result.parts.items()}
    assert times == {
        "attention": pytest.approx((0.100, 0.100, 0)),
        "dispatch": pytest.approx((0, 0, 0.140)),
        "experts": pytest.approx((0.200, 0, 0)),
        "optimizer": pytest.approx((0.175, 0, 0)),  # 50 us shared with the copy
        "other": pytest.approx((0.025, 0, 0)),  # the copy, whose launch is not in the trace
    }
    assert result.parts["dispatch"].messages_ms == pytest.approx(0.240)
    whole = sum(time.total_ms for time in result.parts.values()) + result.idle_ms
    assert whole == pytest.approx(result.step_ms)
    assert result.named_share == pytest.approx(1 - 25 / 740)


def test_a_gap_is_the_hosts_until_it_has_launched(by_hand: ModuleType) -> None:
    # 40 of the first 50 us; nothing of the two gaps of 10, whose kernels were launched; 50 of 70; all of the last 120
    assert split(read_events(by_hand.STEP_ON_GPU)).host_bound_ms == pytest.approx(0.210)


def test_steps_are_averaged(by_hand: ModuleType) -> None:
    second = [event | {"ts": event["ts"] + 1000} for event in by_hand.STEP_ON_GPU]
    for event in second:
        if "correlation" in event.get("args", {}):
            event["args"] = {"correlation": event["args"]["correlation"] + 100}
    both = split(read_events(by_hand.STEP_ON_GPU + second))
    one = split(read_events(by_hand.STEP_ON_GPU))
    assert both.step_ms == pytest.approx(one.step_ms) and both.idle_ms == pytest.approx(one.idle_ms)
    assert both.parts["experts"].forward_ms == pytest.approx(one.parts["experts"].forward_ms)


def test_work_of_an_earlier_step_is_not_this_ones(by_hand: ModuleType) -> None:
    """The device is behind: the step begins when it has done what was launched before."""
    earlier = by_hand.kernel(900, "gemm", -100, 40)
    alone, behind = (split(read_events(events)) for events in (by_hand.STEP_ON_GPU, [earlier, *by_hand.STEP_ON_GPU]))
    assert behind.step_ms == pytest.approx(alone.step_ms - 0.04)
    assert behind.idle_ms == pytest.approx(alone.idle_ms - 0.04)
    assert behind.parts == alone.parts


def test_work_outlives_its_step_on_the_host(by_hand: ModuleType) -> None:
    late = by_hand.kernel(5, "late", 990, 1200)
    result = split(read_events([*by_hand.STEP_ON_GPU, late]))
    assert result.step_ms == pytest.approx(1.2)
    assert result.parts["optimizer"].forward_ms == pytest.approx(0.175 + 0.210)


def test_the_slowest_kernels(by_hand: ModuleType) -> None:
    first, second, third = top(read_events(by_hand.STEP_ON_GPU), num_names=3)
    assert (first.name, first.count, first.total_ms) == ("gemm", 3, pytest.approx(0.4))
    assert (second.name, second.part) == ("ncclDevKernel_SendRecv", "dispatch")
    assert (third.name, third.total_ms) == ("adamw", pytest.approx(0.2))


def test_on_a_cpu_operations_count_without_what_is_inside(by_hand: ModuleType) -> None:
    timeline = read_events(
        [
            by_hand.event("user_annotation", "ProfilerStep#1", 0, 100),
            by_hand.part("dispatch", 5, 95),
            by_hand.event("cpu_op", "titan_moe::permute", 10, 50),
            by_hand.event("cpu_op", "aten::sort", 20, 40),
            by_hand.event("cpu_op", "c10d::alltoall_base_", 55, 60),
            by_hand.event("user_annotation", "gloo:all_to_all", 58, 80, 3),
            by_hand.event("cpu_op", "aten::copy_", 59, 70, 3),
        ]
    )
    result = split(timeline)
    assert not timeline.is_gpu
    assert {entry.name: (entry.count, round(1e3 * entry.total_ms)) for entry in top(timeline)} == {
        "titan_moe::permute": (1, 20),
        "aten::sort": (1, 20),
        "c10d::alltoall_base_": (1, 5),
        "gloo:all_to_all": (1, 22),
    }
    dispatch = result.parts["dispatch"]
    assert (dispatch.forward_ms, dispatch.exposed_ms) == (pytest.approx(0.040), pytest.approx(0.025))
    assert result.idle_ms == result.host_bound_ms == pytest.approx(0.035)
