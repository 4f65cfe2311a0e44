"""A replayed kernel has the part of the same kernel in a launched step."""

from types import ModuleType

import pytest

from titan_moe.profile.breakdown import break_down
from titan_moe.profile.replay import UNNAMED, name_parts
from titan_moe.profile.span import Span
from titan_moe.profile.trace_parsing import read_events


def test_replay_kernels_are_attributed_by_order(trace_events: ModuleType) -> None:
    timeline = read_events(trace_events.REPLAYED_STEPS)
    assert (timeline.start_us, timeline.num_steps) == (2000, 1)
    named = [(span.part, span.is_backward, span.duration_us) for span in timeline.spans]
    assert named == [("attention", False, 30), ("experts", False, 100), ("attention", True, 40), (UNNAMED, False, 40)]


def test_replay_parts_add_up_to_the_step(trace_events: ModuleType) -> None:
    result = break_down(read_events(trace_events.REPLAYED_STEPS))
    assert result.step_ms == pytest.approx(0.3) and result.idle_ms == pytest.approx(0.09)
    assert sum(part.total_ms for part in result.parts.values()) + result.idle_ms == pytest.approx(result.step_ms)
    assert result.named_share == pytest.approx(170 / 210)
    assert result.host_bound_ms == pytest.approx(0.02 + 0.01), "until the launch, and after the last kernel"


def test_replay_without_a_launched_step_has_no_parts(trace_events: ModuleType) -> None:
    alone = [event for event in trace_events.REPLAYED_STEPS if event["ts"] >= 2000]
    assert {span.part for span in read_events(alone).spans} == {UNNAMED}


def test_replay_ignores_work_of_earlier_steps(trace_events: ModuleType) -> None:
    """The device runs behind the host: the trace starts with kernels that were launched before it."""
    late = [trace_events.kernel(900 + index, "gemm", -50 + 10 * index, -45 + 10 * index) for index in range(2)]
    expected = [span.part for span in read_events(trace_events.REPLAYED_STEPS).spans]
    assert [span.part for span in read_events([*late, *trace_events.REPLAYED_STEPS]).spans] == expected


def step(*kernels: str, part: str = "") -> list[Span]:
    """Kernels "name:part", one after the other."""
    split = [kernel.partition(":") for kernel in kernels]
    return [Span(name, after or part, False, False, 10.0 * i, 10.0 * i + 9) for i, (name, _, after) in enumerate(split)]


def parts(*kernels: str, launched: list[Span]) -> list[str]:
    return [span.part for span in name_parts(step(*kernels, part=UNNAMED), launched)]


def test_replay_with_other_numbers_of_a_kernel_is_named_by_place() -> None:
    """The launched step has a copy less at its start: by order alone all later copies had the part before."""
    launched = step("gemm:a", "copy:a", "relu:b", "copy:b", "sum:c", "copy:c")
    assert parts("copy", "gemm", "copy", "relu", "copy", "sum", "copy", launched=launched)[3:] == ["b", "b", "c", "c"]
    far = step("gemm:a", "relu:c", *["fill:x"] * 100, "copy:b")
    assert parts("gemm", "copy", "copy", "relu", launched=far) == ["a", UNNAMED, UNNAMED, "c"], "no copy is near"


def test_replay_with_another_grid_is_named_by_order() -> None:
    launched = [Span("gemm", part, False, False, i, i + 1, shape=(i,)) for i, part in enumerate("ab")]
    replayed = [Span("gemm", UNNAMED, False, False, i, i + 1, shape=(7 + i,)) for i in range(2)]
    assert [span.part for span in name_parts(replayed, launched)] == ["a", "b"]


def test_replay_kernels_of_other_streams_do_not_disturb_each_other() -> None:
    """What runs beside each other comes in another order than when launched."""
    launched = step("gemm:a", "send:d", "gemm:e", "send:d", "norm:f")
    assert parts("gemm", "gemm", "send", "norm", "send", launched=launched) == ["a", "e", "d", "f", "d"]


def test_replay_copies_have_other_names_in_a_graph() -> None:
    launched = step(
        "Memcpy DtoD (Device -> Device):a", "gemm:b", "Memset (Device):c", "Memcpy DtoD (Device -> Device):d"
    )
    assert parts("memcpy128", "gemm", "Memset (Unknown)", "memcpy32_post", launched=launched) == ["a", "b", "c", "d"]
