"""MXFP8: e4m3 codes, one power of two for 32 elements along the summed dimension (OCP microscaling formats 1.0).

M rows · N columns · m, n blocks along each

Scales are rounded up, so that no code saturates: the smallest power of two that is not less than amax / 448, as
NVIDIA's Blackwell rounds (`cvt.rp.satfinite.ue8m0x2.f32`) and torchao does there (`RCEIL`). Elsewhere torchao first
rounds the logarithm of amax / 448 in fp32: a quotient a few ulp above a power of two gets that power. All other bits
are torchao's. NaN in a block is NaN afterwards; an infinity stays one.
"""

import torch
from torch import Tensor

from titan_moe.kernels.formats.blocks import Block, divide, join, split

BLOCK = 32
LARGEST = torch.finfo(torch.float8_e4m3fn).max
ONE, INFINITE, NAN = 127, 254, 255
"""Codes of e8m0: 2^0, what an infinity gets, and NaN."""


def scales_of(amax_mn: Tensor) -> Tensor:
    """The e8m0 scale of each block from its largest magnitude."""
    quotients_mn = divide(amax_mn, LARGEST)
    bits_mn = quotients_mn.view(torch.int32)
    exponents_mn = ((bits_mn + 0x7FFFFF) >> 23).masked_fill(bits_mn <= 1 << 22, 0)  # 2^22 are the bits of 2^-127
    exponents_mn = exponents_mn.masked_fill(quotients_mn.isinf(), INFINITE).masked_fill(quotients_mn.isnan(), NAN)
    return exponents_mn.to(torch.uint8).view(torch.float8_e8m0fnu)


def codes_of(x_MN: Tensor, scales_mn: Tensor, block: Block) -> Tensor:
    """Divide by the scales and round."""
    exponents_mn = scales_mn.view(torch.uint8).int()
    factors_mn = ((2 * ONE - exponents_mn).clamp(min=0) << 23).view(torch.float32)
    for exponent, factor in ((0, 1.0), (INFINITE, 2.0**-ONE), (NAN, torch.nan)):
        factors_mn = factors_mn.masked_fill(exponents_mn == exponent, factor)
    scaled_MN = join(split(x_MN, block) * factors_mn[..., :, None, :, None], x_MN)
    return scaled_MN.clamp(-LARGEST, LARGEST).to(torch.float8_e4m3fn)
