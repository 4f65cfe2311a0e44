"""An action of a pipeline rank."""

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
    def frees(self) -> bool:
        """Whether it is the last that needs the activations of its stage and microbatch."""
        return self.kind in ("backward", "backward_weight")
