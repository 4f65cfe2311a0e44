"""Forward, and forward with backward, are timed apart. Real times need a GPU."""

from collections.abc import Callable, Iterator
from itertools import count
from typing import Any

import pytest
import torch

from titan_moe.kernels.registry import Sample
from titan_moe.kernels.timing import forward_and_total_ms


@pytest.mark.parametrize(("num_differentiable", "expected"), [(1, (1.0, 2.0)), (0, (1.0, 1.0))])
def test_forward_and_total_are_timed_apart(num_differentiable: int, expected: tuple[float, float]) -> None:
    """The stopwatch returns 1, 2, ..."""
    ticks: Iterator[int] = count(1)

    def time(call: Callable[[], Any]) -> float:
        call()
        return float(next(ticks))

    sample = Sample("", (torch.ones(3), torch.ones(3)), num_differentiable)
    assert forward_and_total_ms(lambda x, y: (x * y, torch.zeros(2).long()), sample, time) == expected
