"""MXFP8: e4m3 codes, one power of two for 32 elements along the summed dimension (OCP microscaling formats 1.0).

torchao defines the bits. Scales are rounded up (`RCEIL`), as NVIDIA's Blackwell does, so that no code saturates.
"""

import torch
from torch import Tensor

from titan_moe.kernels.formats.blocks import is_rows, pad_to_multiple

BLOCK = 32


def quantize_mxfp8(x_MN: Tensor, dim: int) -> tuple[Tensor, Tensor]:
    """Codes of x's shape and e8m0 scales."""
    from torchao.prototype.mx_formats.mx_tensor import ScaleCalculationMode, to_mx

    rows = is_rows(dim, x_MN.ndim)
    last = pad_to_multiple(x_MN.mT if rows else x_MN, BLOCK, -1).float().contiguous()
    scales, codes = to_mx(last, torch.float8_e4m3fn, BLOCK, ScaleCalculationMode.RCEIL)
    codes = codes[..., : x_MN.shape[dim]]
    return (codes.mT, scales.mT) if rows else (codes, scales)
