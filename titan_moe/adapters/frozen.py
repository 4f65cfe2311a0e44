"""Freeze the parameters of a model that a recipe does not train.

Frozen parameters are in compute's dtype, or codes (stored.py): there is no master whose digits a later step needs.
Autograd computes no gradient of theirs, FSDP gathers those that a rank does not have whole and reduces nothing, and
the optimizer does not know them.
"""

import torch
from torch import nn

from titan_moe.config import RecipeError
from titan_moe.config.trainable import NOTHING, Patterns, trains, unmatched
from titan_moe.kernels.formats.stored import CODES
from titan_moe.parameters import DTYPE_OF_NUMBERS, ParameterKind, named_kinds, names_of_codes


def freeze(model: nn.Module, patterns: Patterns, dtype: torch.dtype, *, has_adapters: bool = False) -> None:
    """Freeze all parameters whose names match none of the patterns, in place; without patterns all but adapters, or
    nothing where there are none. The model may be on the meta device, and is not sharded yet.

    Raises: RecipeError for a pattern that matches no parameter.
    """
    if not patterns and not has_adapters:
        return
    names = [name for name, _ in model.named_parameters()]
    if problems := list(unmatched(names, patterns)):
        raise RecipeError(problems)
    codes = names_of_codes(model)
    for module in model.modules():
        if getattr(module, "has_codes", ()):
            vars(module)[DTYPE_OF_NUMBERS] = dtype
    for name, parameter, kind in list(named_kinds(model)):
        if kind is ParameterKind.SCALES_OF_CODES:
            parameter.requires_grad_(False)
        elif not kind.is_factor and not trains(name, patterns or NOTHING):
            parameter.requires_grad_(False)
            parameter.data = parameter.data.to(CODES if name in codes else dtype)
