"""Which part of the model an event of the host belongs to: the region around it, or, in backward, its forward's.

Every thread is a stack of events. An event belongs to the innermost region around it. A node of backward carries the
sequence number of the forward operation that made it and the thread that ran it, and belongs to that operation's part,
compiled pieces included. Storing a gradient has no number: it belongs to the node before it.
"""

from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

from titan_moe.config.dispatchers import DISPATCHERS
from titan_moe.profile.region import PREFIX

OTHER = "other"
"""What no region names."""
NODE = "autograd::engine::evaluate_function"
NAMED_BY_OTHERS = {"FSDP::": "sharding", "Optimizer.": "optimizer"}
"""Ranges that PyTorch names itself, by how they begin."""
SENDING = ("c10d::", "nccl:", "gloo:")
"""How calls begin that hand a message over: all of their time is communication, as in the `exchange_ops` of
dispatchers."""
WAITING = ("titan_moe::all_to_all", "titan_moe::all_gather", "titan_moe::reduce_scatter", "_c10d_functional::")
"""How operations begin that start a message, wait for one, or both: their own time is communication, the copies inside
them are not."""

Thread = tuple[Any, Any]
"""Process and thread of an event."""


@dataclass(eq=False, slots=True)
class HostEvent:
    """An event of a host thread, and what it belongs to."""

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
        """Whether it is work of its own; regions and other ranges only surround work."""
        return self.category == "cpu_op"

    @property
    def forward_thread(self) -> int:
        """The profiler's number of the thread that ran the forward; 0 if this is no node of backward."""
        return self.args.get("Fwd thread id", 0)

    @property
    def sequence(self) -> int | None:
        """What a forward operation and its node of backward share."""
        return self.args.get("Sequence number")


def attribute(events: Iterable[HostEvent]) -> Iterator[tuple[HostEvent, HostEvent | None]]:
    """Fill in part, phase and kind of every event; yields each, in order of time, with the event that surrounds it."""
    ordered = sorted(events, key=lambda event: (event.start_us, -event.stop_us))
    _number_nodes(ordered)
    threads = _forward_threads(ordered)
    stacks: dict[Thread, list[HostEvent]] = defaultdict(list)
    parts_of_forward: dict[tuple[Thread | None, int | None], str] = {}
    latest_node: dict[Thread, str] = {}
    sending = SENDING + tuple(op for facts in DISPATCHERS.values() for op in facts.exchange_ops)
    for event in ordered:
        stack = stacks[event.thread]
        while stack and stack[-1].stop_us <= event.start_us:
            stack.pop()
        parent = stack[-1] if stack else None
        _inherit(event, parent, sending)
        named = _name(event)
        if named:
            event.part = named
        elif event.forward_thread:
            key = (threads.get(event.forward_thread), event.sequence)
            event.part = latest_node[event.thread] = parts_of_forward.get(key, event.part)
            event.is_backward = True
        elif event.name.startswith(NODE):
            event.part = latest_node.get(event.thread, event.part)
            event.is_backward = True
        elif event.sequence is not None:  # the last one to begin under a number made the node
            parts_of_forward[event.thread, event.sequence] = event.part
        stack.append(event)
        yield event, parent


def _inherit(event: HostEvent, parent: HostEvent | None, sending: tuple[str, ...]) -> None:
    event.is_communication = event.name.startswith(sending + WAITING)
    if parent is not None:
        event.part, event.is_backward = parent.part, parent.is_backward
        event.is_communication |= parent.is_communication and not parent.name.startswith(WAITING)


def _name(event: HostEvent) -> str | None:
    if event.name.startswith(PREFIX):
        return event.name.removeprefix(PREFIX)
    return next((part for start, part in NAMED_BY_OTHERS.items() if event.name.startswith(start)), None)


def _number_nodes(events: list[HostEvent]) -> None:
    """Give the evaluation of a node the node's number where the profiler gives it to the node alone (Python's own)."""
    latest: dict[Thread, HostEvent] = {}
    for event in events:
        if event.name.startswith(NODE):
            latest[event.thread] = event
        elif event.forward_thread and event.thread in latest:
            evaluation = latest[event.thread]
            is_its_own = event.stop_us <= evaluation.stop_us and evaluation.name == f"{NODE}: {event.name}"
            if is_its_own and not evaluation.forward_thread:
                evaluation.args = evaluation.args | event.args


def _forward_threads(events: list[HostEvent]) -> dict[int, Thread]:
    """Match the profiler's own thread numbers with threads: whose forward operations have the numbers that are asked
    for. Sequence numbers are counted by thread, so the number alone would not do."""
    wanted: dict[int, set[int | None]] = defaultdict(set)
    for event in events:
        if event.forward_thread:
            wanted[event.forward_thread].add(event.sequence)
    found: dict[int, Counter[Thread]] = defaultdict(Counter)
    for event in events:
        if event.sequence is not None and not event.forward_thread:
            for number, sequences in wanted.items():
                if event.sequence in sequences:
                    found[number][event.thread] += 1
    return {number: threads.most_common(1)[0][0] for number, threads in found.items()}
