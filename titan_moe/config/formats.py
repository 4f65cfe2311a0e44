"""Low-precision formats of GEMMs, and the formats of the three GEMMs of a layer.

A format is how operands are rounded before a product: the type of the codes, the scales, and how many elements share a
scale. Sums are in fp32, results in the dtype of compute.
"""

from dataclasses import dataclass
from typing import Literal

Format = Literal["compute", "fp8_tensorwise", "fp8_rowwise", "fp8_blockwise", "mxfp8", "nvfp4"]
"""`compute`: not rounded, the dtype of compute.
`fp8_tensorwise`: e4m3, gradients e5m2, one fp32 scale a tensor.
`fp8_rowwise`: e4m3, one scale, a power of two, for each row of the left operand and each column of the right one;
native gradients of weights have one scale in all (kernels/linear/fp8.py).
`fp8_blockwise`: e4m3, one scale, a power of two, for 1 x 128 elements of activations and gradients along the summed
dimension, and for 128 x 128 of weights (arXiv:2412.19437, section 3.3).
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

    def __str__(self) -> str:
        """`fp8_rowwise`, or `fp8_rowwise (wgrad compute)`."""
        kept = " and ".join(name for name in ("dgrad", "wgrad") if getattr(self, name) != self.fprop)
        return f"{self.fprop} ({kept} compute)" if kept else self.fprop


@dataclass(frozen=True)
class FormatFacts:
    """The requirements of a format, and its native kernels in this package."""

    multiple: int
    """Widths of a GEMM, and the tokens of a microbatch, must be multiples of this number."""
    native_multiple: int
    """The same for native kernels."""
    capability: tuple[int, int]
    """The lowest CUDA compute capability whose tensor cores support the format."""
    has_native_linears: bool = False
    """Whether dense linear layers have native kernels."""
    has_linears_in_triton: bool = False
    """Whether these are this package's, where all three GEMMs have the format. Others are torchao's."""
    has_native_experts: bool = False
    """Whether routed experts have native kernels."""
    takes_any_tokens: bool = False
    """Whether native kernels of linear layers take any number of tokens."""


OWN_KERNELS = {"has_native_linears": True, "has_linears_in_triton": True, "has_native_experts": True}
FORMAT_FACTS: dict[Format, FormatFacts] = {
    "fp8_tensorwise": FormatFacts(16, 16, (9, 0), has_native_linears=True),
    "fp8_rowwise": FormatFacts(16, 16, (9, 0), **OWN_KERNELS),
    "fp8_blockwise": FormatFacts(128, 128, (9, 0), **OWN_KERNELS, takes_any_tokens=True),
    "mxfp8": FormatFacts(32, 32, (10, 0)),
    "nvfp4": FormatFacts(16, 128, (10, 0)),
}
"""A row for each format but `compute`."""
