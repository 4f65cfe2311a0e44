"""Routed experts with formats."""

from titan_moe.config import RecipeError
from titan_moe.config.formats import GemmFormats
from titan_moe.kernels.experts.composite_mlp import composite
from titan_moe.layers.experts import GroupedExperts


def convert_experts(experts: GroupedExperts, formats: GemmFormats, backend: str, *, weighs_input: bool = False) -> None:
    """Let a layer's experts multiply in formats, in place. `weighs_input` as in `composite`.

    Raises: RecipeError where there is no such kernel.
    """
    way_out = 'take precision.experts = "compute"'
    if backend != "emulated":
        raise RecipeError(
            [f'precision.experts = "{formats}" has no native kernels yet; {way_out}, or precision.backend = "emulated"']
        )
    try:
        from titan_moe.kernels.formats.grouped import emulated_grouped_mm
    except ImportError as error:
        raise RecipeError([f'precision.experts = "{formats}" has no emulation yet; {way_out}']) from error
    experts.mlp = composite(emulated_grouped_mm(formats), weighs_input=weighs_input)
