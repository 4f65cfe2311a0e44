"""Parse a Chrome trace of the profiler into spans of work, each attributed to a part of the model.

On a GPU the spans are kernels, copies and memsets. The `correlation` id links each to the host event that launched it;
kernels of a CUDA graph are matched with those of an eager step. Kernels that quantise are a part of their own. On a CPU
the spans are the self time of operations, the collectives of gloo's threads, and messages between pipeline stages.
"""

import json
from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from titan_moe.profile.attribution import OTHER, HostEvent, attribute
from titan_moe.profile.quantisation import QUANTISATION, is_quantisation
from titan_moe.profile.region import ACTION_PREFIX, MESSAGES, PREFIX
from titan_moe.profile.replay import GRAPH_LAUNCHES, attribute_replays
from titan_moe.profile.span import Span

STEP = "ProfilerStep#"
PIPELINE = (ACTION_PREFIX, PREFIX + MESSAGES)
PENDING = ("gloo:send", "gloo:recv")
"""Events that last from the start of a message to its end, on the thread that started it: they are no work, and cross
the events beside them."""
DEVICE_CATEGORIES = ("kernel", "gpu_memcpy", "gpu_memset")
LAUNCH_CATEGORIES = ("cuda_runtime", "cuda_driver")
HOST_CATEGORIES = ("cpu_op", "user_annotation", *LAUNCH_CATEGORIES)
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

    @property
    def duration_us(self) -> float:
        """The total time of all traced steps."""
        return self.stop_us - self.start_us


def read_trace(path: Path, num_steps: int | None = None) -> Timeline:
    """Read the last `num_steps` steps of a trace, or all of them.

    With replayed CUDA graphs, the first step of the trace must be eager: it attributes the kernels of the replays.

    Raises: ValueError for a trace without an optimizer step.
    """
    trace = json.loads(path.read_text(encoding="utf-8"))
    base_ns = trace.get("baseTimeNanoseconds")
    try:
        return read_events(trace["traceEvents"], None if base_ns is None else base_ns / 1e3, num_steps)
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from error


def read_events(
    events: list[dict[str, Any]], unix_offset_us: float | None = None, num_steps: int | None = None
) -> Timeline:
    """Read the events of a trace."""
    complete = [event for event in events if event.get("ph") == "X" and event["name"] not in PENDING]
    steps = [e for e in complete if e.get("cat") == "user_annotation" and e["name"].startswith(STEP)]
    if not steps:
        raise ValueError(f"no optimizer step in this trace: no event is named {STEP}N")
    steps.sort(key=lambda step: step["ts"])
    device = [event for event in complete if event.get("cat") in DEVICE_CATEGORIES]
    host = list(attribute(_host_event(event) for event in complete if event.get("cat") in HOST_CATEGORIES))
    spans = _device_spans(device, host, steps[0]) if device else _host_spans(host)
    steps = steps[-num_steps:] if num_steps else steps
    start_us = min(step["ts"] for step in steps)
    stop_us = max(step["ts"] + step["dur"] for step in steps)
    if device:
        # the device runs behind the host: it may first finish earlier steps, and end after the host's last step
        earlier, spans = _split_at_launch(spans, start_us)
        start_us = max([start_us, *(span.stop_us for span in earlier)])
        stop_us = max([stop_us, *(span.stop_us for span in spans)])
    inside = [span for span in spans if span.stop_us > start_us and span.start_us < stop_us]
    inside.sort(key=lambda span: span.start_us)
    pipeline = [event for event, _ in host if event.category == "user_annotation" and event.name.startswith(PIPELINE)]
    return Timeline(inside, start_us, stop_us, len(steps), bool(device), _memory(events), unix_offset_us, pipeline)


def _host_event(event: dict[str, Any]) -> HostEvent:
    thread, stop_us = (event.get("pid"), event.get("tid")), event["ts"] + event.get("dur", 0.0)
    return HostEvent(event["name"], event["cat"], thread, event["ts"], stop_us, event.get("args", {}))


def _device_spans(
    device: list[dict[str, Any]], host: Iterable[tuple[HostEvent, HostEvent | None]], first_step: dict[str, Any]
) -> list[Span]:
    launches = {
        event.args["correlation"]: event
        for event, _ in host
        if event.category in LAUNCH_CATEGORIES and "correlation" in event.args
    }
    eager: list[Span] = []
    replays: dict[int, list[Span]] = defaultdict(list)
    for event in device:
        launch = launches.get(event.get("args", {}).get("correlation"))
        span = _device_span(event, launch)
        if launch is not None and launch.name.startswith(GRAPH_LAUNCHES):
            replays[launch.args["correlation"]].append(span)
        else:
            eager.append(span)
    start_us, stop_us = first_step["ts"], first_step["ts"] + first_step["dur"]
    first_step_spans = (s for s in eager if s.launched_us is not None and start_us <= s.launched_us <= stop_us)
    return [*eager, *attribute_replays(replays.values(), first_step_spans)]


def _split_at_launch(spans: list[Span], start_us: float) -> tuple[list[Span], list[Span]]:
    """Spans launched before a time, and since. Spans without a launch time are split by their start."""
    first_us = min((s.start_us for s in spans if s.launched_us is not None and s.launched_us >= start_us), default=0.0)
    earlier: list[Span] = []
    since: list[Span] = []
    for span in spans:
        is_earlier = span.start_us < first_us if span.launched_us is None else span.launched_us < start_us
        (earlier if is_earlier else since).append(span)
    return earlier, since


def _device_span(event: dict[str, Any], launch: HostEvent | None) -> Span:
    is_communication = any(word in event["name"].lower() for word in COMMUNICATION_KERNELS)
    return Span(
        name=event["name"],
        part=QUANTISATION if is_quantisation(event["name"]) else launch.part if launch else OTHER,
        is_backward=launch is not None and launch.is_backward,
        is_communication=is_communication or (launch is not None and launch.is_communication),
        start_us=event["ts"],
        stop_us=event["ts"] + event.get("dur", 0.0),
        launched_us=launch.stop_us if launch else None,
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


def _memory(events: list[dict[str, Any]]) -> list[tuple[float, int]]:
    """The allocator's total over time: of the GPU if there is one, else of the host."""
    points: dict[tuple[int, int], list[tuple[float, int]]] = defaultdict(list)
    for event in events:
        if event.get("name") == "[memory]":
            args = event["args"]
            points[args["Device Type"], args["Device Id"]].append((event["ts"], args["Total Allocated"]))
    is_gpu = any(kind != 0 for kind, _ in points)
    curves = [curve for (kind, _), curve in points.items() if (kind != 0) == is_gpu]
    curves.sort(key=len)  # this rank's own GPU has the most events
    return sorted(curves[-1]) if curves else []
