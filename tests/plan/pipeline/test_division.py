"""Layers are divided as brute force divides them."""

import random
from itertools import combinations, pairwise

import pytest

from titan_moe.plan.pipeline.division import divide, even_out_ranks


def all_divisions(num_layers: int, num_stages: int) -> list[tuple[int, ...]]:
    cuts = combinations(range(1, num_layers), num_stages - 1)
    return [tuple(end - start for start, end in pairwise((0, *inner, num_layers))) for inner in cuts]


@pytest.mark.parametrize("seed", range(20))
def test_division_is_the_best_of_all(seed: int) -> None:
    draw = random.Random(seed)
    num_layers = draw.randint(1, 9)
    times, num_stages, head = [draw.randint(1, 4) for _ in range(num_layers)], draw.randint(1, num_layers), seed % 7

    def quality(sizes: tuple[int, ...]) -> tuple[int, int, int]:
        ends = [sum(sizes[: i + 1]) for i in range(num_stages)]
        sums = [sum(times[end - size : end]) for size, end in zip(sizes, ends, strict=True)]
        sums[-1] += head
        of_ends = sizes[0] + sizes[-1] if num_stages > 1 else sizes[0]
        return max(sums), sum(time**2 for time in sums), of_ends

    best = min(map(quality, all_divisions(num_layers, num_stages)))
    assert quality(divide(times, num_stages, head)) == best


def test_division_of_equal_layers() -> None:
    assert divide([1.0] * 8, 4) == (2, 2, 2, 2)
    assert divide([1.0] * 10, 4) == (2, 3, 3, 2), "the rest is in the middle"
    assert divide([1.0] * 8, 4, 2.0) == (2, 2, 3, 1), "the head is as long as two layers"


@pytest.mark.parametrize("num_stages", [0, 4])
def test_division_needs_a_layer_for_each_stage(num_stages: int) -> None:
    with pytest.raises(ValueError, match="3 layers cannot be divided into"):
        divide([1.0] * 3, num_stages)


def slowest_rank(sizes: tuple[int, ...], times: list[int], head: int, ranks: list[int]) -> int:
    ends = [sum(sizes[: i + 1]) for i in range(len(sizes))]
    of_ranks = [0] * (max(ranks) + 1)
    for rank, end, size in zip(ranks, ends, sizes, strict=True):
        of_ranks[rank] += sum(times[end - size : end])
    of_ranks[ranks[-1]] += head
    return max(of_ranks)


@pytest.mark.parametrize("ranks", [[0, 1, 0, 1], [0, 1, 1, 0], [0, 1, 2, 2, 1, 0]], ids=str)
@pytest.mark.parametrize("seed", range(5))
def test_ranks_of_several_stages_are_evened_out(seed: int, ranks: list[int]) -> None:
    draw = random.Random(seed)
    times, head = [3, *[draw.choice((4, 5))] * 9], draw.randint(0, 9)
    divided = divide(times, len(ranks), head)
    evened = even_out_ranks(divided, times, head, ranks)
    assert sum(evened) == len(times) and min(evened) > 0
    best = min(slowest_rank(sizes, times, head, ranks) for sizes in all_divisions(len(times), len(ranks)))
    assert slowest_rank(evened, times, head, ranks) == best


def test_a_rank_with_the_head_has_fewer_layers() -> None:
    ranks = [0, 1, 2, 3, 3, 2, 1, 0]
    evened = even_out_ranks(divide([1.0] * 48, 8, 4.0), [1.0] * 48, 4.0, ranks)
    assert slowest_rank(evened, [1] * 48, 4, ranks) == 13, "48 layers and the head over 4 ranks"
