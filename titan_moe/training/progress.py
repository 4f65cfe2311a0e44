"""How far a run is, as its checkpoints have it."""

import json
from collections.abc import Iterable
from typing import Any

from titan_moe.training.controller import Adapting

EARLIER_FIELDS = {"capacity": "factor", "skips": "num_in_row"}
"""Fields that checkpoints of earlier versions have as bare numbers (`checkpoint.storage.EARLIER_NAMES`)."""


class Progress:
    """Steps and tokens of a run so far, and the states of what adapts over its steps, each as JSON under its name."""

    def __init__(self, adapting: Iterable[Adapting] = ()) -> None:
        self.step = 0
        self.tokens_seen = 0
        self.adapting = {each.name: each for each in adapting}

    def state_dict(self) -> dict[str, Any]:
        states = {name: json.dumps(each.state_dict()) for name, each in self.adapting.items()}
        return {"step": self.step, "tokens_seen": self.tokens_seen, **states}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.step, self.tokens_seen = state["step"], state["tokens_seen"]
        for name, each in self.adapting.items():
            value = state[name]
            if not isinstance(value, str):
                each.load_state_dict({EARLIER_FIELDS[name]: value})
            elif value:  # earlier versions have an empty one where nothing adapts
                each.load_state_dict(json.loads(value))
