"""Rules of frozen parameters."""

from collections.abc import Iterator

from titan_moe.config.model import ModelConfig
from titan_moe.config.recipe import Recipe
from titan_moe.config.rules.rule import Problem, row, rule, rules_in
from titan_moe.config.trainable import all_names, divides_experts, freezes_experts, trains_all, unmatched


@rule("a pattern that matches nothing would train less than is meant", "optim.trainable")
def patterns_match_parameters(recipe: Recipe, world_size: int) -> Iterator[str]:
    if recipe.optim.trainable and recipe.model.class_ == ModelConfig.class_:  # of another class a run knows the names
        for problem in unmatched(all_names(recipe.model), recipe.optim.trainable):
            yield Problem(problem, hint="a pattern of a parameter's name")


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
