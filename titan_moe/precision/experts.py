"""Routed experts with formats."""

from titan_moe.config import RecipeError
from titan_moe.config.formats import GemmFormats
from titan_moe.kernels.experts.composite_mlp import CompositeMLP, ExpertMLP
from titan_moe.kernels.experts.fp8.mlp import (
    BLOCKWISE_MLPS,
    fp8_blockwise_expert_mlp,
    fp8_blockwise_expert_mlp_with_plain_weight_gradients,
    fp8_expert_mlp,
    fp8_expert_mlp_with_plain_weight_gradients,
    quantize_experts,
    quantize_experts_in_blocks,
)
from titan_moe.kernels.formats.grouped import emulated_grouped_mm
from titan_moe.layers.experts import GroupedExperts

NATIVE: dict[GemmFormats, ExpertMLP] = {
    GemmFormats("fp8_rowwise", "fp8_rowwise", "fp8_rowwise"): fp8_expert_mlp,
    GemmFormats("fp8_rowwise", "fp8_rowwise", "compute"): fp8_expert_mlp_with_plain_weight_gradients,
    GemmFormats("fp8_blockwise", "fp8_blockwise", "fp8_blockwise"): fp8_blockwise_expert_mlp,
    GemmFormats("fp8_blockwise", "fp8_blockwise", "compute"): fp8_blockwise_expert_mlp_with_plain_weight_gradients,
}
"""What the kernels of experts compute."""


def convert_experts(
    experts: GroupedExperts,
    formats: GemmFormats,
    backend: str,
    *,
    weighs_input: bool = False,
    in_triton: bool = False,
) -> None:
    """Let a layer's experts multiply in formats, in place. `weighs_input` as in `CompositeMLP`; `in_triton` as
    in `emulated_grouped_mm`.

    Raises: RecipeError where there is no such kernel.
    """
    if backend == "emulated":
        powers_of_two = formats.fprop in ("fp8_rowwise", "fp8_blockwise")  # as in native experts
        experts.mlp = CompositeMLP(emulated_grouped_mm(formats, powers_of_two, in_triton), weighs_input=weighs_input)
    elif formats in NATIVE and not weighs_input:
        experts.mlp = NATIVE[formats]
        experts.quantize = quantize_experts_in_blocks if experts.mlp in BLOCKWISE_MLPS else quantize_experts
    else:
        raise RecipeError(
            [
                f'precision.experts = "{formats}" has no native kernels for this model; take precision.experts = '
                '"compute", or precision.backend = "emulated"'
            ]
        )
