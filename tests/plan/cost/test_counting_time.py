"""Counting ahead: forwards that go from stage to stage, and what they add to a predicted step."""

from pathlib import Path

import pytest

from titan_moe.config import load_recipe
from titan_moe.plan.cost.counting_time import counting_seconds
from titan_moe.plan.cost.rates import Rates
from titan_moe.plan.cost.roofline import sharding_bytes
from titan_moe.plan.cost.step_time import Prediction, predict
from titan_moe.plan.resolved import Resolved

RECIPE = Path(__file__).parents[3] / "recipes" / "qwen3_30b_a3b.toml"


def test_a_rank_with_several_stages_waits_for_the_others() -> None:
    assert counting_seconds([3.0], [0], 5) == 15
    assert counting_seconds([1.0, 1.0], [0, 1], 10) == 11  # fills and drains
    assert counting_seconds([1.0, 2.0], [0, 1], 10) == 21
    assert counting_seconds([0.5, 0.5, 0.5, 0.5], [0, 1, 0, 1], 10) == 2 + 9 * 1.5  # not 10 forwards of a second
    assert counting_seconds([1.0], [0], 0) == 0


def test_a_predicted_step_counts_ahead() -> None:
    def predicted(sequences: int, *overrides: str) -> tuple[Prediction, float]:
        fields = ("model.num_layers=4", "parallel.ep=2", "compile.cudagraph=off", "memory.recompute=none")
        words = [f"--{field}" for field in (*fields, f"train.global_batch_sequences={sequences}", *overrides)]
        resolved = Resolved(load_recipe(RECIPE, words), 2)
        return predict(resolved, Rates()), sharding_bytes(resolved.parts[0])

    loss = "model.moe.aux_losses.global_batch=0.001"
    plain, bytes_of_plain = predicted(64)
    counted, bytes_of_counted = predicted(64, loss)
    assert 1.1 < counted.seconds / plain.seconds < 1.4
    assert bytes_of_counted > bytes_of_plain
    assert sum(counted.parts.values()) == pytest.approx(counted.seconds)
    assert "counting" in counted.parts
    micro = load_recipe(RECIPE).train.micro_batch_sequences
    assert "counting" not in predicted(2 * micro, loss)[0].parts  # one microbatch sums in its own forward
