"""Routed experts with formats."""

from titan_moe.config import RecipeError
from titan_moe.config.formats import GemmFormats
from titan_moe.config.swiglu import PLAIN_SWIGLU, SwiGLU
from titan_moe.kernels.experts.composite_mlp import CompositeMLP
from titan_moe.kernels.experts.fused_mlp import FUSED_MLPS, with_activation
from titan_moe.kernels.experts.grouped_mm import GROUPED_GEMM
from titan_moe.kernels.formats.grouped import emulated_grouped_mm
from titan_moe.layers.experts import GroupedExperts


def convert_experts(
    experts: GroupedExperts,
    formats: GemmFormats,
    backend: str,
    *,
    weighs_input: bool = False,
    activation: SwiGLU = PLAIN_SWIGLU,
    in_triton: bool = False,
) -> None:
    """Let a layer's experts multiply in formats, in place. `weighs_input` and `activation` as in `CompositeMLP`;
    `in_triton` as in `emulated_grouped_mm`. Native experts are fused, but those with biases or scores on the input.

    Raises: RecipeError where there is no such kernel.
    """
    if backend == "emulated":
        powers_of_two = formats.fprop in ("fp8_rowwise", "fp8_blockwise")  # as in native experts
        gemm = emulated_grouped_mm(formats, powers_of_two, in_triton)
        experts.mlp = CompositeMLP(gemm, weighs_input, activation)
    elif formats not in FUSED_MLPS:
        raise RecipeError(
            [
                f'precision.experts = "{formats}" has no native kernels; take precision.experts = "compute", or '
                'precision.backend = "emulated"'
            ]
        )
    elif weighs_input or experts.down_bias is not None:
        experts.mlp = CompositeMLP(GROUPED_GEMM[str(formats)], weighs_input, activation)
    else:
        experts.mlp = with_activation(FUSED_MLPS[formats], activation)
