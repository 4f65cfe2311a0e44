"""Divide layers into stages, and over ranks, of nearly equal time."""

import math
from collections.abc import Sequence
from itertools import accumulate, pairwise, permutations
from typing import NamedTuple


class _Best(NamedTuple):
    """The best division of the layers so far; the smallest is the best."""

    cost: float  # the sum of squares
    num_layers_at_ends: int = 0  # of the first and the last stage
    sizes: tuple[int, ...] = ()


def divide(times: Sequence[float], num_stages: int, time_of_head: float = 0) -> tuple[int, ...]:
    """Return the number of consecutive layers of each stage, 1 or more, given the time of each layer. The last stage
    also has the head.

    The slowest stage is as fast as possible. Among such divisions the one with the most equal times is chosen (the
    smallest sum of squares). Among these it is the one with the fewest layers on the first and on the last stage, which
    have the embedding and the head, and then on the earlier stages, which have more microbatches in flight.

    Raises: ValueError for fewer layers than stages.
    """
    if not 1 <= num_stages <= len(times):
        raise ValueError(f"{len(times)} layers cannot be divided into {num_stages} stages of 1 layer or more")
    return _most_equal(times, num_stages, time_of_head, _time_of_slowest(times, num_stages, time_of_head))


def _time_of_slowest(times: Sequence[float], num_stages: int, time_of_head: float) -> float:
    """The time of the slowest stage, as short as a division can make it."""
    ends = [0.0, *accumulate(times)]

    def slowest(limit: float) -> float:
        """With stages that are filled up to a limit, from the last to the first; infinite if these are too many."""
        most, num_found, end, rest = 0.0, 0, len(times), time_of_head
        while end > 0:
            start = end - 1
            while start > 0 and ends[end] - ends[start - 1] + rest <= limit:
                start -= 1
            most, num_found = max(most, ends[end] - ends[start] + rest), num_found + 1
            end, rest = start, 0
        return most if most <= limit and num_found <= num_stages else math.inf

    low, high = 0.0, slowest(math.inf)
    while low < (middle := (low + high) / 2) < high:
        found = slowest(middle)
        low, high = (middle, high) if found == math.inf else (low, found)
    return high


def _most_equal(times: Sequence[float], num_stages: int, time_of_head: float, limit: float) -> tuple[int, ...]:
    """The division with the most equal times of those without a slower stage."""
    ends, num_layers = [0.0, *accumulate(times)], len(times)
    best = {0: _Best(0.0)}
    """By number of layers in the stages so far."""
    for stage in range(num_stages):
        is_last, is_end = stage == num_stages - 1, stage in (0, num_stages - 1)
        found: dict[int, _Best] = {}
        for end in [num_layers] if is_last else range(stage + 1, num_layers - (num_stages - 1 - stage) + 1):
            candidates: list[_Best] = []
            for start in range(end - 1, stage - 1, -1):
                time = ends[end] - ends[start] + (time_of_head if is_last else 0)
                if time > limit:  # stages with more layers take longer
                    break
                if before := best.get(start):
                    at_ends = before.num_layers_at_ends + is_end * (end - start)
                    candidates.append(_Best(before.cost + time**2, at_ends, (*before.sizes, end - start)))
            if candidates:
                found[end] = min(candidates)
        best = found
    return best[num_layers].sizes


def even_out_ranks(
    sizes: Sequence[int], times: Sequence[float], time_of_head: float, rank_of: Sequence[int]
) -> tuple[int, ...]:
    """Sizes of stages whose ranks have nearly equal times, where a rank has several stages; `rank_of` is by stage.

    From the given sizes, one layer is moved to another stage as long as that makes the slowest rank faster, or, at the
    same time, the ranks more equal. Every stage keeps 1 layer or more.
    """
    ends = [0.0, *accumulate(times)]

    def unevenness(sizes: Sequence[int]) -> tuple[float, float, float]:
        borders = [0, *accumulate(sizes)]
        of_stages = [ends[last] - ends[first] for first, last in pairwise(borders)]
        of_stages[-1] += time_of_head
        of_ranks = [0.0] * (max(rank_of) + 1)
        for rank, time in zip(rank_of, of_stages, strict=True):
            of_ranks[rank] += time
        return max(of_ranks), sum(time**2 for time in of_ranks), max(of_stages)

    best = unevenness(sizes), tuple(sizes)
    while True:
        two = (pair for pair in permutations(range(len(sizes)), 2) if best[1][pair[0]] > 1)
        moved = (_move_layer(best[1], source, to) for source, to in two)
        candidate = min(((unevenness(other), other) for other in moved), default=best)
        if candidate[0] >= best[0]:
            return best[1]
        best = candidate


def _move_layer(sizes: tuple[int, ...], source: int, to: int) -> tuple[int, ...]:
    return tuple(size - (stage == source) + (stage == to) for stage, size in enumerate(sizes))
