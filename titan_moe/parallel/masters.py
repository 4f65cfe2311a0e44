"""What parameters have beside their values: gradients in another dtype, and the remainders of split masters."""

import torch
from torch import nn

from titan_moe.config.precision import PrecisionConfig
from titan_moe.parallel import fsdp
from titan_moe.parameters import give_remainder


def apply(part: nn.Module, precision: PrecisionConfig) -> None:
    """Prepare the parameters of a part, which are on their device and not initialised yet."""
    if precision.gradients_dtype != precision.parameters:
        fsdp.keep_gradients_in(part, fsdp.DTYPES[precision.gradients_dtype])
    if precision.has_split_masters:
        for parameter in part.parameters():
            if parameter.requires_grad:
                give_remainder(parameter, torch.zeros_like(parameter, dtype=torch.int16, requires_grad=False))
