"""Quantise and dequantise tensors in the formats of `config.formats`.

M rows · N columns · m, n blocks along each

The last two dimensions are those of a matrix; leading ones are separate tensors. `dim` is the dimension that the
product sums over. Blocks are counted from its begin, and an incomplete one at its end counts as if zeros followed.
"""

from collections.abc import Callable
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from titan_moe.config.formats import Format
from titan_moe.kernels.formats import fp8, mxfp8, nvfp4
from titan_moe.kernels.formats.blocks import Block, along, amax, spread

Role = Literal["activation", "weight", "gradient"]
Merge = Callable[[Tensor], Tensor]
"""Largest magnitudes of parts of tensors, [..., m, n] -> those of the whole tensors, in the same shape. Used where a
tensor lies in parts along its rows, for scales that all rows share."""


class Quantized(NamedTuple):
    """A tensor in a low-precision format."""

    codes: Tensor
    """[..., M, N], fp8, or e2m1 in uint8, one a byte."""
    scales: Tensor
    """[..., m, n], what a code is multiplied by: fp32, e8m0 (mxfp8) or e4m3 (nvfp4)."""
    tensor_scale: Tensor | None = None
    """fp32 [..., 1, 1], of nvfp4."""


def block_of(format: Format, role: Role, dim: int, num_dims: int = 2) -> Block:
    """How many rows and columns share a scale.

    Raises: ValueError for a format without scales.
    """
    match format:
        case "fp8_tensorwise":
            return None, None
        case "fp8_rowwise":
            return along(None, dim, num_dims)
        case "fp8_blockwise":
            return (128, 128) if role == "weight" else along(128, dim, num_dims)
        case "mxfp8":
            return along(mxfp8.BLOCK, dim, num_dims)
        case "nvfp4":
            return (nvfp4.BLOCK, nvfp4.BLOCK) if role == "weight" else along(nvfp4.BLOCK, dim, num_dims)
    raise ValueError(f"format {format!r} has no scales")


def dtype_of(format: Format, role: Role) -> torch.dtype:
    """The type of fp8 codes."""
    return torch.float8_e5m2 if (format, role) == ("fp8_tensorwise", "gradient") else torch.float8_e4m3fn


def quantize(
    x_MN: Tensor,
    format: Format,
    role: Role,
    dim: int,
    *,
    merge: Merge | None = None,
    power_of_two_scales: bool = False,
) -> Quantized:
    """Round to codes and scales.

    `power_of_two_scales` rounds the scales of fp8 formats up to powers of two. Gradients in nvfp4 are rounded at random
    (nvfp4.py).

    Raises: ValueError for `compute`, which has no codes.
    """
    x_MN = x_MN.detach().float()
    block = block_of(format, role, dim, x_MN.ndim)
    amax_mn = _merged(amax(x_MN, block), block, merge)
    if format == "mxfp8":
        scales_mn = mxfp8.scales_of(amax_mn)
        return Quantized(mxfp8.codes_of(x_MN, scales_mn, block), scales_mn)
    if format == "nvfp4":
        tensor_scale = nvfp4.tensor_scale_of(_merged(amax(x_MN, (None, None)), (None, None), merge))
        scales_mn = nvfp4.block_scales_of(amax_mn, tensor_scale)
        random_MN = nvfp4.draw(x_MN, dim) if role == "gradient" else None
        codes_MN = nvfp4.codes_of(x_MN, scales_mn, tensor_scale, block, random_MN)
        return Quantized(codes_MN, scales_mn, tensor_scale)
    dtype = dtype_of(format, role)
    scales_mn = fp8.scales_of(amax_mn, dtype, power_of_two_scales)
    return Quantized(fp8.codes_of(x_MN, scales_mn, block, dtype), scales_mn)


def dequantize(quantized: Quantized, format: Format, role: Role, dim: int) -> Tensor:
    """Codes times scales, fp32 [..., M, N]."""
    codes_MN, scales_mn, tensor_scale = quantized
    block = block_of(format, role, dim, codes_MN.ndim)
    if tensor_scale is not None:
        return nvfp4.values_of(codes_MN, scales_mn, tensor_scale, block)
    return codes_MN.float() * spread(scales_mn.float(), codes_MN, block)


def round_to(
    x_MN: Tensor,
    format: Format,
    role: Role,
    dim: int,
    *,
    merge: Merge | None = None,
    power_of_two_scales: bool = False,
) -> Tensor:
    """The nearest representable tensor, in x's dtype; without gradients. `compute` returns x."""
    if format == "compute":
        return x_MN
    quantized = quantize(x_MN, format, role, dim, merge=merge, power_of_two_scales=power_of_two_scales)
    return dequantize(quantized, format, role, dim).to(x_MN.dtype)


def _merged(amax_mn: Tensor, block: Block, merge: Merge | None) -> Tensor:
    return amax_mn if merge is None or block[0] is not None else merge(amax_mn)
