"""The rotation of RoPE (arXiv:2104.09864) in PyTorch, without norm.

B batch · N sequence · H heads · D head width · P rotated pairs, of the first 2·P elements; the others pass

Physics: memory-bound, compiled one pass in each direction. The tables are fp32, so products are in at least fp32.
"""

import torch
from torch import Tensor


def rotate_halves(x_BNHD: Tensor, cos_NP: Tensor, sin_NP: Tensor) -> Tensor:
    """Rotate pairs made of the first and the second half of a head, or of its rotated share (Llama, Qwen)."""
    wide, rest = _rotated(x_BNHD, cos_NP)
    a, b = wide.chunk(2, dim=-1)
    cos, sin = cos_NP[:, None], sin_NP[:, None]
    return torch.cat([a * cos - b * sin, b * cos + a * sin, *rest], dim=-1).to(x_BNHD.dtype)


def rotate_pairs(x_BNHD: Tensor, cos_NP: Tensor, sin_NP: Tensor) -> Tensor:
    """Rotate neighbouring elements (DeepSeek)."""
    wide, rest = _rotated(x_BNHD, cos_NP)
    a, b = wide.unflatten(-1, (-1, 2)).unbind(-1)
    cos, sin = cos_NP[:, None], sin_NP[:, None]
    rotated = torch.stack([a * cos - b * sin, b * cos + a * sin], dim=-1).flatten(-2)
    return (torch.cat([rotated, *rest], dim=-1) if rest else rotated).to(x_BNHD.dtype)


def _rotated(x_BNHD: Tensor, cos_NP: Tensor) -> tuple[Tensor, list[Tensor]]:
    """The elements that are rotated, in at least fp32, and the others, if any."""
    wide = x_BNHD.to(torch.promote_types(x_BNHD.dtype, torch.float32))
    width = 2 * cos_NP.shape[1]
    return wide[..., :width], [wide[..., width:]] if width < wide.shape[-1] else []
