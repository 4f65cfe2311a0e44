"""Which part of the model a replayed kernel belongs to.

A CUDA graph is one launch: its kernels do not say who asked for them. But they are those of a step that was launched
kernel by kernel, in the same order. So the k-th kernel of a name in a replay is the k-th of that name in such a step,
which the trace must hold too.
"""

from collections import defaultdict
from collections.abc import Iterable
from dataclasses import replace

from titan_moe.profile.span import Span

GRAPH_LAUNCHES = ("cudaGraphLaunch", "cuGraphLaunch")
"""How the calls begin that replay a graph."""


def name_replayed(replays: Iterable[list[Span]], launched: Iterable[Span]) -> list[Span]:
    """Give the spans of every replay the parts of a step's launched spans; what has no counterpart there stays as it
    is."""
    known: dict[str, list[Span]] = defaultdict(list)
    for span in sorted(launched, key=lambda span: span.start_us):
        known[span.name].append(span)
    return [span for replay in replays for span in _named(replay, known)]


def _named(replay: list[Span], known: dict[str, list[Span]]) -> Iterable[Span]:
    seen: dict[str, int] = defaultdict(int)
    for span in sorted(replay, key=lambda span: span.start_us):
        place, seen[span.name] = seen[span.name], seen[span.name] + 1
        if place < len(known[span.name]):
            model = known[span.name][place]
            yield replace(span, part=model.part, is_backward=model.is_backward, is_communication=model.is_communication)
        else:
            yield span
