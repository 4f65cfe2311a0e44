"""Parameter groups by weight decay."""

from typing import Any

from torch import nn

from titan_moe.parameters import named_kinds


def decay_groups(model: nn.Module, weight_decay: float) -> list[dict[str, Any]]:
    """Split trainable parameters into optimizer groups: matrices decay, scales of norms and biases do not.

    Empty groups are left out.
    """
    trainable = [(parameter, kind) for _, parameter, kind in named_kinds(model) if parameter.requires_grad]
    decayed = [parameter for parameter, kind in trainable if kind.is_matrix]
    others = [parameter for parameter, kind in trainable if not kind.is_matrix]
    groups = [{"params": decayed, "weight_decay": weight_decay}, {"params": others, "weight_decay": 0.0}]
    return [group for group in groups if group["params"]]
