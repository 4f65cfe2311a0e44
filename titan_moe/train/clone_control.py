"""`parallel.expert_clones = "auto"`: replica slots are used while the ranks of recent steps are imbalanced."""

import json
from collections import deque

from titan_moe.config.clones import PAYS_FROM

WINDOW_STEPS = 16
"""Recent steps whose imbalance is averaged."""
PAYS_NOT_BELOW = 1.1
"""Load of the busiest rank over the mean below which clones cost more than they save. Between this and `PAYS_FROM`
nothing changes."""
STEPS_BETWEEN_CHANGES = 100
"""The least number of steps between two changes: each releases what was recorded."""


class CloneControl:
    """Decide from past steps whether the next one uses replica slots. All ranks decide alike, from reduced numbers."""

    def __init__(self) -> None:
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
        pays = self.mean > PAYS_NOT_BELOW if self.are_used else self.mean > PAYS_FROM
        if pays != self.are_used and len(self.recent) == WINDOW_STEPS and self.steps_to_wait <= 0:
            self.are_used, self.steps_to_wait = pays, STEPS_BETWEEN_CHANGES
        return self.are_used

    def state(self) -> str:
        """The state as JSON."""
        return json.dumps(vars(self) | {"recent": list(self.recent)})

    def load_state(self, state: str) -> None:
        """Go on with the state of an earlier run; an empty string is one without."""
        if state:
            vars(self).update(json.loads(state))
            self.recent = deque(self.recent, maxlen=WINDOW_STEPS)
