"""Break the time of a step down: compute by part of the model, exposed communication, idle gaps.

Every instant of the traced steps counts once, so the shares add up to the step. It counts for the part that computes
(in equal shares if several do), else for the part that communicates, else as idle.
"""

from collections import Counter, defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field

from titan_moe.profile.attribution import OTHER
from titan_moe.profile.replay import UNNAMED
from titan_moe.profile.span import Span
from titan_moe.profile.trace_parsing import Timeline


@dataclass
class PartTime:
    """A part's time in a step, in milliseconds."""

    forward_ms: float = 0.0
    """Compute in forward."""
    backward_ms: float = 0.0
    """Compute in backward, recomputation included."""
    exposed_ms: float = 0.0
    """Communication while nothing computes."""
    communication_ms: float = 0.0
    """All communication, hidden too."""

    @property
    def total_ms(self) -> float:
        """The part's share of the step."""
        return self.forward_ms + self.backward_ms + self.exposed_ms


@dataclass
class Breakdown:
    """A step, averaged over the traced ones, in milliseconds."""

    step_ms: float
    parts: dict[str, PartTime] = field(default_factory=lambda: defaultdict(PartTime))
    exposed_ms: float = 0.0
    """Communication while nothing computes. Also counted in the parts."""
    hidden_ms: float = 0.0
    """Communication while something computes."""
    idle_ms: float = 0.0
    """Gaps: neither compute nor communication."""
    host_bound_ms: float = 0.0
    """Time in gaps before the host had launched the next work."""

    @property
    def named_share(self) -> float:
        """The fraction of the work that is in regions."""
        work_ms = sum(part.total_ms for part in self.parts.values())
        outside_ms = sum(self.parts[part].total_ms for part in (OTHER, UNNAMED) if part in self.parts)
        return 1.0 - outside_ms / work_ms if work_ms else 0.0


def break_down(timeline: Timeline, step_ms: float | None = None) -> Breakdown:
    """Attribute every instant of the traced steps. With `step_ms`, what a step takes without the profiler, times are
    the shares of such a step."""
    ms = step_ms / timeline.duration_us if step_ms else 1e-3 / timeline.num_steps
    result = Breakdown(step_ms=timeline.duration_us * ms)
    for start_us, stop_us, compute, communication in _intervals(timeline):
        interval_ms = (stop_us - start_us) * ms
        for part in {span.part for span in communication}:
            result.parts[part].communication_ms += interval_ms
        if compute:
            for span in compute:
                if span.is_backward:
                    result.parts[span.part].backward_ms += interval_ms / len(compute)
                else:
                    result.parts[span.part].forward_ms += interval_ms / len(compute)
            result.hidden_ms += interval_ms if communication else 0.0
        elif communication:
            result.exposed_ms += interval_ms
            for span in communication:
                result.parts[span.part].exposed_ms += interval_ms / len(communication)
        else:
            result.idle_ms += interval_ms
    result.host_bound_ms = sum(_host_bound_us(timeline)) * ms
    return result


def _intervals(timeline: Timeline) -> Iterator[tuple[float, float, list[Span], list[Span]]]:
    """Cut the traced steps wherever a span starts or stops: -> start, stop, compute spans, communication spans."""
    changes = []
    for number, span in enumerate(timeline.spans):
        changes.append((max(span.start_us, timeline.start_us), 1, number))
        changes.append((min(span.stop_us, timeline.stop_us), 0, number))
    running: dict[int, Span] = {}
    last_us = timeline.start_us
    for time_us, is_start, number in [*sorted(changes), (timeline.stop_us, 0, -1)]:
        if time_us > last_us:
            spans = list(running.values())
            compute = [span for span in spans if not span.is_communication]
            yield last_us, time_us, compute, [span for span in spans if span.is_communication]
            last_us = time_us
        if is_start:
            running[number] = timeline.spans[number]
        else:
            running.pop(number, None)


def _host_bound_us(timeline: Timeline) -> Iterator[float]:
    """For every gap, the time before the host had launched the work that ends it. On a CPU all gaps are host-bound:
    Python between operations."""
    idle_from_us = timeline.start_us
    for span in timeline.spans:
        if span.start_us > idle_from_us:
            launched_us = span.launched_us if timeline.is_gpu else span.start_us
            if launched_us is not None:
                yield min(max(launched_us - idle_from_us, 0.0), span.start_us - idle_from_us)
        idle_from_us = max(idle_from_us, span.stop_us)
    yield max(timeline.stop_us - idle_from_us, 0.0)  # after the last work the device waits for the host


@dataclass(frozen=True)
class KernelTime:
    """The time of a kernel (on a CPU an operation) in a step."""

    name: str
    part: str
    """The part with most of its time."""
    total_ms: float
    count: float


def top_kernels(timeline: Timeline, num_names: int = 20, step_ms: float | None = None) -> list[KernelTime]:
    """The kernels (on a CPU the operations) with the longest total time; `step_ms` as in `break_down`."""
    ms = step_ms / timeline.duration_us if step_ms else 1e-3 / timeline.num_steps
    total_us: dict[str, float] = defaultdict(float)
    counts: Counter[str] = Counter()
    parts: dict[str, dict[str, float]] = defaultdict(lambda: defaultdict(float))
    for span in timeline.spans:
        total_us[span.name] += span.duration_us
        counts[span.name] += not span.is_continuation
        parts[span.name][span.part] += span.duration_us
    kernels = []
    for name in sorted(total_us, key=lambda name: -total_us[name])[:num_names]:
        part = max(parts[name], key=lambda part: parts[name][part])
        kernels.append(KernelTime(name, part, total_us[name] * ms, counts[name] / timeline.num_steps))
    return kernels
