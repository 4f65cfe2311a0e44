"""Read the data of a step before the step is taken, so that all ranks stop together if one of them cannot read its.

The batch of a step is read one step early. Then the flag of a rank that failed reaches the others with the stop signals
(process.py), which are exchanged while a step runs: without another exchange, and before any rank begins the step.
"""

from collections.abc import Callable
from typing import TypeVar

import torch
import torch.distributed as dist

from titan_moe.config import RecipeError
from titan_moe.data.bad_rows import BadRowError
from titan_moe.data.loader import Loader

Result = TypeVar("Result")


class UnreadableDataError(Exception):
    """A rank cannot read its data. Raised on all ranks at the same place."""


class ReadAhead:
    """The data of a run's remaining steps on this rank."""

    def __init__(self, loader: Loader, num_steps: int) -> None:
        self._loader, self._num_left = loader, num_steps
        self.error: Exception | None = None
        """Why this rank cannot read on. What was read before is good, and so is the loader's state."""

    def read(self) -> bool:
        """Read the batch of one more step, if there is one; returns whether this rank cannot."""
        if self.error is None and self._num_left > 0:
            try:
                self._loader.read_ahead()
            except Exception as error:  # of any type: the steps before are whole, and can be saved
                self.error = error
            self._num_left -= 1
        return self.error is not None

    def read_together(self, read: Callable[[], Result]) -> Result:
        """Read other data now. Collective.

        Raises: UnreadableDataError on all ranks if any of them fails.
        """
        result = None
        try:
            result = read()
        except Exception as error:
            self.error = error
        has_failed = torch.tensor(self.error is not None, dtype=torch.int32)
        dist.all_reduce(has_failed)
        if has_failed or result is None:
            raise UnreadableDataError
        return result

    def describe(self, group: dist.ProcessGroup) -> tuple[str, bool]:
        """Say on all ranks why some cannot read on, and whether it is a bad row, whose repair changes the data.
        Collective."""
        found: list[tuple[str, bool]] = [("", False)] * dist.get_world_size(group)
        own = ("", False) if self.error is None else (_words(self.error), isinstance(self.error, BadRowError))
        dist.all_gather_object(found, own, group=group)
        return "; ".join(dict.fromkeys(words for words, _ in found if words)), any(is_row for _, is_row in found)

    def fail(self, problem: str) -> None:
        """End the run with this problem, or with the error of this rank if it is none of the data.

        Raises: RecipeError, or that error.
        """
        if self.error is None or isinstance(self.error, (ValueError, OSError)):
            raise RecipeError([problem]) from self.error
        raise self.error


def _words(error: Exception) -> str:
    return str(error) if isinstance(error, (ValueError, OSError)) else f"{type(error).__name__}: {error}"
