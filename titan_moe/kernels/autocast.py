"""`torch.autocast` for what it does not know: our operations, and products that stay in fp32.

Autocast casts the operands of PyTorch's matrix products. An operation of ours would get rows that such a product made,
in bf16, and weights in fp32; and it would round the router's logits. fp64 is never cast, as in PyTorch.
"""

import torch
from torch import Tensor


def autocast_dtype(x: Tensor) -> torch.dtype | None:
    """The dtype of matrix products under `torch.autocast` on the device of `x`; None outside of it."""
    if x.is_meta or not torch.is_autocast_enabled(x.device.type):
        return None
    return torch.get_autocast_dtype(x.device.type)


def as_operand(x: Tensor) -> Tensor:
    """The operand of a matrix product: `x` in autocast's dtype, or as it is. Differentiable."""
    dtype = autocast_dtype(x)
    is_cast = dtype is not None and x.is_floating_point() and x.dtype != torch.float64 and x.itemsize > 1  # no codes
    return x.to(dtype) if is_cast else x
