"""Where the time of a step went: to parts of the model, to messages that nothing hid, to nothing at all.

Every instant of the traced steps is given to one thing, so that the shares add up to the step: to the part that
computes (evenly, if several do), else to the part that sends or waits for messages, else to a gap.
"""

from collections import Counter, defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field

from titan_moe.profile.attribution import OTHER
from titan_moe.profile.span import Span
from titan_moe.profile.trace_parsing import Timeline


@dataclass
class PartTime:
    """A part's time in a step, in milliseconds."""

    forward_ms: float = 0.0
    """Computing, forward."""
    backward_ms: float = 0.0
    """Computing, backward; what is recomputed there too."""
    exposed_ms: float = 0.0
    """Messages while nothing computes."""
    messages_ms: float = 0.0
    """All messages, hidden ones too."""

    @property
    def total_ms(self) -> float:
        """The part's share of the step."""
        return self.forward_ms + self.backward_ms + self.exposed_ms


@dataclass
class Split:
    """A step, on average over the traced ones, in milliseconds."""

    step_ms: float
    parts: dict[str, PartTime] = field(default_factory=lambda: defaultdict(PartTime))
    exposed_ms: float = 0.0
    """Messages while nothing computes; in the parts too."""
    hidden_ms: float = 0.0
    """Messages while something computes."""
    idle_ms: float = 0.0
    """Gaps: neither computing nor messages."""
    host_bound_ms: float = 0.0
    """The share of the gaps in which the device had nothing to do because the host had not launched it yet."""

    @property
    def named_share(self) -> float:
        """How much of the work lies in regions."""
        work_ms = sum(part.total_ms for part in self.parts.values())
        other_ms = self.parts[OTHER].total_ms if OTHER in self.parts else 0.0
        return 1.0 - other_ms / work_ms if work_ms else 0.0


def split(timeline: Timeline) -> Split:
    """Give every instant of the traced steps to what it was spent on."""
    ms = 1e-3 / timeline.num_steps
    result = Split(step_ms=timeline.duration_us * ms)
    for start_us, stop_us, computing, messages in _stretches(timeline):
        stretch_ms = (stop_us - start_us) * ms
        for part in {span.part for span in messages}:
            result.parts[part].messages_ms += stretch_ms
        if computing:
            _share_out(result, computing, stretch_ms)
            result.hidden_ms += stretch_ms if messages else 0.0
        elif messages:
            result.exposed_ms += stretch_ms
            for span in messages:
                result.parts[span.part].exposed_ms += stretch_ms / len(messages)
        else:
            result.idle_ms += stretch_ms
    result.host_bound_ms = sum(_host_bound_us(timeline)) * ms
    return result


def _share_out(result: Split, computing: list[Span], stretch_ms: float) -> None:
    for span in computing:
        part = result.parts[span.part]
        if span.is_backward:
            part.backward_ms += stretch_ms / len(computing)
        else:
            part.forward_ms += stretch_ms / len(computing)


def _stretches(timeline: Timeline) -> Iterator[tuple[float, float, list[Span], list[Span]]]:
    """Cut the traced steps wherever work begins or ends: -> start, stop, what computes, what sends."""
    borders = []
    for number, span in enumerate(timeline.spans):
        borders.append((max(span.start_us, timeline.start_us), 1, number))
        borders.append((min(span.stop_us, timeline.stop_us), 0, number))
    borders.sort()
    running: dict[int, Span] = {}
    at_us = timeline.start_us
    for time_us, begins, number in [*borders, (timeline.stop_us, 0, -1)]:
        if time_us > at_us:
            spans = list(running.values())
            messages = [span for span in spans if span.is_communication]
            yield at_us, time_us, [span for span in spans if not span.is_communication], messages
            at_us = time_us
        if begins:
            running[number] = timeline.spans[number]
        else:
            running.pop(number, None)


def _host_bound_us(timeline: Timeline) -> Iterator[float]:
    """The part of every gap that passed before the host had launched what ends it.

    Where the host computes itself, all gaps are the host's: Python between operations.
    """
    idle_from_us = timeline.start_us
    for span in timeline.spans:
        if span.start_us > idle_from_us:
            launched_us = span.launched_us if timeline.is_gpu else span.start_us
            if launched_us is not None:
                yield min(max(launched_us - idle_from_us, 0.0), span.start_us - idle_from_us)
        idle_from_us = max(idle_from_us, span.stop_us)
    yield max(timeline.stop_us - idle_from_us, 0.0)  # the step goes on without work: the host is at something else


@dataclass(frozen=True)
class Top:
    """A kernel or operation, over a step."""

    name: str
    part: str
    """The part that spends most on it."""
    total_ms: float
    count: float


def top(timeline: Timeline, num_names: int = 20) -> list[Top]:
    """The kernels (on a CPU the operations) that take most time."""
    total_us: dict[str, float] = defaultdict(float)
    counts: Counter[str] = Counter()
    parts: dict[str, dict[str, float]] = defaultdict(lambda: defaultdict(float))
    for span in timeline.spans:
        total_us[span.name] += span.duration_us
        counts[span.name] += not span.continues
        parts[span.name][span.part] += span.duration_us
    slowest = sorted(total_us, key=lambda name: -total_us[name])[:num_names]
    return [
        Top(
            name=name,
            part=max(parts[name], key=lambda part: parts[name][part]),
            total_ms=total_us[name] * 1e-3 / timeline.num_steps,
            count=counts[name] / timeline.num_steps,
        )
        for name in slowest
    ]
