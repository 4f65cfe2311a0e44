"""Parameters with their own learning rate and weight decay: `[[optim.groups]]`."""

from collections.abc import Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase


@dataclass(frozen=True)
class ParameterGroup:
    """The parameters whose names a pattern matches. Of several groups the first that matches holds."""

    parameters: str = ""
    """A pattern of their names, in which `*` stands for any letters: `"*.router.weight"`, `"layers.0.*"`."""
    lr_scale: float = 1.0
    """Factor on the learning rate of every step, and so on the decay in a step too."""
    weight_decay_scale: float = 1.0
    """Factor on `optim.weight_decay`; norms and biases have no decay in any case."""


REST = ParameterGroup("*")
"""The group of all others."""


def group_of(name: str, groups: Sequence[ParameterGroup]) -> ParameterGroup:
    """The group of a parameter, by its name in the model."""
    return next((group for group in groups if fnmatchcase(name, group.parameters)), REST)
