"""Parse a Chrome trace of the profiler into spans of work, each attributed to a part of the model.

On a GPU the spans are kernels, copies and memsets. The `correlation` id links each to the host event that launched it;
kernels of a CUDA graph are matched with those of a launched step. Kernels that quantise are a part of their own. On a
CPU the spans are the self time of operations, the collectives of gloo's threads, and messages between pipeline stages.
"""

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from sys import intern
from typing import Any, NamedTuple, TypeVar

from titan_moe.profile.attribution import OTHER, HostEvent, attribute
from titan_moe.profile.quantisation import QUANTISATION, is_quantisation
from titan_moe.profile.region import ACTION_PREFIX, MESSAGES, PREFIX
from titan_moe.profile.replay import GRAPH_INSTANTIATIONS, GRAPH_LAUNCHES, UNNAMED, name_parts
from titan_moe.profile.span import Span
from titan_moe.profile.trace_events import TraceFile

T = TypeVar("T")
STEP = "ProfilerStep#"
PIPELINE = (ACTION_PREFIX, PREFIX + MESSAGES)
PENDING = ("gloo:send", "gloo:recv")
"""Events that last from the start of a message to its end, on the thread that started it: they are no work, and cross
the events beside them."""
DEVICE_CATEGORIES = ("kernel", "gpu_memcpy", "gpu_memset")
LAUNCH_CATEGORIES = ("cuda_runtime", "cuda_driver")
HOST_CATEGORIES = ("cpu_op", "user_annotation", *LAUNCH_CATEGORIES)
HOST_ARGS = ("Sequence number", "Fwd thread id", "correlation")
"""What is read of a host event's arguments; a trace has many others."""
COMMUNICATION_KERNELS = ("nccl", "nvshmem")
"""Substrings of the names of communication kernels, in lower case."""


@dataclass(frozen=True)
class Timeline:
    """The traced steps of one rank."""

    spans: list[Span]
    """In order of their start."""
    start_us: float
    """Start of the first step. On a GPU not before the end of work launched earlier."""
    stop_us: float
    """End of the last step and of all work that it launched."""
    num_steps: int
    is_gpu: bool
    """Whether the spans are those of a GPU. Otherwise they are those of the host."""
    memory: list[tuple[float, int]]
    """(time in us, allocated bytes) at every change. On a CPU only allocations since the start of the trace."""
    unix_offset_us: float | None
    """Unix time minus trace time; None if the trace does not contain it."""
    pipeline: list[HostEvent]
    """The ranges of pipeline actions, and of messages and waits, on the host, in order; of all steps of the trace."""
    named_by: list[Span]
    """What the step launched whose parts those of replayed steps are; empty without replayed steps."""

    @property
    def duration_us(self) -> float:
        """The total time of all traced steps."""
        return self.stop_us - self.start_us


class DeviceEvent(NamedTuple):
    """A kernel, copy or memset."""

    name: str
    correlation: int | None
    start_us: float
    stop_us: float
    shape: tuple[int, ...]


@dataclass
class Events:
    """What is read of a trace, a small part of its file."""

    host: list[HostEvent] = field(default_factory=list)
    device: list[DeviceEvent] = field(default_factory=list)
    memory: dict[tuple[int, int], list[tuple[float, int]]] = field(default_factory=lambda: defaultdict(list))
    """(type, number) of a device -> its allocated bytes over time."""

    def add(self, event: dict[str, Any]) -> None:
        name, category = event.get("name"), event.get("cat")
        if name == "[memory]":
            args = event["args"]
            self.memory[args["Device Type"], args["Device Id"]].append((event["ts"], args["Total Allocated"]))
        elif event.get("ph") != "X" or name is None or name in PENDING:
            return
        elif category in HOST_CATEGORIES:
            self.host.append(_host_event(event))
        elif category in DEVICE_CATEGORIES:
            args, stop_us = event.get("args", {}), event["ts"] + event.get("dur", 0.0)
            shape = (*args.get("grid", ()), *args.get("block", ()))
            self.device.append(DeviceEvent(intern(name), args.get("correlation"), event["ts"], stop_us, shape))


def read_trace(path: Path) -> Timeline:
    """Read the steps of a trace, event by event: a file may be larger than memory.

    If some steps replay a CUDA graph, they are the steps that are read. The kernels of a replay are attributed by those
    of a step without one, which the trace must contain.

    Raises: ValueError for a trace without an optimizer step, and for a file that is none.
    """
    try:
        file = TraceFile(path)
        events = Events()
        for event in file:
            events.add(event)
        return _read(events, file.base_us)
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from error


def read_events(given: Iterable[dict[str, Any]], unix_offset_us: float | None = None) -> Timeline:
    """Read the events of a trace."""
    events = Events()
    for event in given:
        events.add(event)
    return _read(events, unix_offset_us)


def _read(events: Events, unix_offset_us: float | None) -> Timeline:
    all_steps = [event for event in events.host if event.category == "user_annotation" and event.name.startswith(STEP)]
    if not all_steps:
        raise ValueError(f"no optimizer step in this trace: no event is named {STEP}N")
    all_steps.sort(key=lambda step: step.start_us)
    device, host = events.device, list(attribute(events.host))
    replayed, launched = _replayed_and_launched(all_steps, events.host)
    steps = replayed or launched or all_steps
    spans = _device_spans(device, host) if device else _host_spans(host)
    named_by = [span for step in launched[-1:] if replayed for span in _split_by_launch(step, spans)[0]]
    for step in replayed:
        inside, outside = _split_by_launch(step, spans)
        spans = [*outside, *name_parts(inside, named_by)]
    start_us = min(step.start_us for step in steps)
    stop_us = max(step.stop_us for step in steps)
    if device:
        # the device runs behind the host: it may first finish earlier steps, and end after the host's last step
        earlier, spans = _split_at_launch(spans, start_us)
        spans = [span for span in spans if span.launched_us is None or span.launched_us <= stop_us]
        start_us = max([start_us, *(span.stop_us for span in earlier)])
        stop_us = max([stop_us, *(span.stop_us for span in spans)])
    measured = [span for span in spans if span.stop_us > start_us and span.start_us < stop_us]
    measured.sort(key=lambda span: span.start_us)
    pipeline = [event for event, _ in host if event.category == "user_annotation" and event.name.startswith(PIPELINE)]
    memory = _memory(events.memory)
    return Timeline(measured, start_us, stop_us, len(steps), bool(device), memory, unix_offset_us, pipeline, named_by)


def _host_event(event: dict[str, Any]) -> HostEvent:
    thread, stop_us = (event.get("pid"), event.get("tid")), event["ts"] + event.get("dur", 0.0)
    args = event.get("args", {})
    kept = {name: args[name] for name in HOST_ARGS if name in args}
    return HostEvent(intern(event["name"]), intern(event["cat"]), thread, event["ts"], stop_us, kept)


def _replayed_and_launched(steps: list[HostEvent], host: list[HostEvent]) -> tuple[list[HostEvent], list[HostEvent]]:
    """The steps that replay a CUDA graph, and those that launch their kernels. One that records a graph is neither."""

    def has_call(step: HostEvent, names: tuple[str, ...]) -> bool:
        times = (event.start_us for event in calls if event.name.startswith(names))
        return any(step.start_us <= time_us <= step.stop_us for time_us in times)

    calls = [event for event in host if event.category in LAUNCH_CATEGORIES]
    calls = [event for event in calls if event.name.startswith(GRAPH_LAUNCHES + GRAPH_INSTANTIATIONS)]
    steps = [step for step in steps if not has_call(step, GRAPH_INSTANTIATIONS)]
    return _partition(steps, lambda step: has_call(step, GRAPH_LAUNCHES))


def _partition(things: Iterable[T], belongs: Callable[[T], bool]) -> tuple[list[T], list[T]]:
    """Those that belong, and the others."""
    inside, outside = list[T](), list[T]()
    for thing in things:
        (inside if belongs(thing) else outside).append(thing)
    return inside, outside


def _is_graph_launch(event: HostEvent) -> bool:
    return event.category in LAUNCH_CATEGORIES and event.name.startswith(GRAPH_LAUNCHES)


def _device_spans(device: list[DeviceEvent], host: Iterable[tuple[HostEvent, HostEvent | None]]) -> list[Span]:
    """The spans of kernels. Those of a CUDA graph have no part yet."""
    launches = {
        event.args["correlation"]: event
        for event, _ in host
        if event.category in LAUNCH_CATEGORIES and "correlation" in event.args
    }
    return [_device_span(event, launches.get(event.correlation)) for event in device]


def _split_by_launch(step: HostEvent, spans: Iterable[Span]) -> tuple[list[Span], list[Span]]:
    """The spans that a step has launched, and the others."""
    return _partition(
        spans, lambda span: span.launched_us is not None and step.start_us <= span.launched_us <= step.stop_us
    )


def _split_at_launch(spans: list[Span], start_us: float) -> tuple[list[Span], list[Span]]:
    """Spans launched before a time, and since. Spans without a launch time are split by their start."""
    first_us = min((s.start_us for s in spans if s.launched_us is not None and s.launched_us >= start_us), default=0.0)
    return _partition(
        spans, lambda span: span.start_us < first_us if span.launched_us is None else span.launched_us < start_us
    )


def _device_span(event: DeviceEvent, launch: HostEvent | None) -> Span:
    is_communication = any(word in event.name.lower() for word in COMMUNICATION_KERNELS)
    part = launch.part if launch else OTHER
    if launch is not None and _is_graph_launch(launch):
        part = UNNAMED
    elif is_quantisation(event.name):
        part = QUANTISATION
    return Span(
        name=event.name,
        part=part,
        is_backward=launch is not None and launch.is_backward,
        is_communication=is_communication or (launch is not None and launch.is_communication),
        start_us=event.start_us,
        stop_us=event.stop_us,
        launched_us=launch.stop_us if launch else None,
        shape=event.shape,
    )


def _host_spans(host: list[tuple[HostEvent, HostEvent | None]]) -> list[Span]:
    """The self time of every operation, every collective of gloo's threads, and the messages between stages."""
    gloo_threads = {event.thread for event, _ in host if event.name.startswith("gloo:")}
    enclosing: dict[HostEvent, HostEvent | None] = {}  # the innermost operation around every event, ranges skipped
    children = defaultdict(list)
    for event, parent in host:
        outer = parent if parent is None or parent.is_operation else enclosing[parent]
        enclosing[event] = outer
        if event.is_operation and outer is not None:
            children[outer].append(event)
    spans, collective = [], None
    for event, _ in host:
        if event.name.startswith("c10d::"):
            collective = event
        if event.name.startswith("gloo:"):
            if collective is not None:  # the call on another thread that has just started it
                event.part, event.is_backward = collective.part, collective.is_backward
            spans.append(_span(event, event.start_us, event.stop_us))
        elif event.name == PREFIX + MESSAGES:
            event.is_communication = True
            spans.append(_span(event, event.start_us, event.stop_us))
        elif event.is_operation and event.thread not in gloo_threads:
            spans += _self_time(event, children[event])
    return spans


def _self_time(event: HostEvent, children: list[HostEvent]) -> Iterator[Span]:
    """The intervals of an operation outside its nested operations."""
    is_continuation, last_us = False, event.start_us
    for start_us, stop_us in [*((child.start_us, child.stop_us) for child in children), (event.stop_us,) * 2]:
        if start_us > last_us:
            yield _span(event, last_us, start_us, is_continuation)
            is_continuation = True
        last_us = max(last_us, stop_us)


def _span(event: HostEvent, start_us: float, stop_us: float, is_continuation: bool = False) -> Span:
    return Span(event.name, event.part, event.is_backward, event.is_communication, start_us, stop_us, is_continuation)


def _memory(points: dict[tuple[int, int], list[tuple[float, int]]]) -> list[tuple[float, int]]:
    """The allocator's total over time: of the GPU if there is one, else of the host."""
    is_gpu = any(kind != 0 for kind, _ in points)
    curves = [curve for (kind, _), curve in points.items() if (kind != 0) == is_gpu]
    curves.sort(key=len)  # this rank's own GPU has the most events
    return sorted(curves[-1]) if curves else []
