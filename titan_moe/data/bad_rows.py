"""Rows that cannot be trained on: the run ends at the first one, or skips and counts them, as `data.bad_rows` says."""

import logging
from typing import Literal

NUM_NAMED = 10

logger = logging.getLogger(__name__)


class BadRowError(ValueError):
    """A row of the data cannot be trained on."""


class BadRows:
    """The bad rows that a process has found. Each counts once, also if it is read in every epoch."""

    def __init__(self, policy: Literal["refuse", "skip"] = "refuse") -> None:
        self._is_skipped = policy == "skip"
        self._found: set[object] = set()
        self._source = ""

    def of_source(self, name: str) -> "BadRows":
        """Those of one of several sources. All are counted together."""
        of_source = BadRows("skip" if self._is_skipped else "refuse")
        of_source._found, of_source._source = self._found, f"{self._source} {name}".strip()
        return of_source

    def count(self, number: int) -> None:
        """Count so many that another process has found; it has named them."""
        self._found.update(("worker", number) for number in range(number))

    def __len__(self) -> int:
        return len(self._found)

    def skip(self, row: object, problem: str) -> None:
        """Count what is left out whatever the policy; the log names the first ones."""
        if (self._source, row) in self._found:
            return
        self._found.add((self._source, row))
        if len(self) <= NUM_NAMED:
            end = "; others are only counted" if len(self) == NUM_NAMED else ""
            logger.warning("skipped %s%s", problem, end)

    def found(self, row: object, problem: str) -> None:
        """Count the bad row of this number or place; the log names the first ones.

        Raises: BadRowError if they are not skipped.
        """
        if not self._is_skipped:
            raise BadRowError(f'{problem}; or set data.bad_rows = "skip"')
        self.skip(row, f"a bad row: {problem}")
