"""The warning of a loss that explodes."""

import math

import pytest

from titan_moe.metrics.explosion import ExplosionWarning

VOCAB_SIZE = 256


def see(losses: list[float], *, is_new_run: bool = True) -> None:
    warning = ExplosionWarning(VOCAB_SIZE)
    for step, loss in enumerate(losses, start=1):
        warning.see(10 * step, loss, is_start=is_new_run and step == 1)


def test_explosion_is_named_once(caplog: pytest.LogCaptureFixture) -> None:
    see([5.6, 3.0, 232_640.0, 5.0, 1e6])
    (message,) = caplog.messages
    assert message.startswith("the loss has exploded: 2.326e+05 at step 30 is above 2 times 5.6")


def test_a_resumed_run_is_compared_with_a_uniform_guess(caplog: pytest.LogCaptureFixture) -> None:
    see([1e4, 1e4], is_new_run=False)
    (message,) = caplog.messages
    assert "at step 10 is above 2 times 5.545" in message


@pytest.mark.parametrize("losses", [[5.6, 6.0, 11.0], [40.0, 60.0, 79.0], [5.6, math.nan, math.inf, 2.0]])
def test_no_explosion(losses: list[float], caplog: pytest.LogCaptureFixture) -> None:
    see(losses)
    assert not caplog.messages
