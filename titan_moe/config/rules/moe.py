"""Rules of the mixture-of-experts layer's shape, on any device."""

from collections.abc import Iterator
from typing import Any

from titan_moe.config.model import ModelConfig
from titan_moe.config.recipe import Recipe
from titan_moe.config.rules.rule import Problem, at_most, divides, row, rule, rules_in
from titan_moe.config.schema import counted, in_toml


@rule("an expert of width 0 computes nothing", "model.moe.ffn_hidden_size num_experts")
def experts_have_a_width(recipe: Recipe, world_size: int) -> Iterator[str]:
    m = recipe.model
    if m.num_moe_layers > 0 and m.moe.ffn_hidden_size == 0:
        problem = f"model.moe.ffn_hidden_size = 0, but MoE layers have {counted(m.moe.num_experts, 'expert')}"
        yield Problem(problem, steps=[m.hidden_size])


top_k_fits_experts = at_most(
    "a token chooses an expert once", "model.moe.top_k", "model.moe.num_experts", lambda r: r.model.moe.num_experts
)
noise_is_of_the_blocks_of_a_model = row(
    "a block of multi-token prediction has tokens of other places, once for each depth",
    lambda r: r.model.moe.input_jitter > 0 and r.model.mtp.num_depths > 0,
    "{model.moe.input_jitter} with {model.mtp.num_depths}",
    "model.moe.input_jitter model.mtp.num_depths",
)
one_weight_is_not_normalised = row(
    "with one expert per token, the normalised routing weight is always 1",
    lambda r: r.model.moe.num_experts > 0 and r.model.moe.top_k == 1 and r.model.moe.normalize_topk,
    "{model.moe.top_k} with {model.moe.normalize_topk} gives the router no gradient through the scores",
    "model.moe.normalize_topk top_k",
)
groups_divide_experts = divides(
    "every group holds the same number of experts", "model.moe.num_groups", "model.moe.num_experts"
)
top_k_groups_fit_groups = at_most("a token chooses a group once", "model.moe.top_k_groups", "model.moe.num_groups")


@rule("a token's experts are in its chosen groups", "model.moe.top_k top_k_groups num_groups")
def top_k_fits_chosen_groups(recipe: Recipe, world_size: int) -> Iterator[str]:
    moe = recipe.model.moe
    num_candidates = moe.top_k_groups * (moe.num_experts // max(moe.num_groups, 1))
    if moe.num_groups > 1 and 0 < num_candidates < moe.top_k <= moe.num_experts:
        yield (
            f"model.moe.top_k = {moe.top_k} exceeds the {counted(num_candidates, 'expert')} in the groups of a "
            f"token, model.moe.top_k_groups = {moe.top_k_groups}"
        )


top2_groups_hold_two = row(
    "a group is ranked by its two best scores",
    lambda r: (
        r.model.moe.group_score == "top2_sum"
        and 1 < r.model.moe.num_groups <= r.model.moe.num_experts < 2 * r.model.moe.num_groups
    ),
    "{model.moe.group_score} needs two experts a group, but {=model.moe.num_experts} experts in "
    "{model.moe.num_groups} groups leave one",
)
top_k_groups_share_experts = row(
    "a group is ranked by as many scores as its share of a token's experts",
    lambda r: (
        r.model.moe.group_score == "top_share_sum"
        and r.model.moe.num_groups > 1
        and r.model.moe.top_k % max(r.model.moe.top_k_groups, 1) > 0
    ),
    "{model.moe.top_k_groups} does not divide {model.moe.top_k}, which {model.moe.group_score} needs",
    "model.moe.top_k_groups top_k group_score",
    steps=lambda r: [r.model.moe.top_k_groups],
)
shared_gate_needs_shared_experts = row(
    "the gate applies to shared experts only",
    lambda r: r.model.moe.shared_expert_gate and r.model.moe.shared_ffn_hidden_size == 0,
    "{model.moe.shared_expert_gate} needs shared experts, but {model.moe.shared_ffn_hidden_size}",
    steps=lambda r: [r.model.moe.ffn_hidden_size],
)

sequence_loss_is_given_once = row(
    "both are the coefficient of the auxiliary loss of each sequence",
    lambda r: r.model.moe.aux_loss_coef > 0 and r.model.moe.aux_losses.sequence > 0,
    "{model.moe.aux_loss_coef} and {model.moe.aux_losses.sequence}",
)


@rule(
    "it compares each score, with its bias, to the next best one of all experts, and moves the bias there at once",
    "model.moe.bias_update bias_update_speed num_groups score_fn top_k",
)
def quantiles_have_their_settings(recipe: Recipe, world_size: int) -> Iterator[str]:
    moe = recipe.model.moe
    broken = {
        "bias_update_speed = 0": moe.bias_update_speed != 0,
        "num_groups = 1": moe.num_groups != 1,
        'score_fn = "softmax" or "sigmoid", whose scores are from 0 to 1,': moe.score_fn not in ("softmax", "sigmoid"),
        f"top_k below num_experts = {moe.num_experts}": moe.top_k >= moe.num_experts,
    }
    for need, is_broken in broken.items():
        if moe.bias_update == "quantile" and moe.num_experts > 0 and is_broken:
            yield f'model.moe.bias_update = "quantile" needs model.moe.{need}'


quantiles_alone_are_averaged = row(
    "a step by its sign is no value to average",
    lambda r: r.model.moe.bias_ema > 0 and r.model.moe.bias_update != "quantile",
    "{model.moe.bias_ema} with {model.moe.bias_update}",
)

sequences_are_whole_where_they_drop = row(
    "ranks of cp and tp have parts of a sequence, and what they drop would depend on them",
    lambda r: (
        r.model.moe.capacity_factor > 0 and r.model.moe.drop_over == "sequence" and r.parallel.cp * r.parallel.tp > 1
    ),
    "{model.moe.drop_over} with {parallel.cp} and {parallel.tp}",
)
forced_loads_are_not_dropped = row(
    "a forced load is measured whole",
    lambda r: r.model.moe.capacity_factor > 0 and r.train.forces_load,
    "{model.moe.capacity_factor} would drop tokens of {train.forced_load}",
)
padding_has_a_capacity = row(
    "slots are those of the capacity of experts",
    lambda r: (
        r.model.moe.pad_to_capacity and (r.model.moe.capacity_factor == 0 or r.model.moe.drop_over != "microbatch")
    ),
    "{model.moe.pad_to_capacity} with {model.moe.capacity_factor} and {model.moe.drop_over}",
)


hash_layers_are_moe_layers = row(
    "layers are numbered from 0, each is named once, and routers are in layers with experts",
    lambda r: (
        len(set(r.model.moe.hash_layers)) < len(r.model.moe.hash_layers)
        or not set(r.model.moe.hash_layers) <= {layer for layer in r.model.moe_layers if layer < r.model.num_layers}
    ),
    "{model.moe.hash_layers} must be different MoE layers of {model.num_layers}",
    "model.moe.hash_layers model.num_layers",
)
hash_table_has_layers = row(
    "the table is of layers that take experts by token",
    lambda r: r.model.moe.hash_table and not r.model.moe.hash_layers,
    "{model.moe.hash_table} has no effect with {model.moe.hash_layers}",
)
hash_layers_drop_nothing = row(
    "experts that a table gives are taken whole",
    lambda r: r.model.moe.hash_layers and r.model.moe.capacity_factor > 0,
    "{model.moe.hash_layers} with {model.moe.capacity_factor}",
)
hash_layers_have_no_order = row(
    "sparsemixer weighs the better one of two experts first, and a table has them in no order",
    lambda r: r.model.moe.hash_layers and r.model.moe.score_fn == "sparsemixer",
    "{model.moe.hash_layers} with {model.moe.score_fn}",
)
hash_layers_are_of_the_default_class = row(
    "a class of your own has a forward of its own, which gives routers no ids of tokens",
    lambda r: r.model.moe.hash_layers and r.model.class_ != ModelConfig.class_,
    "{model.moe.hash_layers} is built for the default class alone, not for {model.class}",
)


@rule(
    "slots of all experts of a rank are allocated, and nothing may exceed them",
    "parallel.dispatcher expert_rank_capacity_factor expert_clones etp model.moe.pad_to_capacity",
)
def padded_slots_have_their_dispatcher(recipe: Recipe, world_size: int) -> Iterator[str]:
    p = recipe.parallel
    broken = {
        f'a dispatcher with static sizes, not parallel.dispatcher = "{p.dispatcher}"': not p.facts.pads_to_capacity,
        "parallel.expert_rank_capacity_factor = 0": p.facts.can_be_bounded and p.expert_rank_capacity_factor != 0,
        'parallel.expert_clones = "off"': p.has_clones,
        "parallel.etp = 1": p.etp > 1,
    }
    for need, is_broken in broken.items():
        if recipe.model.moe.pad_to_capacity and recipe.model.num_moe_layers > 0 and is_broken:
            yield f"model.moe.pad_to_capacity = true needs {need}"


@rule(
    "sparsemixer takes two experts of all, and weighs each by itself",
    "model.moe.score_fn top_k num_groups normalize_topk bias_update_speed",
)
def sparsemixer_has_its_settings(recipe: Recipe, world_size: int) -> Iterator[str]:
    moe = recipe.model.moe
    needs: dict[str, tuple[Any, Any]] = {
        "top_k = 2": (moe.top_k, 2),
        "num_groups = 1": (moe.num_groups, 1),
        "normalize_topk = false": (moe.normalize_topk, False),
        "bias_update_speed = 0": (moe.bias_update_speed, 0),
    }
    for need, (value, wanted) in needs.items():
        if moe.score_fn == "sparsemixer" and value != wanted:
            yield f'model.moe.score_fn = "sparsemixer" needs model.moe.{need}, not {in_toml(value)}'


MOE_RULES = rules_in(globals())
