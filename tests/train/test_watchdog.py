"""Limits of a step's time; tests/train/test_hangs.py lets runs reach them."""

import pytest

from titan_moe.config.train import RunConfig
from titan_moe.train.process import process_group
from titan_moe.train.watchdog import Watchdog


@pytest.mark.parametrize(("pp", "of_first_step"), [(1, 6), (4, 9)])
def test_ranks_of_a_pipeline_may_compile_one_after_the_other(
    monkeypatch: pytest.MonkeyPatch, pp: int, of_first_step: int
) -> None:
    monkeypatch.delenv("RANK", raising=False)
    config = RunConfig(device="cpu", step_timeout_minutes=0.5)
    with process_group(config, pp), Watchdog(config, pp) as watchdog:
        allowed_s = []
        for step in range(3):
            watchdog.begin_step(step)
            allowed_s.append(watchdog._allowed_s)
        watchdog.begin("a save")
        allowed_s.append(watchdog._allowed_s)
    assert allowed_s == [30 * limits for limits in (of_first_step, 1, 1, 6)]
