"""`parallel.expert_clones = "auto"`: replica slots are used while the ranks of recent steps are imbalanced."""

import json
from collections import deque

WINDOW_STEPS = 16
"""Recent steps whose imbalance is averaged."""
HYSTERESIS = 0.05
"""So far below the load from which clones pay, replica slots in use stay in use."""
STEPS_BETWEEN_CHANGES = 100
"""The least number of steps between two changes: each releases what was recorded."""


class CloneControl:
    """Decide from past steps whether the next one uses replica slots. All ranks decide alike, from reduced numbers."""

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

    def follow(self, imbalance: float) -> bool:
        """Take note of a step's load of the busiest rank over the mean, as if there were no clones, and decide whether
        the next step uses replica slots: `are_used`."""
        self.recent.append(imbalance)
        self.steps_to_wait -= 1
        pays = self.mean > self.pays_from - (HYSTERESIS if self.are_used else 0.0)
        if pays != self.are_used and len(self.recent) == WINDOW_STEPS and self.steps_to_wait <= 0:
            self.are_used, self.steps_to_wait = pays, STEPS_BETWEEN_CHANGES
        return self.are_used

    def state(self) -> str:
        """The state as JSON."""
        recent = list(self.recent)
        return json.dumps({"are_used": self.are_used, "recent": recent, "steps_to_wait": self.steps_to_wait})

    def load_state(self, state: str) -> None:
        """Go on with the state of an earlier run; an empty string is one without."""
        if state:
            vars(self).update(json.loads(state))
            self.recent = deque(self.recent, maxlen=WINDOW_STEPS)
