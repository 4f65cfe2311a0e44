"""Skewed loads: experts at least 1.5 and ranks between 1.15 and 1.25 times the mean."""

from pathlib import Path

import pytest

from titan_moe.config import load_recipe
from titan_moe.config.skew import WINDOW_TOKENS, obstacles_to_skew, skewed_counts

RECIPES = Path(__file__).parents[2] / "recipes"


def ratios(num_experts: int, top_k: int, num_ranks: int) -> tuple[float, float]:
    """Max over mean of the experts and of the ranks, after checks of the counts."""
    counts = skewed_counts(num_experts, top_k, num_ranks)
    assert len(counts) == num_experts and sum(counts) == WINDOW_TOKENS * top_k
    assert 0 <= min(counts) and max(counts) <= WINDOW_TOKENS, "no expert twice in a token"
    size = num_experts // num_ranks
    ranks = [sum(counts[rank * size : (rank + 1) * size]) for rank in range(num_ranks)]
    return max(counts) * num_experts / sum(counts), max(ranks) * num_ranks / sum(ranks)


@pytest.mark.parametrize(
    ("recipe", "num_ranks"), [("qwen3_30b_a3b", 8), ("deepseek_v2_lite", 8), ("mixtral_8x7b", 4), ("mixtral_8x7b", 2)]
)
def test_skewed_loads_of_the_recipes(recipe: str, num_ranks: int) -> None:
    moe = load_recipe(RECIPES / f"{recipe}.toml").model.moe
    assert list(obstacles_to_skew(moe.num_experts, moe.top_k, num_ranks)) == []
    expert, rank = ratios(moe.num_experts, moe.top_k, num_ranks)
    assert expert >= 1.5 and 1.15 <= rank <= 1.25


def test_skewed_loads_are_refused_for_one_expert_a_rank() -> None:
    (obstacle,) = obstacles_to_skew(8, 2, 8)
    assert "the hottest expert would be the hottest rank" in obstacle


@pytest.mark.parametrize("num_experts", [2, 4, 6, 8, 16, 60, 64, 128, 256])
def test_skewed_loads_hold_wherever_they_are_not_refused(num_experts: int) -> None:
    for num_ranks in (n for n in range(1, num_experts + 1) if num_experts % n == 0):
        for top_k in (1, 2, 3, 8, num_experts):
            if not list(obstacles_to_skew(num_experts, top_k, num_ranks)):
                expert, rank = ratios(num_experts, top_k, num_ranks)
                one_token = num_experts / (WINDOW_TOKENS * top_k)  # of a window, over the mean
                assert expert == pytest.approx(1.8, abs=one_token)
                assert rank == pytest.approx(1.2 if num_ranks > 1 else 1.0, abs=one_token)


def test_skewed_loads_are_shuffled() -> None:
    counts = skewed_counts(128, 8, 8)
    assert counts != sorted(counts, reverse=True)
    assert counts == skewed_counts(128, 8, 8)
