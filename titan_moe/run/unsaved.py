"""Warn of a long run that saves nothing before its end."""

import logging

logger = logging.getLogger("titan_moe")

LONG_S = 3600.0
BETWEEN_SAVES_S = 1800.0
"""Of the suggested interval."""


class UnsavedWarning:
    """Warn once, as soon as measured steps show that a run without saves lasts over an hour.

    The first logged step of a process is not measured: it compiles.
    """

    def __init__(self, every_steps: int, num_steps: int) -> None:
        """`every_steps` is the recipe's `checkpoint.every_steps`, `num_steps` its `train.steps`."""
        self.is_possible, self.num_steps = every_steps == 0, num_steps
        self.first_step: int | None = None

    def see(self, step: int, step_ms: float) -> None:
        """Take the mean time of the steps before the logged step `step`."""
        if self.first_step is None:
            self.first_step = step
            return
        hours = (self.num_steps - self.first_step) * step_ms / 3.6e6
        if not self.is_possible or hours * 3600 <= LONG_S:
            return
        self.is_possible = False
        logger.warning(
            "checkpoint.every_steps = 0 saves nothing before the end of a run of about %.3g hours, unless a signal "
            "stops it; checkpoint.every_steps = %d saves each half hour",
            hours,
            max(round(BETWEEN_SAVES_S * 1e3 / step_ms), 1),
        )
