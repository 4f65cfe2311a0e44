"""torchao's linear layers: imported only where a recipe asks for them.

`Float8Linear` rounds input, weight and gradient where each is read, and keeps input and weight in bf16 for backward.
Its config is built from the three formats, and shared by all layers: graphs are compiled once for all of them.
"""

from functools import cache

import torch
from torch import Tensor, nn
from torchao.float8 import Float8LinearConfig, convert_to_float8_training
from torchao.float8.config import CastConfig, ScalingGranularity, ScalingType
from torchao.float8.float8_linear import Float8Linear

from titan_moe.config.formats import GemmFormats
from titan_moe.kernels.experts.swiglu import swiglu


def float8_linear(linear: nn.Linear, formats: GemmFormats, *, emulate: bool, activates: bool) -> nn.Module:
    """torchao's layer with the parameters of `linear`; with `activates` it reads pre-activations of gate and up."""
    config = float8_config(formats, emulate)
    plain = nn.Linear(linear.in_features, linear.out_features, bias=False, device="meta")
    plain.weight, plain.bias = linear.weight, linear.bias
    converted = convert_to_float8_training(plain, config=config)  # not from_float: it also patches inductor
    return SwiGLUFloat8Linear.from_float(converted, config) if activates else converted


class SwiGLUFloat8Linear(Float8Linear):
    """`SwiGLUDown` in fp8: activation and projection as one operation."""

    def forward(self, hidden: Tensor) -> Tensor:
        """Pre-activations of gate and up [..., 2F] -> [..., D]."""
        return super().forward(swiglu(hidden))


@cache
def float8_config(formats: GemmFormats, emulate: bool) -> Float8LinearConfig:
    """torchao's config for the formats of the three GEMMs.

    Scales of rows are powers of two, as in torchao's recipe "rowwise": a value is rounded alike in every GEMM.

    Raises: ValueError for formats that `Float8Linear` does not mix.
    """
    names = {formats.fprop, formats.dgrad, formats.wgrad} - {"compute"}
    if len(names) != 1 or not names <= {"fp8_tensorwise", "fp8_rowwise"}:
        raise ValueError(f"Float8Linear has no {formats}")
    is_rowwise = names == {"fp8_rowwise"}

    def casts(gemm: str, dtype: torch.dtype) -> CastConfig:
        if getattr(formats, gemm) == "compute":
            return CastConfig(scaling_type=ScalingType.DISABLED, target_dtype=dtype)
        granularity = ScalingGranularity.AXISWISE if is_rowwise else ScalingGranularity.TENSORWISE
        return CastConfig(scaling_granularity=granularity, target_dtype=dtype)

    value, gradient = torch.float8_e4m3fn, torch.float8_e4m3fn if is_rowwise else torch.float8_e5m2
    return Float8LinearConfig(
        cast_config_input=casts("fprop", value),
        cast_config_weight=casts("fprop", value),
        cast_config_grad_output=casts("dgrad", gradient),
        cast_config_weight_for_grad_input=casts("dgrad", value),
        cast_config_grad_output_for_grad_weight=casts("wgrad", gradient),
        cast_config_input_for_grad_weight=casts("wgrad", value),
        emulate=emulate,
        round_scales_to_power_of_2=is_rowwise,
    )
