"""Attribute the kernels of a replayed CUDA graph to parts of the model.

A graph is one launch: its kernels have no host events of their own, and its streams are not those of the capture. They
are the kernels of a launched step, almost in the same order. So a kernel is matched with one of a launched step that
has its name, grid and block, and as many of these before it. Where the two steps do not have the same number of these,
the name must do, and where this does not help either, a kernel of this name at about the same place in the step. A
kernel without a match is not named.
"""

import math
from bisect import bisect_right
from collections import defaultdict
from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import replace

from titan_moe.profile.span import Span

GRAPH_LAUNCHES = ("cudaGraphLaunch", "cuGraphLaunch")
"""Prefixes of the calls that launch a graph."""
GRAPH_INSTANTIATIONS = ("cudaGraphInstantiate", "cuGraphInstantiate")
"""Prefixes of the calls that end a recording."""
COPIES = ("memset", "memcpy")
"""What a launched step does by the copy engine, and a graph by kernels of other names."""
UNNAMED = "not named"
"""The part of kernels of a graph that have no match."""
REACH = 50
"""How many kernels further on or back one of the same name is about at the same place."""

Places = dict[Hashable, list[int]]
"""Key of spans -> their indices, in order."""


def name_parts(step: Sequence[Span], launched: Sequence[Span]) -> list[Span]:
    """Give the spans of a step that are not named yet part, phase and kind of their matches in a launched step.

    Both hold everything that the device did in one step.
    """
    spans = sorted(step, key=lambda span: span.start_us)
    sources = sorted(launched, key=lambda span: span.start_us)
    matches: dict[int, int] = {}
    for key in (_kernel, _name):
        matches |= _match_by_order(*_left(spans, sources, matches, key))
    matches |= _match_by_place(*_left(spans, sources, matches, _name), sorted(matches.items()))
    return [
        _like(span, sources[matches[index]]) if index in matches and span.part == UNNAMED else span
        for index, span in enumerate(spans)
    ]


def _like(span: Span, source: Span) -> Span:
    return replace(span, part=source.part, is_backward=source.is_backward, is_communication=source.is_communication)


def _kernel(span: Span) -> Hashable:
    return span.name, span.shape


def _name(span: Span) -> Hashable:
    return next((copy for copy in COPIES if span.name.lower().startswith(copy)), span.name)


def _left(
    spans: Sequence[Span], sources: Sequence[Span], matches: dict[int, int], key: Callable[[Span], Hashable]
) -> tuple[Places, Places]:
    """The places of the spans and of the sources that have no match yet."""
    places: tuple[Places, Places] = defaultdict(list), defaultdict(list)
    for found, of, matched in zip(places, (spans, sources), (matches, set(matches.values())), strict=True):
        for index, span in enumerate(of):
            if index not in matched:
                found[key(span)].append(index)
    return places


def _match_by_order(places: Places, of_sources: Places) -> Iterator[tuple[int, int]]:
    """Match the spans of every key that occurs equally often."""
    for key, indices in places.items():
        sources = of_sources.get(key, [])
        if len(indices) == len(sources):
            yield from zip(indices, sources, strict=True)


def _match_by_place(places: Places, of_sources: Places, matches: list[tuple[int, int]]) -> Iterator[tuple[int, int]]:
    """Match the spans of every key: with one between the matches of their neighbours, else with the nearest."""
    matched = [index for index, _ in matches]
    for key, indices in places.items():
        sources, left = of_sources.get(key, [])[:], []
        for index in indices:
            after = bisect_right(matched, index)
            low = matches[after - 1][1] if after > 0 else -1
            high = matches[after][1] if after < len(matches) else math.inf
            source = bisect_right(sources, low)
            if source < len(sources) and sources[source] < high:
                yield index, sources.pop(source)
            else:
                left.append((index, low + index - (matched[after - 1] if after > 0 else -1)))
        for index, place in left:
            near = [source for source in sources if abs(source - place) <= REACH]
            if near:
                nearest = min(near, key=lambda source: abs(source - place))
                sources.remove(nearest)
                yield index, nearest
