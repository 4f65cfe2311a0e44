"""Attribute the kernels of a replayed CUDA graph to parts of the model.

A graph is one launch, so its kernels have no host events of their own, and they run on other streams than those of the
recording. They are the kernels of a launched step, in the same order. The k-th kernel of a name in a replay therefore
has the part of the k-th kernel of that name in a launched step, which the trace must contain.
"""

from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import replace

from titan_moe.profile.span import Span

GRAPH_LAUNCHES = ("cudaGraphLaunch", "cuGraphLaunch")
"""Prefixes of the calls that launch a graph."""
GRAPH_INSTANTIATIONS = ("cudaGraphInstantiate", "cuGraphInstantiate")
"""Prefixes of the calls that end a recording."""


def attribute_replays(replays: Iterable[list[Span]], launched: Iterable[Span]) -> Iterator[Span]:
    """Copy part, phase and kind from the spans of a launched step. Spans without a counterpart stay unchanged."""
    launched_by_name: dict[str, list[Span]] = defaultdict(list)
    for span in sorted(launched, key=lambda span: span.start_us):
        launched_by_name[span.name].append(span)
    for replay in replays:
        yield from _attribute(replay, launched_by_name)


def _attribute(replay: list[Span], launched_by_name: dict[str, list[Span]]) -> Iterator[Span]:
    counts: dict[str, int] = defaultdict(int)
    for span in sorted(replay, key=lambda span: span.start_us):
        index, counts[span.name] = counts[span.name], counts[span.name] + 1
        alike = launched_by_name.get(span.name, ())
        if index < len(alike):
            named = alike[index]
            yield replace(span, part=named.part, is_backward=named.is_backward, is_communication=named.is_communication)
        else:
            yield span
