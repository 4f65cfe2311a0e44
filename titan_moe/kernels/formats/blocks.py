"""Blocks of elements that share a scale, in the last two dimensions of a tensor.

M rows · N columns · m, n blocks along each
"""

import torch
import torch.nn.functional as F
from torch import Tensor

Block = tuple[int | None, int | None]
"""Rows and columns of a block; None is all of them."""


def is_rows(dim: int, num_dims: int) -> bool:
    """Whether `dim` is the rows' dimension, the last but one.

    Raises: ValueError for a dimension that is not one of the last two.
    """
    if dim % num_dims < num_dims - 2:
        raise ValueError(f"dim = {dim} of {num_dims} dimensions: the summed dimension must be one of the last two")
    return dim % num_dims == num_dims - 2


def along(length: int | None, dim: int, num_dims: int) -> Block:
    """Blocks of `length` elements along `dim`, one element wide."""
    return (length, 1) if is_rows(dim, num_dims) else (1, length)


def split(x_MN: Tensor, block: Block) -> Tensor:
    """View as [..., m, rows of a block, n, columns of a block], with zeros behind incomplete blocks."""
    rows, columns = _sizes(x_MN, block)
    padded = F.pad(x_MN, (0, -x_MN.shape[-1] % columns, 0, -x_MN.shape[-2] % rows))
    return padded.unflatten(-2, (-1, rows)).unflatten(-1, (-1, columns))


def join(x: Tensor, like_MN: Tensor) -> Tensor:
    """The inverse of `split`."""
    return x.flatten(-2).flatten(-3, -2)[..., : like_MN.shape[-2], : like_MN.shape[-1]]


def amax(x_MN: Tensor, block: Block) -> Tensor:
    """Largest magnitude of each block, fp32 [..., m, n]."""
    return split(x_MN, block).abs().amax((-3, -1)).float()


def spread(scales_mn: Tensor, like_MN: Tensor, block: Block) -> Tensor:
    """Each element's scale."""
    rows, columns = _sizes(like_MN, block)
    spread_MN = scales_mn.repeat_interleave(rows, -2).repeat_interleave(columns, -1)
    return spread_MN[..., : like_MN.shape[-2], : like_MN.shape[-1]]


def pad_to_multiple(x_MN: Tensor, multiple: int, dim: int) -> Tensor:
    """Append zeros along `dim`."""
    missing = -x_MN.shape[dim] % multiple
    return F.pad(x_MN, (0, 0, 0, missing) if is_rows(dim, x_MN.ndim) else (0, missing))


def divide(x: Tensor, number: float) -> Tensor:
    """The quotient of IEEE 754. By a Python number, a GPU would multiply by its reciprocal."""
    return x / torch.full((), number, dtype=x.dtype, device=x.device)


def power_of_two_above(scales: Tensor) -> Tensor:
    """The smallest power of two that is not less, for positive normal fp32 numbers; others stay as they are."""
    powers = ((scales.view(torch.int32) + 0x7FFFFF) & ~0x7FFFFF).view(torch.float32)
    return torch.where(scales.isfinite(), powers, scales)


def _sizes(x_MN: Tensor, block: Block) -> tuple[int, int]:
    rows, columns = x_MN.shape[-2:]
    return max(rows, 1) if block[0] is None else block[0], max(columns, 1) if block[1] is None else block[1]
