"""Numbers of rows that are sent between nodes and within them.

An ep group is M nodes of G ranks: neighbours, or with etp every etp-th rank of a node. Random routing gives a token K
of E experts without replacement, so the numbers of its experts on a rank or on a node are hypergeometric.
"""

import math
from typing import NamedTuple

from titan_moe.config.model import MoEConfig
from titan_moe.config.parallel import ParallelConfig, ep_ranks_of_a_node
from titan_moe.config.precision import BYTES_OF_DTYPE
from titan_moe.config.recipe import Recipe, microbatch_tokens
from titan_moe.plan.cost.loads import visit_probability


class RowsSent(NamedTuple):
    """The average number of times that a token's row is sent to another rank."""

    across: float
    """Between nodes."""
    within: float
    """Between the ranks of a node, on the way from other nodes too."""

    @property
    def all(self) -> float:
        """Over any link."""
        return self.across + self.within


def rows_sent(recipe: Recipe, world_size: int, sends: str = "") -> RowsSent:
    """Count the rows that a dispatch sends, or a combine brings back, for each token.

    `sends` is as in `DispatcherFacts`; that of the recipe's dispatcher if it is empty. An ep group that does not divide
    into nodes counts as one node.
    """
    num_ranks, moe = recipe.parallel.ep, recipe.model.moe
    of_node = ep_ranks_of_a_node(recipe.parallel, world_size)
    of_node = num_ranks if num_ranks % of_node else of_node
    on_nodes, num_experts = num_ranks - of_node, moe.num_experts // num_ranks
    match sends or recipe.parallel.facts.sends:
        case "nothing":
            return RowsSent(0.0, 0.0)
        case "every_row":
            return RowsSent(on_nodes, of_node - 1)
        case "once_a_node":
            to_node = chosen_probability(moe, num_experts * of_node)
            if recipe.parallel.facts.can_be_bounded:  # static sizes, of which the rest is empty
                to_node = min(to_node * _room(recipe.parallel), 1.0)
            to_rank = chosen_probability(moe, num_experts)
            # the rank that a row crosses to forwards it to the others there: one of G ranks needs no link
            return RowsSent(on_nodes / of_node * to_node, (num_ranks - num_ranks // of_node) * to_rank)
        case _:
            to_rank = chosen_probability(moe, num_experts)
            return RowsSent(on_nodes * to_rank, (of_node - 1) * to_rank)


def chosen_probability(moe: MoEConfig, num_local_experts: int) -> float:
    """The probability that a token chooses one of so many consecutive experts, where all choices that the router's
    groups allow are equally likely. Parts that cut a group in unequal pieces count as without groups. Layers that route
    by token id have no groups, and are counted as those that do: their rows go to more ranks than this says."""
    groups, chosen = moe.num_groups, moe.top_k_groups
    of_group = moe.num_experts // max(groups, 1)
    if chosen >= groups or (of_group % num_local_experts and num_local_experts % of_group):
        return visit_probability(moe.num_experts, num_local_experts, moe.top_k)
    own, size = max(num_local_experts // of_group, 1), min(num_local_experts, of_group)
    return sum(
        math.comb(own, some) * math.comb(groups - own, chosen - some) / math.comb(groups, chosen)
        * visit_probability(chosen * of_group, some * size, moe.top_k)
        for some in range(min(own, chosen) + 1)
    )  # fmt: skip


def _room(parallel: ParallelConfig) -> float:
    """Rows that are sent to a node over those that random routing needs, at most all: what "auto" adds is left out."""
    if parallel.has_auto_capacity:
        return 1.0
    return parallel.fixed_capacity_factor or math.inf


def describe_links(recipe: Recipe, world_size: int) -> str:
    """Describe what a rank sends between nodes and within its node in the forward of a layer; empty if its ep group is
    on one node."""
    p = recipe.parallel
    sent = rows_sent(recipe, world_size)
    if not sent.across:
        return ""
    row_bytes = recipe.model.expert_width * BYTES_OF_DTYPE[recipe.precision.compute]
    forward_bytes = 2 * microbatch_tokens(recipe) * p.etp * row_bytes  # and the results; a rank sends for its etp group
    across, within = (f"{times * forward_bytes / 2**20:,.1f}" for times in sent)
    words = (
        f"a token's row is sent {sent.across:.2f} times between nodes of {ep_ranks_of_a_node(p, world_size)} ranks and "
        f"{sent.within:.2f} times within: {across} and {within} MiB a rank, for a layer's dispatch and combine"
    )
    if p.facts.has_two_levels:
        once_a_rank = rows_sent(recipe, world_size, "once_a_rank")
        words += f' ("alltoall": {once_a_rank.across:.2f} and {once_a_rank.within:.2f} times)'
    return words
