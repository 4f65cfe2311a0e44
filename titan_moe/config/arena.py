"""Whether a recipe keeps the rows of its layers in an arena."""

from collections.abc import Iterator

from titan_moe.config.gemms import expert_formats, gemm_modules, unmet_needs_of_fused, why_kept
from titan_moe.config.recipe import Recipe


def has_arena(recipe: Recipe, experts: str) -> bool:
    """Whether an arena keeps the rows that backward needs, with this implementation of the experts.

    There is none if only some layers have rows in fp8: all rows of an arena have one size.
    """
    return _can_have_arena(recipe, experts) and len(expert_formats(recipe)) == 1


def why_no_arena(recipe: Recipe, experts: str) -> Iterator[str]:
    """Say in one line that there is no arena because some layers have rows in fp8 and some do not; nothing else."""
    if not _can_have_arena(recipe, experts) or len(expert_formats(recipe)) == 1:
        return
    modules = [module for module in gemm_modules(recipe.model) if module.part == "experts"]
    reasons = [reason for module in modules if (reason := why_kept(recipe, module))]
    number, chosen = len(reasons), recipe.precision.format_of("experts")
    layers = "1 layer is" if number == 1 else f"{number} layers are"
    formats = f"experts of {layers} in {recipe.precision.compute}, the others in {chosen}"
    yield f"no arena, whose rows have one size: {formats} ({', '.join(dict.fromkeys(reasons))})"


def bounds_layers(recipe: Recipe, experts: str = "fused") -> bool:
    """Whether the capacity of a layer in an arena is less than its worst case."""
    moe = recipe.model.moe
    return recipe.parallel.bounds_layers_of(moe.num_experts, moe.top_k) and has_arena(recipe, experts)


def lacks_for_arena(recipe: Recipe, experts: str) -> str:
    """Say what keeps a recipe without an arena; empty if it has one."""
    lacks = _lacks(recipe, experts)
    return lacks or next((line.partition(": ")[2] for line in why_no_arena(recipe, experts)), "")


def _can_have_arena(recipe: Recipe, experts: str) -> bool:
    return not _lacks(recipe, experts)


def _lacks(recipe: Recipe, experts: str) -> str:
    """What is missing for an arena, whatever the formats of experts."""
    p = recipe.parallel
    if recipe.model.num_moe_layers == 0:
        return "the model has no MoE layer"
    if not p.facts.shares_memory_of_ep:
        return f'ep groups share no memory with parallel.dispatcher = "{p.dispatcher}"'
    if p.ep == 1:
        return "a rank has no peers with parallel.ep = 1"
    if not (p.has_auto_capacity or p.fixed_capacity_factor > 0):
        return "all layers together have no bound with parallel.expert_rank_capacity_factor = 0"
    return "" if experts == "fused" else f"experts are not fused but {experts}"


def experts_of(recipe: Recipe) -> str:
    """The implementation of the experts, before the machine is known: "fused" where `auto` may choose it."""
    if recipe.model.adapter.has("experts"):  # in fused ones too, if the machine allows
        return recipe.perf.chosen_kernels.experts
    is_left_to_auto = recipe.perf.kernels == "auto" and recipe.perf.override.experts == "no"
    may_be_fused = is_left_to_auto and not unmet_needs_of_fused(recipe)
    return "fused" if may_be_fused else recipe.perf.chosen_kernels.experts
