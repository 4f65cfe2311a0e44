"""RMSNorm (arXiv:1910.07467) with the residual addition before it, in PyTorch or in Triton.

D width of the last dimension

Both are `nn.RMSNorm` to everyone who looks for weights.
"""

from torch import Tensor, nn

from titan_moe.config.kernels import Maker
from titan_moe.kernels.rms_norm import add_rms_norm, rms_norm


class TorchNorm(nn.RMSNorm):
    """The addition and the norm as PyTorch has them; a compiler makes them one pass forward."""

    def add_and_norm(self, x: Tensor, residual: Tensor) -> tuple[Tensor, Tensor]:
        """x + residual, and its norm: [..., D] twice."""
        h = x + residual
        return h, self(h)


class TritonNorm(nn.RMSNorm):
    """The addition and the norm as one kernel, and their gradients as one more."""

    def forward(self, x: Tensor) -> Tensor:
        """[..., D] -> [..., D]."""
        return rms_norm(x, self.weight, self.eps)

    def add_and_norm(self, x: Tensor, residual: Tensor) -> tuple[Tensor, Tensor]:
        """x + residual, and its norm: [..., D] twice."""
        return add_rms_norm(x, residual, self.weight, self.eps)


NORMS: dict[Maker, type[TorchNorm] | type[TritonNorm]] = {"torch": TorchNorm, "triton": TritonNorm}
"""`Kernels.norm` -> the norms of a block."""
