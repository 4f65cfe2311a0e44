"""What of a GPU's memory is spoken for before the first activation."""

from titan_moe.config.parallel import resolve
from titan_moe.config.recipe import Recipe
from titan_moe.plan.count import count_parameters

BYTES_OF_DTYPE = {"bf16": 2, "fp32": 4, "fp64": 8}
COPIES_OF_A_PARAMETER = 4
"""The parameter, its gradient and AdamW's two moments, all in the master dtype and sharded alike."""


def state_bytes_per_rank(recipe: Recipe, world_size: int) -> int:
    """Count the bytes of parameters, gradients and optimizer moments that a rank keeps for the whole run.

    Dense parameters are sharded over dp_shard; experts over ep, and inside it over edp. Replicas divide nothing.
    """
    sizes = resolve(recipe.parallel, world_size)
    count = count_parameters(recipe.model)
    held = (count.total - count.routed_experts) / sizes.dp_shard + count.routed_experts / (sizes.ep * sizes.edp)
    return round(held * COPIES_OF_A_PARAMETER * BYTES_OF_DTYPE[recipe.precision.master])
