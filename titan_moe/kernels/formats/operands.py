"""The operands of the three GEMMs of a linear layer, rounded.

T tokens · I input width · O output width

Each GEMM rounds both of its operands along the dimension that it sums over, so one tensor is rounded twice, in two
ways: x along I for y = x · Wᵀ, and along T for dW = dyᵀ · x. Values come back in fp32 (fp64 for fp64): a product of
them, summed in fp32, is what hardware with this format computes, up to the order of its sums.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from titan_moe.config.formats import Format
from titan_moe.kernels.formats.blocks import pad_to_multiple
from titan_moe.kernels.formats.casts import Merge, Role, round_to
from titan_moe.kernels.formats.fused_rounding import amax_to_merge, round_to_format
from titan_moe.kernels.formats.nvfp4 import BLOCK, random_hadamard


class Rounding(NamedTuple):
    """How a GEMM rounds."""

    format: Format
    power_of_two_scales: bool = False
    merge: Merge | None = None
    """For x and dy, where a tensor lies in parts along its tokens."""
    in_triton: bool = False
    """By one kernel, on a GPU; the bits are the same."""


def round_fprop(x_TI: Tensor, weight_OI: Tensor, how: Rounding) -> tuple[Tensor, Tensor]:
    """x and W, to be summed over I."""
    return _round(x_TI, "activation", -1, how), _round(weight_OI, "weight", -1, how)


def round_dgrad(grad_TO: Tensor, weight_OI: Tensor, how: Rounding) -> tuple[Tensor, Tensor]:
    """dy and W, to be summed over O."""
    return _round(grad_TO, "gradient", -1, how), _round(weight_OI, "weight", -2, how)


def round_wgrad(grad_TO: Tensor, x_TI: Tensor, how: Rounding) -> tuple[Tensor, Tensor]:
    """dy and x, to be summed over T; in nvfp4 transformed, and with zeros behind T up to a multiple of 16."""
    is_transformed = how.format == "nvfp4"
    return _round(grad_TO, "gradient", -2, how, is_transformed), _round(x_TI, "activation", -2, how, is_transformed)


def _round(x: Tensor, role: Role, dim: int, how: Rounding, is_transformed: bool = False) -> Tensor:
    merge = None if role == "weight" else how.merge
    if how.in_triton and how.format != "compute":
        amax = None if merge is None else amax_to_merge(x, how.format, role, dim, is_transformed=is_transformed)
        amax = amax if amax is None or merge is None else merge(amax)
        return round_to_format(x, how.format, role, dim, amax, how.power_of_two_scales, is_transformed=is_transformed)
    if is_transformed:
        x = random_hadamard(pad_to_multiple(x, BLOCK, dim), dim)
    wide = x.to(torch.promote_types(x.dtype, torch.float32))
    return round_to(wide, how.format, role, dim, merge=merge, power_of_two_scales=how.power_of_two_scales)
