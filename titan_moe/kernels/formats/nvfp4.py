"""NVFP4: e2m1 codes, one e4m3 scale for a block, one fp32 scale a tensor (arXiv:2509.25149).

M rows · N columns · m, n blocks along each

A block is 16 elements along the summed dimension, and 16 x 16 of weights, so that forward and backward read the same
rounded weight. The bits are those of torchao's `nvfp4_quantize` where it has them: it knows no square blocks and no
stochastic rounding on other devices than Blackwell.

Stochastic rounding takes its random bits from Philox, whose counter is the content of a block of 16. There is no seed
and no state: a recomputed or replayed step draws new bits if its numbers are new, and the same ones if they are not.
Equal blocks draw equal bits, in every layer, step and run, and wherever they lie: the gradient of a token is rounded
the same on any rank. The rounding of blocks that repeat exactly thus does not average out; gradients of training hardly
repeat, and zeros are exact. (Blocks along tokens hold 16 of them, so they depend on the order of an expert's tokens.)
A block's largest numbers are clamped where its e4m3 scale was rounded down, as torchao does; only there the expected
result is not the number itself.

The random Hadamard transform mixes 16 elements along the summed dimension of both operands, x -> H · D · x with random
signs D. It is orthogonal, so the product is unchanged; outliers are spread over their block.
"""

import torch
from torch import Tensor

from titan_moe.kernels.formats.blocks import Block, divide, is_rows, join, split, spread
from titan_moe.kernels.optim.stochastic_rounding import WORD, philox_reference

BLOCK = 16
E2M1_MAX = 6.0
"""Magnitudes are 0, 0.5, 1, 1.5, 2, 3, 4 and 6, codes 0 to 7; 8 is the sign."""
E4M3 = torch.finfo(torch.float8_e4m3fn)
MIN_TENSOR_SCALE = 2.0**-119
"""Its reciprocal, divided by the smallest block scale, is finite."""
NEGATIVE_SIGNS = 0b1101_0111_1110_1000
"""D, a bit for each of 16 elements. One fixed vector for all layers and steps (arXiv:2509.25149, section 4.2), the one
of TransformerEngine."""
LANE_FACTOR = 0x1E3779B97F4A7C15
"""Odd, so that no multiple of it by an odd number loses bits modulo 2^64."""


def tensor_scale_of(amax: Tensor) -> Tensor:
    """The fp32 scale of a tensor from its largest magnitude: block scales then end at e4m3's largest."""
    return divide(amax, E4M3.max * E2M1_MAX).clamp(min=MIN_TENSOR_SCALE)


def block_scales_of(amax_mn: Tensor, tensor_scale: Tensor) -> Tensor:
    """The e4m3 scale of each block from its largest magnitude."""
    return (divide(amax_mn, E2M1_MAX) / tensor_scale).clamp(E4M3.tiny, E4M3.max).to(torch.float8_e4m3fn)


def codes_of(
    x_MN: Tensor, scales_mn: Tensor, tensor_scale: Tensor, block: Block, random_MN: Tensor | None = None
) -> Tensor:
    """Divide by both scales and round, to nearest even or with the given random numbers; uint8, one code a byte."""
    factors_mn = tensor_scale.reciprocal() / scales_mn.float()
    scaled_MN = join(split(x_MN, block) * factors_mn[..., :, None, :, None], x_MN)
    return to_e2m1(scaled_MN.clamp(-E2M1_MAX, E2M1_MAX), random_MN)


def values_of(codes_MN: Tensor, scales_mn: Tensor, tensor_scale: Tensor, block: Block) -> Tensor:
    """Codes times both scales, fp32."""
    return from_e2m1(codes_MN) * spread(scales_mn.float() * tensor_scale, codes_MN, block)


def to_e2m1(x: Tensor, random: Tensor | None = None) -> Tensor:
    """Round numbers of at most 6 to codes, to nearest even, or up where the dropped fraction exceeds `random`."""
    magnitude = x.abs()
    is_over_2, is_over_4 = magnitude >= 2, magnitude >= 4
    steps = magnitude / torch.where(is_over_4, 2.0, torch.where(is_over_2, 1.0, 0.5))  # exact
    rounded = steps.round() if random is None else steps.floor() + (random < steps - steps.floor())
    return (rounded + 2 * is_over_2 + 2 * is_over_4 + 8 * x.signbit()).to(torch.uint8)


def from_e2m1(codes: Tensor) -> Tensor:
    """The numbers of codes, fp32."""
    code = (codes & 7).float()
    magnitude = torch.where(code < 4, code / 2, torch.where(code < 6, code - 2, 2 * code - 8))
    return torch.where(codes < 8, magnitude, -magnitude)


def draw(x_MN: Tensor, dim: int) -> Tensor:
    """A number in [0, 1) for each element, a function of its block along `dim`; multiples of 2^-24."""
    block = (BLOCK, 1) if is_rows(dim, x_MN.ndim) else (1, BLOCK)
    content = split(x_MN.float(), block).movedim(-3, -2).flatten(-2)  # [..., m, n, 16]
    bits = content.contiguous().view(torch.int32).long()
    lane = torch.arange(BLOCK, device=x_MN.device)
    key = (bits * (LANE_FACTOR * (2 * lane + 1))).sum(-1, keepdim=True)
    quarter = torch.arange(BLOCK // 4, device=x_MN.device).expand(*key.shape[:-1], -1)
    counter = key & WORD, key >> 32 & WORD, quarter, torch.zeros_like(quarter)
    words = torch.cat(philox_reference(0, counter), dim=-1)
    random = (words >> 8).float() * 2.0**-24
    return join(random.unflatten(-1, block).movedim(-2, -3), x_MN)


def random_hadamard(x_MN: Tensor, dim: int) -> Tensor:
    """Transform blocks of 16 along `dim`, whose length must be a multiple of 16, and round to x's dtype.

    H is Sylvester's, with rows of length 1. Sums have a fixed order, so devices agree to the bit.
    """
    rows = is_rows(dim, x_MN.ndim)
    last = (x_MN.mT if rows else x_MN).to(torch.promote_types(x_MN.dtype, torch.float32)).unflatten(-1, (-1, BLOCK))
    lane = torch.arange(BLOCK, device=x_MN.device)
    mixed = last * (1 - 2 * (torch.full_like(lane, NEGATIVE_SIGNS) >> lane & 1))
    for half in (1, 2, 4, 8):
        left, right = mixed.unflatten(-1, (-1, 2, half)).unbind(-2)
        mixed = torch.stack([left + right, left - right], dim=-2).flatten(-3)
    mixed = (mixed / BLOCK**0.5).flatten(-2).to(x_MN.dtype)
    return mixed.mT if rows else mixed
