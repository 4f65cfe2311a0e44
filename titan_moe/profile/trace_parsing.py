"""Read a Chrome trace of the profiler into stretches of work, each with its part of the model.

On a GPU the work is what its streams ran: kernels, copies, sets, each tied to the host event that launched it by its
`correlation`, or, if a CUDA graph launched it, to its like in a step that was not replayed. On a CPU it is the
operations themselves, each for the time that no operation inside it takes, and the messages of gloo's threads.
"""

import json
from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from titan_moe.profile.attribution import OTHER, HostEvent, attribute
from titan_moe.profile.replay import GRAPH_LAUNCHES, name_replayed
from titan_moe.profile.span import Span

STEP = "ProfilerStep#"
ON_DEVICE = ("kernel", "gpu_memcpy", "gpu_memset")
LAUNCHES = ("cuda_runtime", "cuda_driver")
ON_HOST = ("cpu_op", "user_annotation", *LAUNCHES)
MESSAGES = ("nccl", "nvshmem")
"""What the names of kernels contain that talk to other ranks, in lower case."""
HOST_MESSAGE = "gloo:"
COLLECTIVE = "c10d::"


@dataclass(frozen=True)
class Timeline:
    """What happened on one rank during the traced steps."""

    spans: list[Span]
    """Work, in order of its beginning."""
    start_us: float
    """Beginning of the first step, or, on a GPU, end of the work that was launched before it."""
    stop_us: float
    """End of the last step and of all work that it launched."""
    num_steps: int
    is_gpu: bool
    """Whether the work is a GPU's; else it is the host's own."""
    memory: list[tuple[float, int]]
    """Allocated bytes, whenever they changed; on a CPU, those since the trace began."""
    unix_offset_us: float | None
    """What turns the trace's times into those of the clock; None where the trace does not say."""

    @property
    def duration_us(self) -> float:
        """How long all traced steps took together."""
        return self.stop_us - self.start_us


def read_trace(path: Path, num_steps: int | None = None) -> Timeline:
    """Read a trace that the profiler wrote; of its steps the last `num_steps` count, or all.

    Where a CUDA graph is replayed, an earlier step that was launched kernel by kernel names its kernels.

    Raises: ValueError if no optimizer step is in it.
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
    complete = [event for event in events if event.get("ph") == "X"]
    steps = [e for e in complete if e.get("cat") == "user_annotation" and e["name"].startswith(STEP)]
    if not steps:
        raise ValueError(f"no optimizer step in this trace: no event is named {STEP}N")
    steps.sort(key=lambda step: step["ts"])
    device = [event for event in complete if event.get("cat") in ON_DEVICE]
    host = list(attribute(_host_event(event) for event in complete if event.get("cat") in ON_HOST))
    spans = _device_spans(device, host, steps[0]) if device else _host_spans(host)
    steps = steps[-num_steps:] if num_steps else steps
    start_us = min(step["ts"] for step in steps)
    stop_us = max(step["ts"] + step["dur"] for step in steps)
    if device:
        # it works behind the host: at first still on steps before these, at last when the host has left the last one
        earlier, spans = _parted(spans, start_us)
        start_us = max([start_us, *(span.stop_us for span in earlier)])
        stop_us = max([stop_us, *(span.stop_us for span in spans)])
    inside = (span for span in spans if span.stop_us > start_us and span.start_us < stop_us)
    return Timeline(
        spans=sorted(inside, key=lambda span: span.start_us),
        start_us=start_us,
        stop_us=stop_us,
        num_steps=len(steps),
        is_gpu=bool(device),
        memory=_memory(events),
        unix_offset_us=unix_offset_us,
    )


def _host_event(event: dict[str, Any]) -> HostEvent:
    start_us = event["ts"]
    return HostEvent(
        name=event["name"],
        category=event["cat"],
        thread=(event.get("pid"), event.get("tid")),
        start_us=start_us,
        stop_us=start_us + event.get("dur", 0.0),
        args=event.get("args", {}),
    )


def _device_spans(
    device: list[dict[str, Any]], host: Iterable[tuple[HostEvent, HostEvent | None]], first_step: dict[str, Any]
) -> list[Span]:
    launches = {
        event.args["correlation"]: event
        for event, _ in host
        if event.category in LAUNCHES and "correlation" in event.args
    }
    launched: list[Span] = []
    replays: dict[int, list[Span]] = defaultdict(list)
    for event in device:
        launch = launches.get(event.get("args", {}).get("correlation"))
        span = _device_span(event, launch)
        if launch is not None and launch.name.startswith(GRAPH_LAUNCHES):
            replays[launch.args["correlation"]].append(span)
        else:
            launched.append(span)
    begin_us, stop_us = first_step["ts"], first_step["ts"] + first_step["dur"]
    of_first_step = (s for s in launched if s.launched_us is not None and begin_us <= s.launched_us <= stop_us)
    return [*launched, *name_replayed(replays.values(), of_first_step)]


def _parted(spans: list[Span], start_us: float) -> tuple[list[Span], list[Span]]:
    """Work launched before a time, and since. What was launched nobody knows when goes by when it ran."""
    began_us = min((s.start_us for s in spans if s.launched_us is not None and s.launched_us >= start_us), default=0.0)
    earlier: list[Span] = []
    since: list[Span] = []
    for span in spans:
        is_earlier = span.start_us < began_us if span.launched_us is None else span.launched_us < start_us
        (earlier if is_earlier else since).append(span)
    return earlier, since


def _device_span(event: dict[str, Any], launch: HostEvent | None) -> Span:
    talks = any(word in event["name"].lower() for word in MESSAGES)
    return Span(
        name=event["name"],
        part=launch.part if launch else OTHER,
        is_backward=launch is not None and launch.is_backward,
        is_communication=talks or (launch is not None and launch.is_communication),
        start_us=event["ts"],
        stop_us=event["ts"] + event.get("dur", 0.0),
        launched_us=launch.stop_us if launch else None,
    )


def _host_spans(host: list[tuple[HostEvent, HostEvent | None]]) -> list[Span]:
    """Every operation, without the operations inside it, and every message of gloo's threads, as a whole."""
    message_threads = {event.thread for event, _ in host if event.name.startswith(HOST_MESSAGE)}
    surrounding = _surrounding_operations(host)
    insides = defaultdict(list)
    for event, _ in host:
        if event.is_operation and (outer := surrounding[event]) is not None:
            insides[outer].append(event)
    spans, sender = [], None
    for event, _ in host:
        if event.name.startswith(COLLECTIVE):
            sender = event
        if event.name.startswith(HOST_MESSAGE):
            if sender is not None:  # it was asked for on another thread, a moment ago
                event.part, event.is_backward = sender.part, sender.is_backward
            spans.append(_span(event, event.start_us, event.stop_us))
        elif event.is_operation and event.thread not in message_threads:
            spans += _stretches(event, insides[event])
    return spans


def _surrounding_operations(
    host: list[tuple[HostEvent, HostEvent | None]],
) -> dict[HostEvent, HostEvent | None]:
    """The innermost operation around every event, whatever ranges lie between them."""
    surrounding: dict[HostEvent, HostEvent | None] = {}
    for event, parent in host:
        is_inside = parent is not None and not parent.is_operation
        surrounding[event] = surrounding[parent] if parent is not None and is_inside else parent
    return surrounding


def _stretches(event: HostEvent, insides: list[HostEvent]) -> Iterator[Span]:
    """An operation's own time: all that the operations inside it leave."""
    continues, at_us = False, event.start_us
    for start_us, stop_us in [*((inside.start_us, inside.stop_us) for inside in insides), (event.stop_us,) * 2]:
        if start_us > at_us:
            yield _span(event, at_us, start_us, continues)
            continues = True
        at_us = max(at_us, stop_us)


def _span(event: HostEvent, start_us: float, stop_us: float, continues: bool = False) -> Span:
    return Span(event.name, event.part, event.is_backward, event.is_communication, start_us, stop_us, continues)


def _memory(events: list[dict[str, Any]]) -> list[tuple[float, int]]:
    """The allocator's total over time: the GPU's if there is one, else the host's."""
    points: dict[tuple[int, int], list[tuple[float, int]]] = defaultdict(list)
    for event in events:
        if event.get("name") == "[memory]":
            args = event["args"]
            points[args["Device Type"], args["Device Id"]].append((event["ts"], args["Total Allocated"]))
    is_gpu = any(kind != 0 for kind, _ in points)
    chosen = [curve for (kind, _), curve in points.items() if (kind != 0) == is_gpu]
    chosen.sort(key=len)  # of several GPUs, the one that this rank computes on
    return sorted(chosen[-1]) if chosen else []
