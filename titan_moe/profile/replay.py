"""Attribute the kernels of a replayed CUDA graph to parts of the model.

A graph is one launch, so its kernels have no host events of their own. They are the kernels of an eager step, in the
same order. The k-th kernel of a name in a replay therefore has the part of the k-th kernel of that name in an eager
step, which the trace must contain.
"""

from collections import defaultdict
from collections.abc import Iterable
from dataclasses import replace

from titan_moe.profile.span import Span

GRAPH_LAUNCHES = ("cudaGraphLaunch", "cuGraphLaunch")
"""Prefixes of the calls that launch a graph."""


def attribute_replays(replays: Iterable[list[Span]], eager: Iterable[Span]) -> list[Span]:
    """Copy part, phase and kind from the spans of an eager step. Spans without a counterpart stay unchanged."""
    eager_by_name: dict[str, list[Span]] = defaultdict(list)
    for span in sorted(eager, key=lambda span: span.start_us):
        eager_by_name[span.name].append(span)
    return [span for replay in replays for span in _attribute(replay, eager_by_name)]


def _attribute(replay: list[Span], eager_by_name: dict[str, list[Span]]) -> Iterable[Span]:
    counts: dict[str, int] = defaultdict(int)
    for span in sorted(replay, key=lambda span: span.start_us):
        index, counts[span.name] = counts[span.name], counts[span.name] + 1
        if index < len(eager_by_name[span.name]):
            eager = eager_by_name[span.name][index]
            yield replace(span, part=eager.part, is_backward=eager.is_backward, is_communication=eager.is_communication)
        else:
            yield span
