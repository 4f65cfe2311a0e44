"""`parallel.expert_clones = "auto"`: replica slots are used while the ranks of recent steps are imbalanced."""

from collections import deque
from collections.abc import Mapping
from typing import Any

from titan_moe.training.controller import Changes, Controller

WINDOW_STEPS = 16
"""Recent steps whose imbalance is averaged."""
HYSTERESIS = 0.05
"""So far below the load from which clones pay, replica slots in use stay in use."""
STEPS_BETWEEN_CHANGES = 100
"""The least number of steps between two changes: each releases what was recorded."""


class CloneControl(Controller):
    """Decide from past steps whether the next one uses replica slots."""

    name = "clones"

    def __init__(self, pays_from: float) -> None:
        """`pays_from` is the load of the busiest rank over the mean from which clones save more than they cost."""
        self.pays_from = pays_from
        self.are_used = False
        self.recent: deque[float] = deque(maxlen=WINDOW_STEPS)
        self.steps_to_wait = 0

    @property
    def mean(self) -> float:
        """The imbalance of recent steps; 1 before the first."""
        return sum(self.recent) / len(self.recent) if self.recent else 1.0

    @property
    def changes(self) -> Changes:
        reason = f"the busiest rank had {self.mean:.3g} times the mean load in recent steps"
        return Changes(uses_clones=self.are_used, reason=reason)

    def follow(self, metrics: Mapping[str, float]) -> Changes:
        """Take note of a step's load of the busiest rank over the mean, as if there were no clones."""
        self.recent.append(metrics["imbalance"])
        self.steps_to_wait -= 1
        pays = self.mean > self.pays_from - (HYSTERESIS if self.are_used else 0.0)
        if pays != self.are_used and len(self.recent) == WINDOW_STEPS and self.steps_to_wait <= 0:
            self.are_used, self.steps_to_wait = pays, STEPS_BETWEEN_CHANGES
        return self.changes

    def state_dict(self) -> dict[str, Any]:
        return {"are_used": self.are_used, "recent": list(self.recent), "steps_to_wait": self.steps_to_wait}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        vars(self).update(state)
        self.recent = deque(self.recent, maxlen=WINDOW_STEPS)
