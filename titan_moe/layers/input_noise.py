"""Noise on the input of a router (arXiv:2101.03961), which can be made again from a key of each token.

B batch · N sequence · D width
"""

from typing import Any

import torch
from torch import Tensor

FACTORS = (0x7FEB352D, 0x846CA68B - (1 << 32))
"""Odd factors of a hash of 32 bits."""


class InputNoise:
    """Multiply each number by a factor drawn evenly from 1 - eps to 1 + eps.

    It takes the place of `TopKRouter.noise`. A factor follows from the key of its token and its column alone, so a
    repeated forward has the same factors, and backward makes them again instead of keeping them.
    """

    def __init__(self, keys_BN: Tensor, eps: float) -> None:
        """`keys_BN` are int32."""
        self.keys_BN, self.eps = keys_BN, eps

    def __call__(self, x_BND: Tensor) -> Tensor:
        """In at least fp32, rounded to the dtype of the input."""
        noisy_BND: Tensor = _Multiplied.apply(x_BND, self.keys_BN, self.eps)
        return noisy_BND


class _Multiplied(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x_BND: Tensor, keys_BN: Tensor, eps: float) -> Tensor:
        ctx.save_for_backward(keys_BN)
        ctx.eps = eps
        return _multiply(x_BND, keys_BN, eps)

    @staticmethod
    def backward(ctx: Any, grad_BND: Tensor) -> tuple[Tensor, None, None]:
        (keys_BN,) = ctx.saved_tensors
        return _multiply(grad_BND, keys_BN, ctx.eps), None, None


def _multiply(x_BND: Tensor, keys_BN: Tensor, eps: float) -> Tensor:
    wide = torch.promote_types(x_BND.dtype, torch.float32)
    return (x_BND.to(wide) * factors(keys_BN, x_BND.shape[-1], eps).to(wide)).to(x_BND.dtype)


def factors(keys_BN: Tensor, width: int, eps: float) -> Tensor:
    """fp32 [B, N, D], of 24 random bits each."""
    columns_D = mixed(torch.arange(1, width + 1, dtype=torch.int32, device=keys_BN.device))
    bits_BND = (mixed(keys_BN[..., None] ^ columns_D) >> 8) & 0xFFFFFF
    return 1 + eps * ((bits_BND.float() + 0.5) * 2.0**-23 - 1)


def mixed(x: Tensor) -> Tensor:
    """A hash of int32: each bit of the result depends on all bits."""
    for shift, mask, factor in ((16, 0xFFFF, FACTORS[0]), (15, 0x1FFFF, FACTORS[1])):
        x = (x ^ ((x >> shift) & mask)) * factor
    return x ^ ((x >> 16) & 0xFFFF)
