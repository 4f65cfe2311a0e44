"""Times of the messages of a rank, and how much of them nothing hides. All in seconds."""

from titan_moe.config.modules import modules_of
from titan_moe.config.parallel import ranks_of_a_node
from titan_moe.config.precision import BYTES_OF_DTYPE
from titan_moe.config.recipe import Recipe, microbatch_tokens
from titan_moe.plan.cost.links import rows_sent
from titan_moe.plan.cost.rates import Rates

EXPOSED = {"none": 1.0, "tile": 0.5, "microbatch": 0.25}
"""By `parallel.overlap`, the share of rows' messages that takes time of its own (tools/results/parallel.md)."""
EXPOSED_BY_TP_OVERLAP = 0.5
EXPOSED_SHARDING = 0.15
"""Of gathers and reductions that there is enough to compute beside: the first and last ones."""
TAKEN_BY_NCCL = 0.45
"""Of the time that bytes take over a node's links, what kernels beside NCCL lose: its thread blocks hold SMs, for which
GEMMs with a block an SM wait, and its sums read and write memory. Slower links take no more of it."""
HIDING = 0.85
"""Of the time to compute, that gathers and reductions may take unseen."""
BARRIERS = 50e-6
"""Seconds of the waits of a MoE layer for the other ranks of its ep group, in a forward and a backward."""


def link_rate(rates: Rates, num_ranks: int, world_size: int, *, in_node: float = 0.0) -> float:
    """Bytes a second of messages among so many consecutive ranks."""
    return (in_node or rates.link) if num_ranks <= ranks_of_a_node(world_size) else rates.node_link


def rows_seconds(recipe: Recipe, world_size: int, rates: Rates) -> float:
    """A MoE layer's rows of a microbatch, one way: a dispatch, or a combine, of forward or backward."""
    p = recipe.parallel
    row_bytes = microbatch_tokens(recipe) * recipe.model.expert_width * BYTES_OF_DTYPE[recipe.precision.compute]
    seconds = row_bytes * (p.etp - 1) / link_rate(rates, p.etp, world_size)
    if p.ep == 1:
        return seconds
    sent = rows_sent(recipe, world_size)
    within = rates.link if p.facts.shares_memory else rates.collective_rows
    if p.facts.sends == "every_row":
        within = rates.link
    # links between nodes and within them work at the same time where a row is sent once a rank
    ways = (sent.across * p.etp * row_bytes / rates.node_link, sent.within * p.etp * row_bytes / within)
    return seconds + (sum(ways) if p.facts.has_two_levels else max(ways))


def tensor_seconds(recipe: Recipe, world_size: int, rates: Rates, layer: int) -> float:
    """Gathers and sums over tp of a layer in a forward, of which backward has as many."""
    p = recipe.parallel
    if p.tp == 1:
        return 0.0
    modules = [row for row in modules_of(recipe.model, p) if row.is_in(layer)]
    pairs = sum(row.path.endswith((".out", ".down")) and row.own_widths != row.widths for row in modules)
    size = microbatch_tokens(recipe) * recipe.model.hidden_size * BYTES_OF_DTYPE[recipe.precision.compute]
    rate = link_rate(rates, p.tp, world_size, in_node=rates.split_collectives)
    exposed = EXPOSED_BY_TP_OVERLAP if p.tp_comm_overlap else 1.0
    return 2 * pairs * (p.tp - 1) * size / rate * exposed


def context_seconds(recipe: Recipe, world_size: int, rates: Rates, layer: int) -> float:
    """Exchanges of attention over cp of a layer in a forward, of which backward has as many."""
    p = recipe.parallel
    if p.cp == 1:
        return 0.0
    received = sum(row.received for row in modules_of(recipe.model, p) if row.is_in(layer))
    size = microbatch_tokens(recipe) * received * BYTES_OF_DTYPE[recipe.precision.compute]
    return size / link_rate(rates, p.cp * p.tp, world_size, in_node=rates.split_collectives)


def stage_seconds(recipe: Recipe, world_size: int, rates: Rates) -> float:
    """A message to the next pipeline rank."""
    size = microbatch_tokens(recipe) * recipe.model.hidden_size * BYTES_OF_DTYPE[recipe.precision.compute]
    per_stage = world_size // recipe.parallel.pp
    return size / link_rate(rates, 2 * per_stage, world_size)


def sharding_exposed(seconds: float, compute: float, in_node: float) -> float:
    """What gathers and reductions add to a step that computes for so long beside them. `in_node` is the time of as many
    bytes over the links of a node."""
    return max(EXPOSED_SHARDING * seconds + TAKEN_BY_NCCL * in_node, seconds - HIDING * compute)
