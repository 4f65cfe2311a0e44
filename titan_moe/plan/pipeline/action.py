"""The actions of a pipeline rank, alone and in pairs."""

from collections.abc import Collection, Iterable, Iterator, Sequence
from typing import Literal, NamedTuple

Kind = Literal[
    "forward",
    "backward",
    "backward_input",
    "backward_weight",
    "send_activation",
    "receive_activation",
    "send_gradient",
    "receive_gradient",
]

MESSAGES = frozenset({"send_activation", "receive_activation", "send_gradient", "receive_gradient"})
SENT = {"send_activation": ("receive_activation", 1), "send_gradient": ("receive_gradient", -1)}
"""What receives a message, and on which stage, from that of the sender."""
WAITS_FOR = {"forward": "receive_activation", "backward": "receive_gradient", "backward_input": "receive_gradient"}
"""The message that an action needs, if its rank receives one. Between stages of one rank `needs_of` says the rest."""
BACKWARDS = "backward", "backward_input"
"""The actions that compute gradients of activations."""
KEPT_SENDS = 4
"""Sent tensors that a rank keeps. Before a further send it waits for the oldest one, and uses its buffer."""


class Action(NamedTuple):
    """One action of a rank's list. `backward` is whole: `backward_input` and `backward_weight` together."""

    kind: Kind
    stage: int  # of a message the one that sends or receives
    microbatch: int

    @property
    def is_message(self) -> bool:
        """Whether it sends or receives."""
        return self.kind in MESSAGES

    @property
    def delays(self) -> bool:
        """Whether weight gradients of its stage and microbatch are computed later."""
        return self.kind == "backward_input"

    @property
    def frees(self) -> bool:
        """Whether it is the last that needs the activations of its stage and microbatch, whose gradients are complete
        after it."""
        return self.kind in ("backward", "backward_weight")


class Pair(NamedTuple):
    """A forward and a whole backward that need nothing of each other, and that a rank runs together, piece by piece.

    It begins when both can, and what they send is sent after both.
    """

    forward: Action
    backward: Action


def actions_in(listed: Action | Pair) -> tuple[Action, ...]:
    """The action, or both of a pair, the forward first."""
    return (listed,) if isinstance(listed, Action) else tuple(listed)


def flat(actions: Iterable[Action | Pair]) -> Iterator[Action]:
    """All actions, with those of a pair one after the other."""
    for listed in actions:
        if isinstance(listed, Action):
            yield listed
        else:
            yield from listed


def needs_of(action: Action, known: Collection[Action], last_stage: int) -> list[Action]:
    """What an action waits for: where one of several things will do, the first that is known."""
    kind, stage, microbatch = action
    if kind == "backward_weight":
        return [Action("backward_input", stage, microbatch)]
    if kind == "forward":
        before = [Action("send_activation", stage - 1, microbatch), Action("forward", stage - 1, microbatch)]
        return _first_known(before, known) if stage > 0 else []
    if kind not in BACKWARDS:
        return []
    after = [Action(kind, stage + 1, microbatch) for kind in ("send_gradient", "backward", "backward_input")]
    return [Action("forward", stage, microbatch), *(_first_known(after, known) if stage < last_stage else [])]


def _first_known(choices: Sequence[Action], known: Collection[Action]) -> list[Action]:
    """The first that is known; another one is waited for in vain."""
    return [next((choice for choice in choices if choice in known), choices[0])]
