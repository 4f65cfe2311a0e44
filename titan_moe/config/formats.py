"""Low-precision formats of GEMMs, and which of a layer's three GEMMs uses which.

A format is how operands are rounded before a product: the type of the codes, the scales, and how many elements share a
scale. Sums are in fp32, results in the dtype of compute.
"""

from dataclasses import dataclass
from typing import Literal

Format = Literal["compute", "fp8_tensorwise", "fp8_rowwise", "fp8_blockwise", "mxfp8", "nvfp4"]
"""`compute`: not rounded, the dtype of compute.
`fp8_tensorwise`: e4m3, gradients e5m2, one fp32 scale a tensor.
`fp8_rowwise`: e4m3, one fp32 scale for each row of the left operand and each column of the right one.
`fp8_blockwise`: e4m3, one fp32 scale for 1 x 128 elements of activations and gradients along the summed dimension, and
for 128 x 128 of weights (arXiv:2412.19437, section 3.3).
`mxfp8`: e4m3, one power of two for 32 elements along the summed dimension (OCP microscaling formats 1.0).
`nvfp4`: e2m1, one e4m3 scale for 16 elements (weights: 16 x 16) and one fp32 scale a tensor (arXiv:2509.25149)."""


@dataclass(frozen=True)
class GemmFormats:
    """The formats of the three GEMMs of a linear layer or of grouped experts."""

    fprop: Format = "compute"
    """y = x · W."""
    dgrad: Format = "compute"
    """dx = dy · Wᵀ."""
    wgrad: Format = "compute"
    """dW = xᵀ · dy."""
