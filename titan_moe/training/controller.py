"""What adapts over the steps of a run: one list that steps follow on the device, and one that the host follows."""

from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Any, NamedTuple

from torch import Tensor


class Changes(NamedTuple):
    """How the next steps differ from what the recipe says; None: as it says."""

    capacity_factor: float | None = None  # the bound of rows; 0 lifts it
    layer_factor: float | None = None  # the bound of each layer in an arena; 0 lifts both
    uses_clones: bool | None = None
    reason: str = ""


class NamedState(ABC):
    """State that a run's checkpoints have under a name. All ranks adapt alike, from reduced numbers."""

    name: str

    @abstractmethod
    def state_dict(self) -> dict[str, Any]:
        """The state as plain data. Waits for the device."""

    @abstractmethod
    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on with the state of an earlier run."""


class Controller(NamedState):
    """Follows steps on the host, which reads their metrics after each."""

    @property
    def changes(self) -> Changes:
        """For the next step."""
        return Changes()

    @property
    def summary(self) -> str:
        """What a user should know at the end of a run; may be empty."""
        return ""

    @abstractmethod
    def follow(self, metrics: Mapping[str, float]) -> Changes:
        """Take note of a step with finite gradients, and return `changes`."""


class DeviceController(NamedState):
    """Follows steps on the device, within them: the host reads nothing, and a CUDA graph repeats it."""

    @property
    @abstractmethod
    def counts(self) -> dict[str, Tensor]:
        """Scalars on the device, by the names of metrics."""

    @abstractmethod
    def follow(self, metrics: Mapping[str, Tensor]) -> Tensor:
        """Take note of a step before its update. Returns whether it must change nothing: a bool on the device."""
