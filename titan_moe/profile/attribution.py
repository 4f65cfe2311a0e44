"""Attribute every host event of a trace to a part of the model.

Each thread is a stack of events. An event belongs to the part of the innermost region around it. A backward node has
the sequence number of the forward operation that created it and the number of the thread that ran it; it belongs to the
part of that operation, also in compiled code. AccumulateGrad nodes have no number and belong to the node before them.
"""

from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

from titan_moe.config.dispatchers import DISPATCHERS
from titan_moe.profile.region import PREFIX

OTHER = "other"
"""The part of events outside all regions."""
NODE = "autograd::engine::evaluate_function"
PYTORCH_RANGES = {"FSDP::": "sharding", "Optimizer.": "optimizer"}
"""Prefixes of ranges that PyTorch records -> their part."""
COLLECTIVE_CALLS = ("c10d::", "nccl:", "gloo:")
"""Prefixes of collectives. All nested events are communication, as in the `exchange_ops` of dispatchers."""
COLLECTIVE_OPS = ("titan_moe::all_to_all", "titan_moe::all_gather", "titan_moe::reduce_scatter", "_c10d_functional::")
"""Prefixes of ops that start a collective or wait for one. Their self time is communication, nested copies are not."""

Thread = tuple[Any, Any]
"""Process and thread of an event."""


@dataclass(eq=False, slots=True)
class HostEvent:
    """An event of a host thread, with its part, phase and kind."""

    name: str
    category: str
    thread: Thread
    start_us: float
    stop_us: float
    args: dict[str, Any]
    part: str = OTHER
    is_backward: bool = False
    is_communication: bool = False

    @property
    def is_operation(self) -> bool:
        """Whether it is an operation. Regions and other ranges only contain operations."""
        return self.category == "cpu_op"

    @property
    def forward_thread(self) -> int:
        """The profiler's number of the thread that ran the forward; 0 for events that are not backward nodes."""
        return self.args.get("Fwd thread id", 0)

    @property
    def sequence(self) -> int | None:
        """The autograd sequence number, shared by a forward operation and its backward node."""
        return self.args.get("Sequence number")


def attribute(events: Iterable[HostEvent]) -> Iterator[tuple[HostEvent, HostEvent | None]]:
    """Set part, phase and kind of every event. Yields (event, enclosing event) in order of time."""
    ordered = sorted(events, key=lambda event: (event.start_us, -event.stop_us))
    _copy_node_numbers(ordered)
    threads = _forward_threads(ordered)
    stacks: dict[Thread, list[HostEvent]] = defaultdict(list)
    parts_of_forward: dict[tuple[Thread | None, int | None], str] = {}
    latest_node: dict[Thread, str] = {}
    calls = COLLECTIVE_CALLS + tuple(op for facts in DISPATCHERS.values() for op in facts.exchange_ops)
    for event in ordered:
        stack = stacks[event.thread]
        while stack and stack[-1].stop_us <= event.start_us:
            stack.pop()
        parent = stack[-1] if stack else None
        event.is_communication = event.name.startswith(calls + COLLECTIVE_OPS)
        if parent is not None:
            event.part, event.is_backward = parent.part, parent.is_backward
            event.is_communication |= parent.is_communication and not parent.name.startswith(COLLECTIVE_OPS)
        part = _part_of_range(event)
        if part:
            event.part = part
        elif event.forward_thread:
            key = (threads.get(event.forward_thread), event.sequence)
            event.part = latest_node[event.thread] = parts_of_forward.get(key, event.part)
            event.is_backward = True
        elif event.name.startswith(NODE):
            event.part = latest_node.get(event.thread, event.part)
            event.is_backward = True
        elif event.sequence is not None:  # the last operation that starts with a number created the node
            parts_of_forward[event.thread, event.sequence] = event.part
        stack.append(event)
        yield event, parent


def _part_of_range(event: HostEvent) -> str | None:
    if event.name.startswith(PREFIX):
        return event.name.removeprefix(PREFIX)
    return next((part for prefix, part in PYTORCH_RANGES.items() if event.name.startswith(prefix)), None)


def _copy_node_numbers(events: list[HostEvent]) -> None:
    """Copy a node's sequence number to the evaluation around it. For Python autograd functions only the node has it."""
    latest: dict[Thread, HostEvent] = {}
    for event in events:
        if event.name.startswith(NODE):
            latest[event.thread] = event
        elif event.forward_thread and event.thread in latest:
            evaluation = latest[event.thread]
            is_inside = event.stop_us <= evaluation.stop_us and evaluation.name == f"{NODE}: {event.name}"
            if is_inside and not evaluation.forward_thread:
                evaluation.args = evaluation.args | event.args


def _forward_threads(events: list[HostEvent]) -> dict[int, Thread]:
    """Match the profiler's thread numbers with threads, by the sequence numbers of their forward operations. These are
    counted per thread, so a number alone does not identify an operation."""
    sequences_of: dict[int, set[int | None]] = defaultdict(set)
    for event in events:
        if event.forward_thread:
            sequences_of[event.forward_thread].add(event.sequence)
    matches: dict[int, Counter[Thread]] = defaultdict(Counter)
    for event in events:
        if event.sequence is not None and not event.forward_thread:
            for number, sequences in sequences_of.items():
                if event.sequence in sequences:
                    matches[number][event.thread] += 1
    return {number: threads.most_common(1)[0][0] for number, threads in matches.items()}
