"""Limits of a step's time; tests/train/test_hangs.py lets runs reach them."""

import pytest

from titan_moe.config.train import RunConfig
from titan_moe.train.process import process_group
from titan_moe.train.watchdog import Watchdog


def test_first_step_which_compiles_and_saves_have_six_limits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("RANK", raising=False)
    config = RunConfig(device="cpu", step_timeout_minutes=0.5)
    with process_group(config), Watchdog(config) as watchdog:
        allowed_s = []
        for step in range(3):
            watchdog.begin_step(step)
            allowed_s.append(watchdog._allowed_s)
        watchdog.begin("a save")
        allowed_s.append(watchdog._allowed_s)
    assert allowed_s == [30 * limits for limits in (6, 1, 1, 6)]
