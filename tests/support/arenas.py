"""A layer's tensors within those of several layers."""

import torch
from torch import Tensor

ROW, SLOT = 5, 9
ROOM = 7
"""Entries past the layer's."""


def base(device: str) -> Tensor:
    """First row and first slot of the layer."""
    return torch.tensor([ROW, SLOT], device=device)


def surround(x: Tensor, begin: int) -> Tensor:
    """x from entry `begin` on, and NaN around it."""
    arena = x.new_full((begin + len(x) + ROOM, *x.shape[1:]), float("nan"))
    arena[begin : begin + len(x)] = x
    return arena


def same_bits(actual: Tensor, expected: Tensor) -> bool:
    """Equal, NaN where NaN."""
    return torch.equal(actual.nan_to_num(-1e9), expected.nan_to_num(-1e9))
