"""Which steps `titan-moe trace` waits for, times and traces."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from titan_moe.config.train import ProfileConfig
from titan_moe.training import steady_trace
from titan_moe.training.steady_trace import SteadyTracer

Step = tuple[str, float]
"""How a step is taken, and the capacity factor after it."""
LAUNCHED, RECORDED, REPLAYED, REPEATED = "launched", "recorded", "replayed", "repeated"


class Runner:
    """Takes steps as a list has them; the last one for ever, or launched ones once they are asked for."""

    def __init__(self, steps: list[Step], *, has_graph: bool, is_bounded: bool) -> None:
        self.steps, self.captured, self.is_bounded = iter(steps), object() if has_graph else None, is_bounded
        self.last, self.is_launching = steps[-1], False
        self.kind, self.factor = "", 0.0

    def take(self) -> None:
        self.kind, self.factor = (LAUNCHED, self.factor) if self.is_launching else next(self.steps, self.last)

    @property
    def manner(self) -> Step:
        return self.kind, self.factor

    @property
    def is_steady(self) -> bool:
        return self.kind == (REPLAYED if self.captured else LAUNCHED) and (self.factor > 0 or not self.is_bounded)

    def launch_next(self) -> None:
        self.is_launching = True


@pytest.fixture
def seen(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Any]]:
    """What happens, in order: the clock is read, the profiler starts with its file and steps, and takes steps."""
    events: list[Any] = []

    class Profile:
        def __init__(self, path: Path, num_steps: int) -> None:
            self.name = f"{path.name}: {num_steps}"

        def __enter__(self) -> "Profile":
            events.append(self.name)
            return self

        def __exit__(self, *error: object) -> None:
            events.append("stop")

        def step(self) -> None:
            events.append("profiled")

    def now(self: SteadyTracer) -> float:
        events.append("clock")
        return float(self.num_steps)

    monkeypatch.setattr(steady_trace, "new_profile", Profile)
    monkeypatch.setattr(SteadyTracer, "_now", now)
    yield events


def trace(seen: list[Any], runner: Runner, *, last_step: int, start_step: int = 0) -> SteadyTracer:
    """Run until the tracer is done; `seen` has the steps too."""
    tracer = SteadyTracer(ProfileConfig(start_step, 2), Path(), 0, last_step)
    tracer.start(runner, 1)  # type: ignore[arg-type]
    for step in range(1, last_step + 1):
        runner.take()
        seen.append(step)
        tracer.step()
        if tracer.is_done:
            break
    tracer.close()
    return tracer


def test_launched_steps_are_traced_once_they_are_alike(seen: list[Any]) -> None:
    tracer = trace(seen, Runner([(LAUNCHED, 0.0)], has_graph=False, is_bounded=False), last_step=1000)
    assert seen[:7] == [1, 2, 3, 4, 5, 6, "clock"] and seen[17] == "clock", "ten steps are timed"
    assert seen[18:] == ["step-18-rank-0.json: 2", 17, "profiled", 18, "profiled", 19, "profiled", "stop"]
    assert (tracer.first_step, tracer.kind, tracer.step_ms, tracer.num_timed) == (18, LAUNCHED, 1000.0, 10)


def test_replayed_steps_are_traced_and_then_one_that_is_launched(seen: list[Any]) -> None:
    """The capacity is calibrated first, then the graph is warmed up and recorded, and an overflow comes between."""
    steps = [(LAUNCHED, 0.0)] * 3 + [(LAUNCHED, 1.5)] * 4 + [(RECORDED, 1.5)] + [(REPLAYED, 1.5)] * 5
    steps += [(REPEATED, 2.0), (RECORDED, 2.0), (REPLAYED, 2.0)]
    tracer = trace(seen, Runner(steps, has_graph=True, is_bounded=True), last_step=1000)
    traced = [30, "profiled", 31, "profiled", 32, "profiled", 33, "profiled"]
    assert seen[-10:] == ["step-31-rank-0.json: 3", *traced, "stop"]
    assert seen.count("clock") == 3, "the overflow ends the first measurement"
    assert (tracer.first_step, tracer.kind, tracer.is_steady, tracer.num_timed) == (31, REPLAYED, True, 10)


@pytest.mark.parametrize(("start_step", "num_timed"), [(1, 0), (2, 0), (3, 1), (5, 3), (40, 10)])
def test_a_given_first_step_is_kept(seen: list[Any], start_step: int, num_timed: int) -> None:
    runner = Runner([(LAUNCHED, 0.0)], has_graph=False, is_bounded=False)
    tracer = trace(seen, runner, last_step=41, start_step=start_step)
    assert (tracer.first_step, tracer.num_timed) == (start_step, num_timed)
    steps = [event for event in seen if event not in ("clock", "profiled")]
    after = steps[steps.index(f"step-{start_step}-rank-0.json: 2") + 1 :]
    assert after == [*range(max(start_step - 1, 1), start_step + 2), "stop"]


@pytest.mark.parametrize("last_step", [6, 9, 15])
def test_a_short_run_is_traced_at_its_end(seen: list[Any], last_step: int) -> None:
    runner = Runner([(LAUNCHED, 0.0)] * 5 + [(REPLAYED, 0.0)], has_graph=True, is_bounded=False)
    tracer = trace(seen, runner, last_step=last_step)
    assert tracer.first_step == last_step - 2 and tracer.is_done and seen[-1] == "stop"


def test_a_run_that_never_is_steady_is_traced_as_it_is(seen: list[Any]) -> None:
    runner = Runner([(LAUNCHED, 0.0)], has_graph=True, is_bounded=True)
    tracer = trace(seen, runner, last_step=1000)
    assert tracer.num_steps < steady_trace.MAX_WAIT_STEPS + 20
    assert (tracer.kind, tracer.is_steady, tracer.num_timed) == (LAUNCHED, False, 10)


def test_a_run_that_ends_early_stops_the_profiler(seen: list[Any]) -> None:
    runner = Runner([(LAUNCHED, 0.0)], has_graph=False, is_bounded=False)
    tracer = SteadyTracer(ProfileConfig(0, 2), Path(), 0, 1000)
    tracer.start(runner, 1)  # type: ignore[arg-type]
    for _ in range(18):
        runner.take()
        tracer.step()
    tracer.close()
    assert seen[-1] == "stop" and not tracer.is_done
