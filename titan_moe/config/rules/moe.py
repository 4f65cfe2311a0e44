"""Rules of the mixture-of-experts layer's shape, on any device."""

from collections.abc import Iterator

from titan_moe.config.recipe import Recipe
from titan_moe.config.rules.rule import Problem, is_no_divisor, rule, rules_in
from titan_moe.config.schema import counted


@rule("an expert of width 0 computes nothing", "model.moe.ffn_hidden_size num_experts")
def experts_have_a_width(recipe: Recipe, world_size: int) -> Iterator[str]:
    m = recipe.model
    if m.num_moe_layers > 0 and m.moe.ffn_hidden_size == 0:
        problem = f"model.moe.ffn_hidden_size = 0, but MoE layers have {counted(m.moe.num_experts, 'expert')}"
        yield Problem(problem, steps=[m.hidden_size])


@rule("a token chooses an expert once", "model.moe.top_k num_experts")
def top_k_fits_experts(recipe: Recipe, world_size: int) -> Iterator[str]:
    moe = recipe.model.moe
    if 0 < moe.num_experts < moe.top_k:
        yield f"model.moe.top_k = {moe.top_k} exceeds model.moe.num_experts = {moe.num_experts}"


@rule("with one expert per token, the normalised routing weight is always 1", "model.moe.normalize_topk top_k")
def one_weight_is_not_normalised(recipe: Recipe, world_size: int) -> Iterator[str]:
    moe = recipe.model.moe
    if moe.num_experts > 0 and moe.top_k == 1 and moe.normalize_topk:
        yield (
            "model.moe.top_k = 1 with model.moe.normalize_topk = true gives the router no gradient through the scores"
        )


@rule("every group holds the same number of experts", "model.moe.num_groups num_experts")
def groups_divide_experts(recipe: Recipe, world_size: int) -> Iterator[str]:
    moe = recipe.model.moe
    if moe.num_experts > 0 and is_no_divisor(moe.num_groups, moe.num_experts):
        problem = f"model.moe.num_groups = {moe.num_groups} does not divide model.moe.num_experts = {moe.num_experts}"
        yield Problem(problem, steps=[moe.num_groups])


@rule("a token chooses a group once", "model.moe.top_k_groups num_groups")
def top_k_groups_fit_groups(recipe: Recipe, world_size: int) -> Iterator[str]:
    moe = recipe.model.moe
    if moe.top_k_groups > moe.num_groups:
        yield f"model.moe.top_k_groups = {moe.top_k_groups} exceeds model.moe.num_groups = {moe.num_groups}"


@rule("a token's experts are in its chosen groups", "model.moe.top_k top_k_groups num_groups")
def top_k_fits_chosen_groups(recipe: Recipe, world_size: int) -> Iterator[str]:
    moe = recipe.model.moe
    num_candidates = moe.top_k_groups * (moe.num_experts // max(moe.num_groups, 1))
    if moe.num_groups > 1 and 0 < num_candidates < moe.top_k <= moe.num_experts:
        yield (
            f"model.moe.top_k = {moe.top_k} exceeds the {counted(num_candidates, 'expert')} in the groups of a "
            f"token, model.moe.top_k_groups = {moe.top_k_groups}"
        )


@rule("a group is ranked by its two best scores", "model.moe.group_score num_groups")
def top2_groups_hold_two(recipe: Recipe, world_size: int) -> Iterator[str]:
    moe = recipe.model.moe
    if moe.group_score == "top2_sum" and 1 < moe.num_groups <= moe.num_experts < 2 * moe.num_groups:
        yield (
            f'model.moe.group_score = "top2_sum" needs two experts a group, but {moe.num_experts} experts in '
            f"model.moe.num_groups = {moe.num_groups} groups leave one"
        )


@rule("the bias is on the scale of sigmoid scores", "model.moe.bias_update_speed score_fn")
def bias_needs_sigmoid(recipe: Recipe, world_size: int) -> Iterator[str]:
    moe = recipe.model.moe
    if moe.bias_update_speed > 0 and moe.score_fn != "sigmoid":
        yield (
            f'model.moe.bias_update_speed = {moe.bias_update_speed:g} needs model.moe.score_fn = "sigmoid", '
            f'which here is "{moe.score_fn}"'
        )


@rule("the gate applies to shared experts only", "model.moe.shared_expert_gate shared_ffn_hidden_size")
def shared_gate_needs_shared_experts(recipe: Recipe, world_size: int) -> Iterator[str]:
    moe = recipe.model.moe
    if moe.shared_expert_gate and moe.shared_ffn_hidden_size == 0:
        problem = "model.moe.shared_expert_gate = true needs shared experts, but model.moe.shared_ffn_hidden_size = 0"
        yield Problem(problem, steps=[moe.ffn_hidden_size])


MOE_RULES = rules_in(globals())
