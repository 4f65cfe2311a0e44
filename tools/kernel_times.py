"""Profile one step: a text table of kernel times on the GPU of rank 0.

Only the device is profiled. Profiling the host would slow launches down, and with them the step.
"""

import json
import tempfile
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch.profiler import ProfilerActivity, profile

from titan_moe.profile.trace_parsing import DEVICE_CATEGORIES

NUM_KERNELS = 50
NAME_WIDTH = 160
"""Template names have thousands of characters. Kernels are grouped by the full name and shown with this many."""


class DeviceEvent(NamedTuple):
    """A kernel, a copy or a memset on the device."""

    name: str
    start_us: float
    stop_us: float


def profile_step(take_step: Callable[[], Any], file: Path, heading: str) -> None:
    """Take a step on every rank. Rank 0 profiles its GPU and writes the file."""
    profiler = profile(activities=[ProfilerActivity.CUDA]) if dist.get_rank() == 0 else None
    with profiler or nullcontext():
        dist.all_reduce(torch.zeros(1))  # on the host: no rank starts before the profiler
        take_step()
        torch.cuda.synchronize()
    if profiler is not None:
        with tempfile.TemporaryDirectory() as folder:
            trace = Path(folder) / "trace.json"
            profiler.export_chrome_trace(str(trace))
            events = read_events(trace)
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text("\n".join([heading, *describe(events), ""]), encoding="utf-8")


def read_events(trace: Path) -> list[DeviceEvent]:
    """The events of the device, by start time."""
    events = json.loads(trace.read_text(encoding="utf-8"))["traceEvents"]
    device = (event for event in events if event.get("ph") == "X" and event.get("cat") in DEVICE_CATEGORIES)
    parsed = (DeviceEvent(event["name"], event["ts"], event["ts"] + event.get("dur", 0.0)) for event in device)
    return sorted(parsed, key=lambda event: event.start_us)


def describe(events: Sequence[DeviceEvent]) -> Iterator[str]:
    """The duration of the step, its busy time, and the kernels with the longest total time.

    Kernels of several streams overlap, so their times may add up to more than the step.
    """
    if not events:
        yield "the profiler recorded no work on the device"
        return
    span_us = max(event.stop_us for event in events) - events[0].start_us
    busy_us = busy_us_of(events)
    yield f"the step took {span_us / 1e3:.3f} ms on the device (start of the first to end of the last kernel)"
    yield f"any kernel or copy ran in {busy_us / 1e3:.3f} ms of it ({busy_us / span_us:.1%})"
    times_us: dict[str, list[float]] = defaultdict(list)
    for event in events:
        times_us[event.name].append(event.stop_us - event.start_us)
    yield f"the longest of {len(times_us)} kernels by total time, with their share of the step:"
    longest = sorted(times_us.items(), key=lambda item: -sum(item[1]))[:NUM_KERNELS]
    yield f"{'total ms':>10} {'share':>6} {'count':>7} {'mean us':>10}  kernel"
    for name, kernel_us in longest:
        total_us, count = sum(kernel_us), len(kernel_us)
        share, mean_us = total_us / span_us, total_us / count
        yield f"{total_us / 1e3:10.3f} {share:6.1%} {count:7} {mean_us:10.1f}  {name[:NAME_WIDTH]}"


def busy_us_of(events: Sequence[DeviceEvent]) -> float:
    """The time in which at least one event ran. Events are sorted by start time."""
    busy_us, until_us = 0.0, events[0].start_us
    for event in events:
        busy_us += max(event.stop_us - max(event.start_us, until_us), 0.0)
        until_us = max(until_us, event.stop_us)
    return busy_us
