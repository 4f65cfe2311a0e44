"""Dense linear layers with formats: our kernels for fp8 by rows and by blocks, torchao's for other fp8, emulated ones
for the rest.

Every converted layer owns the parameters of the layer that it replaces. `SwiGLUDown` stays one operation: activation,
rounding and product. A compiler fuses the first two, and keeps the pre-activation alone for backward.
"""

from typing import Any

from torch import Tensor, nn

from titan_moe.config import RecipeError
from titan_moe.config.formats import GemmFormats
from titan_moe.kernels.experts.swiglu import swiglu
from titan_moe.kernels.formats.linear import emulated_linear
from titan_moe.kernels.linear.fp8 import fp8_linear
from titan_moe.kernels.linear.fp8_blocks import fp8_block_linear
from titan_moe.layers.mlp import SwiGLUDown
from titan_moe.titan.torchao import require_torchao

NATIVE = {
    GemmFormats("fp8_rowwise", "fp8_rowwise", "fp8_rowwise"): fp8_linear,
    GemmFormats("fp8_blockwise", "fp8_blockwise", "fp8_blockwise"): fp8_block_linear,
}
"""What our kernels compute."""
FLOAT8_LINEAR = ("fp8_tensorwise", "fp8_rowwise")
"""Formats of torchao's `Float8Linear`, for what our kernels do not compute, and for emulation."""


def convert_linear(linear: nn.Linear, formats: GemmFormats, backend: str, *, in_triton: bool = False) -> nn.Module:
    """Return a layer with the parameters of `linear` whose GEMMs have formats; also on the meta device.

    Emulated formats are rounded by Triton kernels if asked for.

    Raises: RecipeError if a package is missing, or this package has no such kernel.
    """
    activates, is_emulated = isinstance(linear, SwiGLUDown), backend == "emulated"
    if formats in NATIVE and not is_emulated:
        return FormattedLinear(linear, NATIVE[formats], activates=activates)
    if formats.fprop in FLOAT8_LINEAR:
        torchao = _torchao(f'precision.linears = "{formats.fprop}"')
        return torchao.float8_linear(linear, formats, emulate=is_emulated, activates=activates)
    if is_emulated:
        powers_of_two = formats.fprop == "fp8_blockwise"  # as in native layers
        return FormattedLinear(linear, emulated_linear, formats, powers_of_two, in_triton, activates=activates)
    raise RecipeError(
        [
            f'precision.linears = "{formats}" has no native kernels; take precision.backend = "emulated", or '
            'precision.linears = "fp8_rowwise"'
        ]
    )


class FormattedLinear(nn.Linear):
    """A linear layer whose product is given: `product(x, weight, *options)`."""

    def __init__(self, linear: nn.Linear, product: Any, *options: Any, activates: bool) -> None:
        super().__init__(linear.in_features, linear.out_features, bias=False, device="meta")
        self.weight, self.bias = linear.weight, linear.bias
        self.product, self.options, self.activates = product, options, activates

    def forward(self, x: Tensor) -> Tensor:
        """[..., I], or with `activates` pre-activations of gate and up [..., 2I] -> [..., O]."""
        y = self.product(swiglu(x) if self.activates else x, self.weight, *self.options)
        return y if self.bias is None else y + self.bias


def _torchao(setting: str) -> Any:
    """The file of torchao's layers."""
    require_torchao(setting)
    from titan_moe.precision import torchao_linears

    return torchao_linears
