"""The time of counting ahead: all forwards of a step before its microbatches, for balancing losses of the whole batch
(training/forward_backward.py)."""

from collections.abc import Sequence


def counting_seconds(of_stages: Sequence[float], ranks: Sequence[int], number: int) -> float:
    """Seconds of so many forwards, given those of each stage, with its message, and its rank.

    A rank runs its stages of one microbatch after each other, then those of the next one: with several stages it waits
    for the other ranks in between, and nothing fills that.
    """
    free = [0.0] * (max(ranks, default=0) + 1)
    ends = [0.0]
    few = min(number, 2 * len(of_stages))  # then each one more takes as long
    for _ in range(few):
        ready = 0.0
        for seconds, rank in zip(of_stages, ranks, strict=True):
            ready = free[rank] = max(ready, free[rank]) + seconds
        ends.append(ready)
    return ends[-1] + (number - few) * (ends[-1] - ends[-2] if few else 0.0)
