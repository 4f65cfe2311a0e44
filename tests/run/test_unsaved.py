"""A long run that saves nothing before its end is told so once, by the time of its first steps."""

import pytest

from titan_moe.run.unsaved import UnsavedWarning


@pytest.mark.parametrize(
    ("every_steps", "num_steps", "step_ms", "words"),
    [
        (0, 10_000, 500.0, "a run of about 1.39 hours"),
        (0, 10_000, 500.0, "checkpoint.every_steps = 3600 saves each half hour"),
        (0, 3, 3e6, "checkpoint.every_steps = 1 saves"),
        (0, 7_000, 500.0, ""),
        (10, 10_000, 500.0, ""),
    ],
)
def test_a_long_run_without_saves_is_warned_of(
    every_steps: int, num_steps: int, step_ms: float, words: str, caplog: pytest.LogCaptureFixture
) -> None:
    warning = UnsavedWarning(every_steps, num_steps)
    warning.see(1, 900_000.0)  # compiles
    assert caplog.text == ""
    for step in (10, 20, 30):
        warning.see(step, step_ms)
    assert caplog.text.count("unless a signal stops it") == bool(words) and words in caplog.text


def test_a_run_that_grows_slow_is_warned_of_later(caplog: pytest.LogCaptureFixture) -> None:
    warning = UnsavedWarning(0, 1000)
    for step, step_ms in ((1, 1000.0), (10, 1000.0), (20, 5000.0)):
        warning.see(step, step_ms)
    assert "about 1.39 hours" in caplog.text
