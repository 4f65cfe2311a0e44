"""Steps without finite gradients are counted, those that overflowed are not."""

import pytest
import torch

from titan_moe.training.skips import Skips


@pytest.mark.parametrize(
    ("steps", "expected"),
    [
        (["skip", "skip", "update", "skip"], [1, 2, 0, 1]),
        (["skip", "overflow", "skip", "overflow", "update"], [1, 1, 2, 2, 0]),
        (["skip", "spike", "skip"], [1, 0, 1]),
    ],
)
def test_a_step_that_overflowed_does_not_count(steps: list[str], expected: list[int]) -> None:
    skips, counts = Skips(torch.device("cpu")), []
    for what in steps:
        norm = torch.tensor(1.0 if what in ("update", "spike") else float("nan"))
        skips.follow({"grad_norm": norm, "has_overflowed": torch.tensor(what == "overflow")})
        counts.append(int(skips.num_in_row))
    assert counts == expected and int(skips.num_skipped) == steps.count("skip")
