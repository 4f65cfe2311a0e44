"""Parameter groups by weight decay and learning rate."""

from collections.abc import Sequence
from typing import Any

from torch import nn

from titan_moe.config import RecipeError
from titan_moe.config.parameter_groups import ParameterGroup, group_of
from titan_moe.config.trainable import unmatched
from titan_moe.parameters import named_kinds, untied_embeddings


def decay_groups(
    model: nn.Module, weight_decay: float, groups: Sequence[ParameterGroup] = (), *, embeddings_decay: bool = True
) -> list[dict[str, Any]]:
    """Split trainable parameters into optimizer groups: matrices decay, scales of norms and biases do not.

    Without `embeddings_decay`, untied embeddings do not decay either. `groups` have their own rate and decay: those of
    the optimizer have `lr_scale`, which a schedule applies. Groups of equal options are one, and empty ones are left
    out.
    """
    undecayed = set() if embeddings_decay else untied_embeddings(model)
    # without groups: those that decay, and the others
    alike: dict[tuple[float, float], list[nn.Parameter]] = {(1.0, weight_decay): [], (1.0, 0.0): []}
    for name, parameter, kind in named_kinds(model):
        if parameter.requires_grad:
            group, decays = group_of(name, groups), kind.is_matrix and name not in undecayed
            own_decay = weight_decay * group.weight_decay_scale if decays else 0.0
            alike.setdefault((group.lr_scale, own_decay), []).append(parameter)
    return [
        {"params": parameters, "weight_decay": own_decay, "lr_scale": lr_scale}
        for (lr_scale, own_decay), parameters in alike.items()
        if parameters
    ]


def check_groups(model: nn.Module, groups: Sequence[ParameterGroup]) -> None:
    """Refuse a group that is of no parameter of the whole model, which may be on the meta device.

    Raises: RecipeError with all problems.
    """
    names = [name for name, _ in model.named_parameters()]
    if problems := list(unmatched(names, tuple(group.parameters for group in groups), "optim.groups")):
        raise RecipeError(problems)
