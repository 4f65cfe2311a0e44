"""Whether a recipe keeps the rows of its layers in an arena."""

from titan_moe.config.gemms import expert_formats
from titan_moe.config.recipe import Recipe


def has_arena(recipe: Recipe, experts: str) -> bool:
    """Whether what backward needs of the rows lies in an arena, with this implementation of the experts.

    Not where experts alone are recomputed and get rows that have arrived: in an arena they would be sent again. Nor
    where rows of some layers are in fp8: an arena has rows of one size.
    """
    p = recipe.parallel
    is_bounded = p.has_auto_capacity or p.fixed_capacity_factor > 0
    sends_again = recipe.memory.recompute == "experts" and p.overlap != "tile"
    can_have = p.facts.shares_memory_of_ep and p.ep > 1 and is_bounded and not sends_again
    return can_have and experts == "fused" and recipe.model.num_moe_layers > 0 and len(expert_formats(recipe)) == 1


def experts_of(recipe: Recipe) -> str:
    """The implementation of the experts, before the machine is known: "fused" where `auto` may choose it."""
    is_left_to_auto = recipe.perf.kernels == "auto" and recipe.perf.override.experts == "no"
    may_be_fused = is_left_to_auto and not recipe.model.moe.unmet_needs_of_fused
    return "fused" if may_be_fused else recipe.perf.chosen_kernels.experts
