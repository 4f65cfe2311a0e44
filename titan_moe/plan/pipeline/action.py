"""The actions of a pipeline rank, alone and in pairs."""

from collections.abc import Iterable, Iterator
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
        return self.kind.startswith(("send", "receive"))

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
    return (action for listed in actions for action in actions_in(listed))
