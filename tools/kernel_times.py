"""One step under the profiler: which kernels took how long on the main rank's GPU, as text.

Only the device is recorded, because to record the host too would slow the launches down, and with them the step.
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

NUM_LONGEST = 50
NAME_WIDTH = 160
"""Names of templates go on for thousands of characters; kernels are told apart by all of them, and shown by these."""


class Work(NamedTuple):
    """A kernel, a copy or a set, as the device ran it."""

    name: str
    start_us: float
    stop_us: float


def profile_step(take_step: Callable[[], Any], file: Path, heading: str) -> None:
    """Take a step, on every rank; the main rank records its GPU meanwhile and writes the file."""
    is_main = dist.get_rank() == 0
    recorded = profile(activities=[ProfilerActivity.CUDA]) if is_main else None
    with recorded or nullcontext():
        dist.all_reduce(torch.zeros(1))  # on the host: nobody begins before the profiler has
        take_step()
        torch.cuda.synchronize()
    if recorded is not None:
        with tempfile.TemporaryDirectory() as folder:
            trace = Path(folder) / "trace.json"
            recorded.export_chrome_trace(str(trace))
            works = read_works(trace)
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text("\n".join([heading, *describe(works), ""]), encoding="utf-8")


def read_works(trace: Path) -> list[Work]:
    """What ran on the device, by its beginning."""
    events = json.loads(trace.read_text(encoding="utf-8"))["traceEvents"]
    ran = (event for event in events if event.get("ph") == "X" and event.get("cat") in DEVICE_CATEGORIES)
    works = (Work(event["name"], event["ts"], event["ts"] + event.get("dur", 0.0)) for event in ran)
    return sorted(works, key=lambda work: work.start_us)


def describe(works: Sequence[Work]) -> Iterator[str]:
    """The step, how much of it anything ran, and the kernels that took longest, with the number of their runs.

    Kernels of several streams run at one time: their times may add up to more than the step.
    """
    if not works:
        yield "the profiler saw nothing run on the device"
        return
    span_us = max(work.stop_us for work in works) - works[0].start_us
    busy_us = busy_time_us(works)
    yield f"the step took {span_us / 1e3:.3f} ms on the device, from its first kernel's beginning to its last one's end"
    yield f"any kernel or copy ran in {busy_us / 1e3:.3f} ms of it ({busy_us / span_us:.1%})"
    times_us: dict[str, list[float]] = defaultdict(list)
    for work in works:
        times_us[work.name].append(work.stop_us - work.start_us)
    yield f"the longest of {len(times_us)} kernels by total time, with their share of the step:"
    longest = sorted(times_us.items(), key=lambda item: -sum(item[1]))[:NUM_LONGEST]
    yield f"{'total ms':>10} {'share':>6} {'count':>7} {'mean us':>10}  kernel"
    for name, of_kernel_us in longest:
        total_us, count = sum(of_kernel_us), len(of_kernel_us)
        share, mean_us = total_us / span_us, total_us / count
        yield f"{total_us / 1e3:10.3f} {share:6.1%} {count:7} {mean_us:10.1f}  {name[:NAME_WIDTH]}"


def busy_time_us(works: Sequence[Work]) -> float:
    """How long at least one ran; they come by their beginning."""
    busy_us, until_us = 0.0, works[0].start_us
    for work in works:
        busy_us += max(work.stop_us - max(work.start_us, until_us), 0.0)
        until_us = max(until_us, work.stop_us)
    return busy_us
