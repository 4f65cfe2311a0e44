"""How far a run is, as its checkpoints have it."""

import json
from collections.abc import Iterable
from typing import Any

from titan_moe.training.controller import NamedState

EARLIER_FIELDS = {"capacity": "factor", "skips": "num_in_row"}
"""Fields that checkpoints of earlier versions have as bare numbers (`checkpoint.storage.EARLIER_NAMES`)."""


class Progress:
    """Steps and tokens of a run so far, and the states of what adapts over its steps, each as JSON under its name."""

    def __init__(self, states: Iterable[NamedState] = ()) -> None:
        self.step = 0
        self.tokens_seen = 0
        self.states = {state.name: state for state in states}

    def state_dict(self) -> dict[str, Any]:
        states = {name: json.dumps(state.state_dict()) for name, state in self.states.items()}
        return {"step": self.step, "tokens_seen": self.tokens_seen, **states}

    def load_state_dict(self, saved: dict[str, Any]) -> None:
        self.step, self.tokens_seen = saved["step"], saved["tokens_seen"]
        for name, state in self.states.items():
            value = saved[name]
            if not isinstance(value, str):
                state.load_state_dict({EARLIER_FIELDS[name]: value})
            elif value:  # earlier versions have an empty one where nothing adapts
                state.load_state_dict(json.loads(value))
