"""The rotation of RoPE (arXiv:2104.09864) in PyTorch, without norm.

B batch · N sequence · H heads · R rotated width of a head

Physics: memory-bound, compiled one pass in each direction. The tables are fp32, so products are in at least fp32.
"""

import torch
from torch import Tensor


def rotate_halves(x_BNHR: Tensor, cos_NR: Tensor, sin_NR: Tensor) -> Tensor:
    """Rotate pairs made of the first and the second half of a head (Llama, Qwen)."""
    a, b = _wide(x_BNHR).chunk(2, dim=-1)
    cos, sin = cos_NR[:, None], sin_NR[:, None]
    return torch.cat([a * cos - b * sin, b * cos + a * sin], dim=-1).to(x_BNHR.dtype)


def rotate_pairs(x_BNHR: Tensor, cos_NR: Tensor, sin_NR: Tensor) -> Tensor:
    """Rotate neighbouring elements (DeepSeek)."""
    a, b = _wide(x_BNHR).unflatten(-1, (-1, 2)).unbind(-1)
    cos, sin = cos_NR[:, None], sin_NR[:, None]
    return torch.stack([a * cos - b * sin, b * cos + a * sin], dim=-1).flatten(-2).to(x_BNHR.dtype)


def _wide(x: Tensor) -> Tensor:
    return x.to(torch.promote_types(x.dtype, torch.float32))
