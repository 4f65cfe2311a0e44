"""Limits of a step's time; tests/run/test_hangs.py lets runs reach them."""

import signal
from typing import Any

import pytest

from titan_moe.config.train import RunConfig
from titan_moe.run.process import process_group
from titan_moe.run.watchdog import Watchdog


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


def test_a_run_does_not_end_with_a_tick_of_waiting(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: Any) -> None:
        raise TimeoutError("the watching thread slept on")

    monkeypatch.delenv("RANK", raising=False)
    config = RunConfig(device="cpu")
    before = signal.signal(signal.SIGALRM, fail)
    try:
        with process_group(config):
            watchdog = Watchdog(config)
            watchdog.tick_s = 600.0
            with watchdog:
                signal.alarm(60)
            signal.alarm(0)
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)
