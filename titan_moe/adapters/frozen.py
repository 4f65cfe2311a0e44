"""Freeze the parameters of a model that a recipe does not train.

Frozen parameters are in compute's dtype: there is no master whose digits a later step needs. Autograd computes no
gradient of theirs, FSDP gathers them and reduces nothing, and the optimizer does not know them.
"""

import torch
from torch import nn

from titan_moe.config import RecipeError
from titan_moe.config.trainable import Patterns, trains, unmatched


def freeze(model: nn.Module, patterns: Patterns, dtype: torch.dtype) -> None:
    """Freeze all parameters whose names match none of the patterns, in place; nothing without patterns. The model may
    be on the meta device, and is not sharded yet.

    Raises: RecipeError for a pattern that matches no parameter.
    """
    if not patterns:
        return
    names = [name for name, _ in model.named_parameters()]
    if problems := list(unmatched(names, patterns)):
        raise RecipeError(problems)
    for name, parameter in model.named_parameters():
        if not trains(name, patterns):
            parameter.requires_grad_(False)
            parameter.data = parameter.data.to(dtype)
