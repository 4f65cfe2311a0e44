"""Constraints between the fields of a recipe, as data with reasons.

A rule refuses in a millisecond, without torch, what would crash or mislead later on every rank.
"""

from titan_moe.config.parallel import smallest_world
from titan_moe.config.recipe import Recipe
from titan_moe.config.rules.attention import ATTENTION_RULES
from titan_moe.config.rules.context import CONTEXT_RULES
from titan_moe.config.rules.model import MODEL_RULES
from titan_moe.config.rules.moe import MOE_RULES
from titan_moe.config.rules.parallel import PARALLEL_RULES
from titan_moe.config.rules.perf import PERF_RULES
from titan_moe.config.rules.pipeline import PIPELINE_RULES
from titan_moe.config.rules.precision import PRECISION_RULES
from titan_moe.config.rules.ranges import RANGE_RULES, has_excessive_numbers
from titan_moe.config.rules.rule import Rule
from titan_moe.config.rules.run import RUN_RULES
from titan_moe.config.rules.tensor import TENSOR_RULES

__all__ = ["RULES", "Rule", "check_rules"]

RULES: list[Rule] = [
    *RANGE_RULES,
    *MODEL_RULES,
    *ATTENTION_RULES,
    *MOE_RULES,
    *PARALLEL_RULES,
    *PIPELINE_RULES,
    *TENSOR_RULES,
    *CONTEXT_RULES,
    *PERF_RULES,
    *PRECISION_RULES,
    *RUN_RULES,
]


def check_rules(recipe: Recipe, world_size: int | None = None) -> list[str]:
    """Collect every breach of every rule, with its reason; an empty list if the recipe may run.

    The default `world_size` is the fewest ranks that the recipe fits. Numbers above their range are refused alone.
    """
    ranks = smallest_world(recipe.parallel) if world_size is None else world_size
    rules = RANGE_RULES if has_excessive_numbers(recipe) else RULES
    return [f"{message} ({rule.why})" for rule in rules for message in rule.check(recipe, max(ranks, 1))]
