"""Lanes of a pipeline from hand-written traces: two ranks, on CPUs and on GPUs."""

from types import ModuleType
from typing import Any

import pytest

from titan_moe.plan.pipeline.action import Action, Pair
from titan_moe.plan.pipeline.simulation import Run, Simulation
from titan_moe.profile.breakdown import break_down
from titan_moe.profile.lanes import Shares, mean_times, read_lanes, shares_of, with_mean_times
from titan_moe.profile.trace_parsing import Timeline, read_events

Events = list[dict[str, Any]]


def on_cpus(e: ModuleType, offset_us: float = 0.0) -> tuple[Events, Events]:
    """Two microbatches through two ranks; rank 1 has times of its own clock, which is `offset_us` behind."""
    first = [
        e.event("user_annotation", "ProfilerStep#1", 0, 10_000),
        e.action("forward", 0, 0, 1000, 2000),
        e.message(2000, 2100),
        e.action("forward", 0, 1, 2100, 3000),
        e.action("backward", 0, 0, 3000, 6000),
        e.message(3100, 4000),
        e.action("backward", 0, 1, 6000, 8000),
    ]
    second = [
        e.event("user_annotation", "ProfilerStep#1", 0, 10_000),
        e.action("receive_activation", 1, 0, 900, 950),
        e.message(910, 940),
        e.action("forward", 1, 0, 1000, 3000),
        e.message(1010, 2000),
        e.action("backward", 1, 0, 3000, 3900),
        e.action("forward", 1, 1, 4100, 5000),
        e.action("backward", 1, 1, 5000, 5900),
    ]
    return first, [event | {"ts": event["ts"] - offset_us} for event in second]


def in_two_steps(events: Events) -> Events:
    return [*events, *(event | {"ts": event["ts"] + 10_000} for event in events)]


def times_of(lanes: Simulation) -> list[list[tuple[str, int, float, float]]]:
    return [[(run.action.kind, run.action.microbatch, run.start, run.end) for run in runs] for runs in lanes.runs]


CPU_TIMES = [
    [("forward", 0, 0, 1), ("forward", 1, 1.1, 2), ("backward", 0, 3, 5), ("backward", 1, 5, 7)],
    [("forward", 0, 1, 2), ("backward", 0, 2, 2.9), ("forward", 1, 3.1, 4), ("backward", 1, 4, 4.9)],
]


def test_lanes_of_cpus_leave_waits_out(trace_events: ModuleType) -> None:
    lanes = read_lanes([read_events(events, 5e9) for events in on_cpus(trace_events)], clocks_agree=True)
    assert times_of(lanes) == CPU_TIMES
    assert lanes.max_in_flight == [2, 1] and lanes.makespan == 7
    assert shares_of(lanes, 0) == pytest.approx((5.9 / 7, 0, 1 / 7, 0.1 / 7))
    assert shares_of(lanes, 1) == pytest.approx((3.7 / 7, 1.2 / 7, 0, 2.1 / 7))
    assert lanes.bubble_share == pytest.approx(1 - (5.9 + 3.7) / 14)


def test_lanes_of_several_hosts_begin_together(trace_events: ModuleType) -> None:
    """Their clocks differ: rank 1's first range is a receive, which it begins with the step."""
    events = on_cpus(trace_events, offset_us=500_000)
    timelines = [read_events(of_rank, 0.0) for of_rank in events]
    apart = read_lanes(timelines, clocks_agree=True)
    assert apart.makespan > 490
    together = read_lanes(timelines, clocks_agree=False)
    assert together.runs[1][0].start == pytest.approx(1.1) and together.makespan == 7
    second_step = [read_events(in_two_steps(of_rank), 0.0) for of_rank in events]
    assert read_lanes(second_step, clocks_agree=False).runs[1][0].start == pytest.approx(1.1)


def test_lanes_are_those_of_the_last_step(trace_events: ModuleType) -> None:
    twice = [in_two_steps(events) for events in on_cpus(trace_events)]
    twice[0][-1]["dur"] += 1000
    lanes = read_lanes([read_events(events, 0.0) for events in twice], clocks_agree=True)
    assert [len(runs) for runs in lanes.runs] == [4, 4] and lanes.makespan == 8


def with_pairs(e: ModuleType) -> tuple[Events, Events]:
    """Rank 0 waits for the activation of its pair, rank 1 for the gradient of its own."""
    first = [
        e.event("user_annotation", "ProfilerStep#1", 0, 10_000),
        e.action("forward", 0, 1, 0, 1000),
        e.action("backward", 0, 0, 1000, 3000),
        e.action("forward", 3, 1, 4000, 6000, " + backward 0 1"),
        e.action("backward", 3, 1, 6000, 8000),
    ]
    second = [
        e.event("user_annotation", "ProfilerStep#1", 0, 10_000),
        e.action("backward", 1, 1, 1000, 2000),
        e.action("forward", 2, 1, 2000, 3900),
        e.action("forward", 1, 2, 8000, 9900, " + backward 2 1"),
        e.message(8010, 8100),
    ]
    return first, second


def test_lanes_of_pairs(trace_events: ModuleType) -> None:
    lanes = read_lanes([read_events(events, 0.0) for events in with_pairs(trace_events)], clocks_agree=True)
    of_first, of_second = (
        Pair(Action("forward", 3, 1), Action("backward", 0, 1)),
        Pair(Action("forward", 1, 2), Action("backward", 2, 1)),
    )
    assert lanes.runs[0][2] == Run(0, of_first, 4, 6) and lanes.runs[1][2] == Run(1, of_second, 8.1, 9.9)
    total = 9.9
    assert shares_of(lanes, 0) == pytest.approx((7 / total, 1 / total, 0, 1.9 / total))
    assert shares_of(lanes, 1) == pytest.approx((4.7 / total, 0, 4.2 / total, 1 / total))
    assert mean_times(lanes).pairs == pytest.approx({(3, 0): 2.0, (1, 2): 1.8})
    assert mean_times(lanes).alone["backward", 0] == 2.0


def test_lanes_with_mean_times_of_pairs() -> None:
    forward, backward = ([Action(kind, 0, number) for number in range(3)] for kind in ("forward", "backward"))
    actions = [(forward[0], 2.0), (Pair(forward[1], backward[0]), 3.0), (Pair(forward[2], backward[1]), 5.0)]
    runs, now = [], 0.0
    for action, time in [*actions, (backward[2], 2.0)]:
        runs.append(Run(0, action, now, now + time))
        now += time + 1
    schedule = with_mean_times(Simulation([runs]))
    assert [run.end - run.start for run in schedule.runs[0]] == [2, 4, 4, 2] and schedule.makespan == 12


def test_lanes_without_actions_are_refused(trace_events: ModuleType) -> None:
    timeline = read_events(trace_events.STEP_ON_GPU)
    with pytest.raises(ValueError, match="rank 0 has no pipeline actions"):
        read_lanes([timeline], clocks_agree=True)


def gpu_rank(e: ModuleType) -> Timeline:
    """Rank 1 of two: the host runs ahead, and kernels of a backward are launched by another thread."""
    return read_events(
        [
            e.event("user_annotation", "ProfilerStep#1", 0, 9000),
            e.message(0, 10),
            e.launch(1, 2, 4),
            e.action("forward", 1, 0, 10, 50),
            e.event("user_annotation", "FSDP::all_gather_copy_in", 12, 16),
            e.launch(2, 13, 15),
            e.launch(8, 17, 19),
            e.launch(3, 20, 25),
            e.launch(4, 30, 35),
            e.action("backward", 1, 0, 50, 90),
            e.launch(5, 60, 65, thread=2),
            e.message(90, 100),
            e.launch(6, 92, 94),
            e.action("forward", 1, 1, 100, 150),
            e.launch(7, 110, 115),
            e.kernel(1, "ncclDevKernel_SendRecv", 5, 1000, stream=9),
            e.kernel(2, "copy", 20, 30, stream=3),  # before the input is there
            e.kernel(8, "ncclDevKernel_AllGather", 30, 60, stream=4),
            e.kernel(3, "gemm", 1000, 1400),
            e.kernel(4, "gemm", 1500, 2000),
            e.kernel(5, "gemm", 2100, 4000),
            e.kernel(6, "ncclDevKernel_SendRecv", 4000, 4300, stream=9),
            e.kernel(7, "gemm", 5000, 6000),
        ],
        0.0,
    )


def test_lanes_of_a_gpu_are_of_kernels(trace_events: ModuleType) -> None:
    e = trace_events
    first = read_events(
        [
            e.event("user_annotation", "ProfilerStep#1", 0, 9000),
            *(e.action("forward", 0, number, 10 + 20 * number, 30 + 20 * number) for number in range(2)),
            *(e.launch(10 + number, 15 + 20 * number, 18 + 20 * number) for number in range(2)),
            e.kernel(10, "gemm", 500, 900),
            e.kernel(11, "gemm", 850, 1400, stream=8),  # beside the end of the forward before
        ],
        0.0,
    )
    lanes = read_lanes([first, gpu_rank(e)], clocks_agree=True)
    assert times_of(lanes) == [
        [("forward", 0, 0, 0.4), ("forward", 1, 0.4, 0.9)],
        [("forward", 0, 0.5, 1.5), ("backward", 0, 1.6, 3.5), ("forward", 1, 4.5, 5.5)],
    ]
    shares = shares_of(lanes, 1)
    assert shares == pytest.approx(Shares(busy=3.9 / 5.5, for_activations=1.5 / 5.5, for_gradients=0, other=0.1 / 5.5))


def test_lanes_of_weight_gradients_wait_for_no_message() -> None:
    runs = [Run(0, Action("backward_input", 0, 0), 1, 2), Run(0, Action("backward_weight", 0, 0), 5, 6)]
    lanes = Simulation([runs, [Run(1, Action("backward_input", 1, 0), 0, 1)]])
    assert shares_of(lanes, 0) == pytest.approx((2 / 6, 0, 1 / 6, 3 / 6))


def test_lanes_of_replayed_steps_are_of_the_eager_one(trace_events: ModuleType) -> None:
    """A graph's capture has ranges and no kernels, its replay neither."""
    e = trace_events
    events = [
        e.event("user_annotation", "ProfilerStep#1", 0, 1000),
        e.action("forward", 0, 0, 10, 20),
        e.launch(1, 12, 14),
        e.kernel(1, "gemm", 100, 400),
        e.event("user_annotation", "ProfilerStep#2", 1000, 2000),
        e.action("forward", 0, 0, 1010, 1020),
        e.replay(2, 1500, 1510),
        e.kernel(2, "gemm", 1600, 1800),
    ]
    lanes = read_lanes([read_events(events, 0.0)], clocks_agree=True)
    assert times_of(lanes) == [[("forward", 0, 0, 0.3)]]


def test_lanes_with_mean_times_have_the_bubble_of_the_schedule() -> None:
    """A rank that was late once, and a message that took long: neither is in the schedule."""
    lists = [[("forward", 0, 2), ("forward", 0, 4), ("backward", 0, 3), ("backward", 0, 3)], [("forward", 1, 3)] * 2]
    lanes, now = [], 0.0
    for rank, actions in enumerate(lists):
        numbers = {"forward": iter(range(2)), "backward": iter(range(2))}
        lanes.append([])
        for kind, stage, time in actions:
            lanes[-1].append(Run(rank, Action(kind, stage, next(numbers[kind])), now, now + time))
            now += time + 10
    lanes[1] += [Run(1, Action("backward", 1, number), now + number, now + number + 1) for number in range(2)]
    schedule = with_mean_times(Simulation(lanes))
    assert [(run.start, run.end) for run in schedule.runs[0]] == [(0, 3), (3, 6), (10, 13), (13, 16)]
    assert [(run.start, run.end) for run in schedule.runs[1]] == [(3, 6), (6, 9), (9, 10), (10, 11)]


def test_lanes_with_mean_times_of_split_backwards() -> None:
    actions = [("forward", 0, 2.0), ("forward", 1, 2.0), ("backward_input", 0, 3.0), ("backward", 1, 5.0)]
    runs, now = [], 0.0
    for kind, microbatch, time in [*actions, ("backward_weight", 0, 1.0)]:
        runs.append(Run(0, Action(kind, 0, microbatch), now, now + time))
        now += time
    schedule = with_mean_times(Simulation([runs]))
    assert [run.end - run.start for run in schedule.runs[0]] == [2, 2, 3, 4, 1]


def test_messages_of_gloo_do_not_hide_the_work_beside_them(trace_events: ModuleType) -> None:
    """A pending message is an event of the thread that started it, across those of the work meanwhile."""
    e = trace_events
    events = [
        e.event("user_annotation", "ProfilerStep#1", 0, 1000),
        e.event("cpu_op", "gloo:send", 5, 600),
        e.part("router", 10, 200),
        e.event("cpu_op", "aten::mm", 20, 200),
        e.action("forward", 1, 0, 200, 900),
        e.message(200, 500),
        e.part("experts", 500, 900),
        e.event("cpu_op", "aten::mm", 500, 900),
    ]
    parts = break_down(read_events(events)).parts
    found = {part: (time.forward_ms, time.exposed_ms) for part, time in parts.items()}
    assert found == {"router": (0.18, 0), "pipeline": (0, 0.3), "experts": (0.4, 0)}
