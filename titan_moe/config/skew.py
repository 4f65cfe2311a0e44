"""The load of each expert in forced skewed routing. It is the same for all runs, so that runs can be compared.

E experts · K choices a token · P ep ranks, each with consecutive experts

Loads are relative to the mean. The load of a rank sets the time of its layer, that of an expert the shape of its GEMM.
Loads of ranks fall evenly from 1.2 to 0.8, and on each rank those of experts from 1.5 to 0.5 times the rank's, so that
the hottest expert has 1.8 times the mean. On one rank they fall from 1.8 to 0.2. The order is drawn with a fixed seed.
"""

import random
from collections.abc import Iterator

HOTTEST_EXPERT = 1.8
HOTTEST_RANK = 1.2

WINDOW_TOKENS = 1024
"""Consecutive tokens of a rank that have exactly these loads, up to whole tokens."""


def skewed_counts(num_experts: int, top_k: int, num_ranks: int) -> list[int]:
    """Distribute all assignments of a window's tokens over experts, at most one a token to an expert.

    `obstacles_to_skew` tells whether this is possible.
    """
    scale = WINDOW_TOKENS * top_k / num_experts
    counts, assigned, end = [], 0, 0.0
    for load in _skewed_loads(num_experts, num_ranks):
        end += load * scale
        counts.append(round(end) - assigned)  # the next expert gets the remainder
        assigned = round(end)
    return counts


def obstacles_to_skew(num_experts: int, top_k: int, num_ranks: int) -> Iterator[str]:
    """Why these loads are impossible."""
    if num_ranks < 1 or num_experts % num_ranks:
        return  # another rule refuses this
    if num_experts // num_ranks < 2:
        yield (
            f"parallel.ep = {num_ranks} leaves each rank one of the {num_experts} experts, so the hottest expert would "
            f"be the hottest rank, and both cannot have their loads, {HOTTEST_EXPERT} and {HOTTEST_RANK} times the "
            "mean"
        )
    if HOTTEST_EXPERT * top_k > num_experts:
        yield (
            f"model.moe.top_k = {top_k} of {num_experts} experts gives the hottest at most {num_experts / top_k:.3g} "
            f"times the mean, which is every token, and not {HOTTEST_EXPERT}"
        )


def _skewed_loads(num_experts: int, num_ranks: int) -> list[float]:
    """Each expert's load, rank by rank."""
    rng = random.Random(0)
    hottest_rank = HOTTEST_RANK if num_ranks > 1 else 1.0
    experts = _linear_loads(HOTTEST_EXPERT / hottest_rank, num_experts // num_ranks)
    loads = []
    for rank_load in rng.sample(_linear_loads(hottest_rank, num_ranks), num_ranks):
        loads += [rank_load * load for load in rng.sample(experts, len(experts))]
    return loads


def _linear_loads(hottest: float, number: int) -> list[float]:
    """Loads that fall linearly, with a mean of 1."""
    steps = max(number - 1, 1)
    return [hottest - 2 * (hottest - 1) * index / steps for index in range(number)]
