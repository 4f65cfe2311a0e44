"""Rules of frozen parameters."""

import math
from collections.abc import Iterator

from titan_moe.config.model import ModelConfig
from titan_moe.config.recipe import Recipe
from titan_moe.config.rules.rule import Problem, row, rule, rules_in
from titan_moe.config.schema import shown
from titan_moe.config.trainable import all_names, divides_experts, freezes_experts, trains_all, unmatched


@rule("a pattern that matches nothing would train less than is meant", "optim.trainable")
def patterns_match_parameters(recipe: Recipe, world_size: int) -> Iterator[str]:
    if recipe.optim.trainable and recipe.model.class_ == ModelConfig.class_:  # of another class a run knows the names
        for problem in unmatched(all_names(recipe.model), recipe.optim.trainable):
            yield Problem(problem, hint="a pattern of a parameter's name")


@rule("a group that matches nothing would change less than is meant", "optim.groups")
def groups_match_parameters(recipe: Recipe, world_size: int) -> Iterator[str]:
    patterns = tuple(group.parameters for group in recipe.optim.groups)
    if patterns and recipe.model.class_ == ModelConfig.class_:  # of another class a run knows the names
        for problem in unmatched(all_names(recipe.model), patterns, "optim.groups"):
            yield Problem(problem, hint="`parameters` that match a parameter's name")


@rule("it is a factor on a rate that a schedule gives", "optim.groups")
def groups_have_factors(recipe: Recipe, world_size: int) -> Iterator[str]:
    for number, group in enumerate(recipe.optim.groups):
        key = f"optim.groups[{number}]"
        if not (group.lr_scale > 0 and math.isfinite(group.lr_scale)):
            hint = f"{key}.lr_scale = 1; optim.trainable freezes parameters"
            yield Problem(f"{key}.lr_scale = {shown(group.lr_scale)} must be finite and above 0", hint=hint)
        if not (group.weight_decay_scale >= 0 and math.isfinite(group.weight_decay_scale)):
            words = f"{key}.weight_decay_scale = {shown(group.weight_decay_scale)} must be finite and at least 0"
            yield Problem(words, hint=f"{key}.weight_decay_scale = 0 for none")


clones_are_of_trained_experts = row(
    "weights and gradients of clones are sent together, and frozen experts have none",
    lambda r: (
        not r.model.adapter.is_used
        and bool(r.optim.trainable)
        and r.parallel.expert_clones != "off"
        and freezes_experts(r)
    ),
    "{parallel.expert_clones} needs routed experts that {optim.trainable} trains",
)

clones_are_of_whole_experts = row(
    "clones have room behind weights that train, so those of a layer's experts all train, or none",
    lambda r: not r.model.adapter.is_used and r.parallel.expert_clones != "off" and divides_experts(r),
    "{parallel.expert_clones} needs layers whose routed experts {optim.trainable} trains as a whole, or not at all",
)

frozen_weights_are_somewhere = row(
    "a resume reads from there what checkpoints lack",
    lambda r: not r.checkpoint.saves_frozen and (not r.checkpoint.load_from or trains_all(r.model, r.optim.trainable)),
    "{checkpoint.saves_frozen} needs frozen weights, and {checkpoint.load_from} with them",
    "checkpoint.saves_frozen",
)

TRAINABLE_RULES = rules_in(globals())
