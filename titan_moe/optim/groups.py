"""Sort parameters by what weight decay may touch."""

from typing import Any

from torch import nn

from titan_moe.parameters import named_kinds


def decay_groups(model: nn.Module, weight_decay: float) -> list[dict[str, Any]]:
    """Split the parameters that want a gradient into optimizer groups: matrices decay, scales and biases do not.

    A norm's scale and a bias set a level that decay would only pull away from. A group without members is left out.
    """
    decayed: list[nn.Parameter] = []
    spared: list[nn.Parameter] = []
    for _, parameter, kind in named_kinds(model):
        if parameter.requires_grad:
            (decayed if kind.is_matrix else spared).append(parameter)
    groups = [{"params": decayed, "weight_decay": weight_decay}, {"params": spared, "weight_decay": 0.0}]
    return [group for group in groups if group["params"]]
