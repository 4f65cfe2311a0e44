"""Parameter groups by weight decay."""

from typing import Any

from torch import nn

from titan_moe.parameters import named_kinds, untied_embeddings


def decay_groups(model: nn.Module, weight_decay: float, *, embeddings_decay: bool = True) -> list[dict[str, Any]]:
    """Split trainable parameters into optimizer groups: matrices decay, scales of norms and biases do not.

    Without `embeddings_decay`, untied embeddings do not decay either. Empty groups are left out.
    """
    undecayed = set() if embeddings_decay else untied_embeddings(model)
    decayed: list[nn.Parameter] = []
    others: list[nn.Parameter] = []
    for name, parameter, kind in named_kinds(model):
        if parameter.requires_grad:
            (decayed if kind.is_matrix and name not in undecayed else others).append(parameter)
    groups = [{"params": decayed, "weight_decay": weight_decay}, {"params": others, "weight_decay": 0.0}]
    return [group for group in groups if group["params"]]
