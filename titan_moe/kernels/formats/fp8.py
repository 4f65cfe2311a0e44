"""FP8 with fp32 scales: e4m3 and e5m2 (arXiv:2209.05433).

M rows · N columns · m, n blocks along each

scale = amax / largest code, at least the smallest normal number, and 1 for zeros; code = x · (1 / scale), clamped,
rounded to nearest even. Both divisions are those of IEEE 754. NaN in a block is NaN afterwards, as is an infinity.
"""

import torch
from torch import Tensor

from titan_moe.kernels.formats.blocks import Block, divide, join, power_of_two_above, split

MIN_SCALE = torch.finfo(torch.float32).tiny


def scales_of(amax_mn: Tensor, dtype: torch.dtype, power_of_two_scales: bool) -> Tensor:
    """The fp32 scale of each block from its largest magnitude."""
    scales_mn = divide(amax_mn, torch.finfo(dtype).max).clamp(min=MIN_SCALE)
    scales_mn = scales_mn.masked_fill(amax_mn == 0, 1.0)
    return power_of_two_above(scales_mn) if power_of_two_scales else scales_mn


def codes_of(x_MN: Tensor, scales_mn: Tensor, block: Block, dtype: torch.dtype) -> Tensor:
    """Divide by the scales and round."""
    scaled = split(x_MN, block) * scales_mn.reciprocal()[..., :, None, :, None]
    largest = torch.finfo(dtype).max
    return join(scaled.clamp(-largest, largest), x_MN).to(dtype)
