"""Warn of a loss that explodes without becoming NaN."""

import logging
import math

logger = logging.getLogger("titan_moe")

FACTOR = 2.0
"""A loss has exploded if it is above so many times the larger of the first loss of the run and ln(vocab_size)."""


class ExplosionWarning:
    """Warn once. A uniform guess has the loss ln(vocab_size); initial weights may have a larger one."""

    def __init__(self, vocab_size: int) -> None:
        self.reference = math.log(vocab_size)
        self.has_warned = False

    def see(self, step: int, loss: float, *, is_start: bool) -> None:
        """Take the loss of a logged step; `is_start` if it is the first step of a run."""
        if is_start and math.isfinite(loss):
            self.reference = max(self.reference, loss)
        if loss > FACTOR * self.reference and math.isfinite(loss) and not self.has_warned:
            self.has_warned = True
            logger.warning(
                "the loss has exploded: %.4g at step %d is above %g times %.4g, the larger of ln(vocab_size) and the "
                "first loss of the run; lower optim.lr or raise optim.warmup_steps",
                loss,
                step,
                FACTOR,
                self.reference,
            )
