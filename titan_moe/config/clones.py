"""Resolve `parallel.expert_clones = "auto"` to a number of replica slots.

With replica slots, every exchange decides on the device how many clones it has. A balanced exchange has none. It moves
no weights then, but still costs six barriers and some twenty small launches in forward and backward.
"""

from dataclasses import replace

from titan_moe.config.gemms import has_native_experts
from titan_moe.config.parallel import resolve
from titan_moe.config.recipe import Recipe, microbatch_tokens

NUM_CLONES = 2
"""Two replica slots a rank nearly always reduce loads of up to twice the mean to 1.05 times the mean."""
MIN_SLOTS = 50_000
"""Slots of a rank from which clones may pay, an estimate: to fetch an expert and return its gradient takes as long as
some 2,500 slots of any expert (bf16, NVLink), and the fullest rank has at least a twentieth too many."""


def num_clones(recipe: Recipe, world_size: int) -> int:
    """Return the number of replica slots of a rank.

    "auto" means 0 in these cases:
    * collectives would have to send the weights of clones;
    * a GEMM would need a copy of the rank's own weights (dispatch/clone_weights.py): experts are sharded, compute has
      the master's dtype, or blocks are graphs;
    * weights of clones would be fetched again for recomputation, or by two interleaved microbatches at once;
    * experts are in fp8.
    """
    p, moe = recipe.parallel, recipe.model.moe
    if p.expert_clones != "auto":
        return p.fixed_expert_clones
    is_a_copy = recipe.precision.compute != recipe.precision.master
    are_unsharded = resolve(p, world_size).experts_are_unsharded(recipe.precision)
    device = "cpu" if recipe.run.device == "cpu" else "cuda"
    has_room = is_a_copy and are_unsharded and not recipe.compile.compiles_blocks(device)
    is_plain = p.overlap != "microbatch" and recipe.memory.recompute == "none"
    num_slots = microbatch_tokens(recipe) * p.etp * moe.top_k
    pays = p.facts.shares_memory_of_ep and p.ep > 1 and num_slots >= MIN_SLOTS and recipe.model.num_moe_layers > 0
    has_codes = has_native_experts(recipe)
    return min(NUM_CLONES, moe.num_experts // p.ep) if pays and has_room and is_plain and not has_codes else 0


def resolve_clones(recipe: Recipe, world_size: int) -> Recipe:
    """Replace "auto" by the number that it means."""
    return replace(recipe, parallel=replace(recipe.parallel, expert_clones=num_clones(recipe, world_size)))
