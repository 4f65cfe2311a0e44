"""Constraints between the fields of a recipe, as data with reasons.

A rule refuses in a millisecond, without torch, what would crash or mislead later on every rank.
"""

from titan_moe.config.parallel import smallest_world
from titan_moe.config.recipe import Recipe
from titan_moe.config.rules.adapter import ADAPTER_RULES
from titan_moe.config.rules.attention import ATTENTION_RULES
from titan_moe.config.rules.context import CONTEXT_RULES
from titan_moe.config.rules.memory import MEMORY_RULES
from titan_moe.config.rules.mixture import MIXTURE_RULES
from titan_moe.config.rules.model import MODEL_RULES
from titan_moe.config.rules.moe import MOE_RULES
from titan_moe.config.rules.mtp import MTP_RULES
from titan_moe.config.rules.parallel import PARALLEL_RULES
from titan_moe.config.rules.perf import PERF_RULES
from titan_moe.config.rules.pipeline import PIPELINE_RULES
from titan_moe.config.rules.precision import PRECISION_RULES
from titan_moe.config.rules.qk_clip import QK_CLIP_RULES
from titan_moe.config.rules.ranges import RANGE_RULES, has_excessive_numbers
from titan_moe.config.rules.rule import Rule
from titan_moe.config.rules.run import RUN_RULES
from titan_moe.config.rules.schedule import SCHEDULE_RULES
from titan_moe.config.rules.tensor import TENSOR_RULES
from titan_moe.config.rules.trainable import TRAINABLE_RULES
from titan_moe.config.rules.upcycle import UPCYCLE_RULES

__all__ = ["RULES", "Rule", "check_rules", "ranks_of", "rules_of"]

RULES: list[Rule] = [
    *RANGE_RULES,
    *MODEL_RULES,
    *ATTENTION_RULES,
    *MOE_RULES,
    *MTP_RULES,
    *PARALLEL_RULES,
    *PIPELINE_RULES,
    *TENSOR_RULES,
    *CONTEXT_RULES,
    *PERF_RULES,
    *QK_CLIP_RULES,
    *MEMORY_RULES,
    *PRECISION_RULES,
    *TRAINABLE_RULES,
    *ADAPTER_RULES,
    *UPCYCLE_RULES,
    *RUN_RULES,
    *SCHEDULE_RULES,
    *MIXTURE_RULES,
]


def check_rules(recipe: Recipe, world_size: int | None = None) -> list[str]:
    """Collect every breach of every rule, with its reason; an empty list if the recipe may run. `config.ways_out` adds
    ways out.

    The default `world_size` is the fewest ranks that the recipe fits. Numbers above their range are refused alone.
    """
    ranks = ranks_of(recipe, world_size)
    return [str(breach) for rule in rules_of(recipe) for breach in rule.breaches(recipe, ranks)]


def rules_of(recipe: Recipe) -> list[Rule]:
    """The rules that answer at once."""
    return RANGE_RULES if has_excessive_numbers(recipe) else RULES


def ranks_of(recipe: Recipe, world_size: int | None) -> int:
    """The number of ranks for rules."""
    return max(smallest_world(recipe.parallel) if world_size is None else world_size, 1)
