"""Batch sizes that grow in a run: `[[train.batch_schedule]]`."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple


@dataclass(frozen=True)
class BatchPhase:
    """A smaller batch at the start of a run."""

    until_tokens: int = 0
    """Steps that begin before the run has read so many tokens have this batch."""
    global_batch_sequences: int = 0
    """Sequences per optimizer step on all ranks, fewer than `train.global_batch_sequences`."""


class BatchSizes(NamedTuple):
    """The sequences of every step of a run. They follow from the sequences that were read before, and from nothing
    else: a resume has the sizes of an unbroken run."""

    phases: tuple[BatchPhase, ...]
    last: int
    """Sequences of a step after all phases."""
    seq_len_tokens: int

    def next(self, num_read: int) -> int:
        """Sequences of a step that begins after so many."""
        num_tokens = num_read * self.seq_len_tokens
        early = (phase.global_batch_sequences for phase in self.phases if num_tokens < phase.until_tokens)
        return next(early, self.last)

    def total(self, steps: int) -> int:
        """Sequences of so many steps."""
        total = 0
        for number, size in self._early():
            number = min(number, steps)
            total, steps = total + number * size, steps - number
        return total + steps * self.last

    def steps(self, amount: float, unit: int = 1) -> int:
        """The steps that read this many sequences, rounded to whole ones; with a unit, tokens."""
        done = 0
        for number, size in self._early():
            if amount < number * size * unit:
                return done + int(amount / (size * unit) + 0.5)
            done, amount = done + number, amount - number * size * unit
        return done + int(amount / max(self.last * unit, 1) + 0.5)

    @property
    def growth(self) -> str:
        """In words, behind the size of the last steps; empty for equal ones."""
        tokens = self.next(0) * self.seq_len_tokens
        return f"; it grows from {tokens:,} in {len(self.phases) + 1} sizes" if self.phases else ""

    def _early(self) -> Iterator[tuple[int, int]]:
        """Steps and size of each phase."""
        num_read = 0
        for phase in self.phases:
            until, size = -(-phase.until_tokens // max(self.seq_len_tokens, 1)), max(phase.global_batch_sequences, 1)
            number = max(-(-(until - num_read) // size), 0)
            yield number, size
            num_read += number * size
