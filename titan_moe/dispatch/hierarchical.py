"""Hierarchical dispatcher: a row is sent once to each node that needs it, and there once to each rank that does.

P ranks of the ep group = M nodes of G ranks · T tokens on this rank · K experts a token · e experts on a rank
U rows that this rank receives from other nodes and forwards · S rows received within the node · R slots

```
 rank g of the token's node      rank g of another node               ranks of that node
 x_TD ── across nodes, once ───► x_UD ── within the node, once a rank ──► x_SD
 y_TD ◄─ sum over M nodes ────── y_UD ◄─ sum over G ranks of the node ─── y_SD
```

The network between nodes is several times slower than the links within a node. With 8 of 128 experts over 4 nodes of
8 ranks, `alltoall` sends a token's row to other nodes 5.5 times, this dispatcher 2.7 times. Rows of a rank cross to
ranks of the same index alone, as in DeepEP and in the hierarchical all-to-all of Tutel (arXiv:2206.03382). Within nodes
it sends more: what has crossed is forwarded (plan/links.py counts both).

Numerics: the sums over the ranks of a node and over nodes are in at least fp32 and in rank order. Between the two a sum
is rounded once to the dtype of rows, which `alltoall` does not do; so is the gradient of a row.

Sizes depend on the routing. Counts of both stages are exchanged together, so the host reads once a layer. With
asynchronous collectives the exchange between nodes overlaps with other work; that within the node is waited for.
"""

from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from titan_moe.config.dispatchers import HIERARCHICAL
from titan_moe.dispatch.alltoall import count_slots, own_experts
from titan_moe.dispatch.base import Pending, Routed, TokenDispatcher, routed
from titan_moe.dispatch.collectives import SYNC, Collectives, all_to_all
from titan_moe.dispatch.row_exchange import PendingRows, RowCopies, RowExchange, copy_rows
from titan_moe.dispatch.row_format import PLAIN
from titan_moe.kernels.permute.permutation import Permute, sort_by_expert


class NodeGroups(NamedTuple):
    """The two groups of a rank, inside its ep group."""

    across: dist.ProcessGroup
    """The ranks of the same index in all nodes, in node order (M)."""
    within: dist.ProcessGroup
    """The ranks of this node (G)."""


def open_node_groups(group: dist.ProcessGroup, ranks_per_node: int) -> NodeGroups:
    """Split a group whose consecutive ranks are on one node, into groups of its backend. A collective call of its ranks
    alone."""
    ranks, rank = dist.get_process_group_ranks(group), dist.get_rank(group)
    node, index = divmod(rank, ranks_per_node)
    within = ranks[node * ranks_per_node : (node + 1) * ranks_per_node]
    across = ranks[index::ranks_per_node]
    # other ep groups do not take part, and need not come
    options = {"backend": dist.get_backend_config(group), "use_local_synchronization": True}
    return NodeGroups(dist.new_group(across, **options), dist.new_group(within, **options))


class Sizes(NamedTuple):
    """Numbers of rows and slots, read by the host."""

    sent_M: list[int]
    """Rows to each node."""
    received_M: list[int]
    """Rows from each node; their sum is U."""
    forwarded_G: list[int]
    """Of these, rows to each rank of this node."""
    received_G: list[int]
    """Rows from each rank of this node; their sum is S."""
    num_slots: int
    """Slots of this rank's experts (R), exact."""


class HierarchicalExchange(NamedTuple):
    """The routing, and what is sent across nodes and within this node."""

    ids_TK: Tensor
    scores_TK: Tensor
    sizes: Sizes
    across: RowCopies
    within: RowCopies | None = None
    """Of the rows that this rank forwards: known once their ids are here."""


class HierarchicalDispatcher(TokenDispatcher):
    """Send rows over two levels of links. Ranks may have different numbers of tokens, also none."""

    facts = HIERARCHICAL

    def __init__(
        self,
        num_experts: int,
        groups: NodeGroups,
        permute: Permute = sort_by_expert,
        collectives: Collectives = SYNC,
        row_format: str = PLAIN,
    ) -> None:
        """`num_experts` is the layer's total, divided among the ranks of both groups, nodes first; `collectives` are
        synchronous or asynchronous; `row_format` is how rows and gradients of results are sent (row_format.py)."""
        super().__init__(permute)
        self.groups = groups
        self.across, self.within = (RowExchange(group, collectives, row_format) for group in groups)
        self.num_nodes, self.ranks_per_node = groups.across.size(), groups.within.size()
        self.num_local_experts = num_experts // (self.num_nodes * self.ranks_per_node)
        self.node, self.index = dist.get_rank(groups.across), dist.get_rank(groups.within)

    def prepare(self, topk_ids_TK: Tensor, topk_scores_TK: Tensor) -> HierarchicalExchange:
        nodes = self.num_nodes, self.ranks_per_node
        slots_TMG = count_slots(topk_ids_TK, self.num_local_experts, self.num_nodes * self.ranks_per_node)
        slots_TMG = slots_TMG.unflatten(1, nodes)
        needed_TMG = slots_TMG > 0
        sent_mask_TM = needed_TMG.any(2)
        sizes = self._read_counts(sent_mask_TM.sum(0), torch.stack([needed_TMG.sum(0), slots_TMG.sum(0)], dim=-1))
        across = copy_rows(sent_mask_TM, sizes.sent_M, sizes.received_M)
        return HierarchicalExchange(topk_ids_TK, topk_scores_TK, sizes, across)

    def start_dispatch(self, x_TD: Tensor, exchange: HierarchicalExchange) -> PendingRows:
        ids_UK = exchange.ids_TK[exchange.across.tokens_U]
        return self.across.start(x_TD, ids_UK, exchange.scores_TK, exchange.across)

    def finish_dispatch(self, pending: PendingRows, exchange: HierarchicalExchange) -> Routed:
        sizes, experts_of_node = exchange.sizes, self.ranks_per_node * self.num_local_experts
        ids_UK, scores_UK = self.across.wait_assignments(pending, exchange.across)
        ids_UK = own_experts(ids_UK, self.node * experts_of_node, experts_of_node)
        sent_mask_UG = count_slots(ids_UK, self.num_local_experts, self.ranks_per_node) > 0
        within = copy_rows(sent_mask_UG, sizes.forwarded_G, sizes.received_G)
        x_UD = self.across.wait_rows(pending, exchange.across)
        forwarded = self.within.start(x_UD, ids_UK[within.tokens_U], scores_UK, within)
        ids_SK, scores_SK = self.within.wait_assignments(forwarded, within)
        local_ids_SK = own_experts(ids_SK, self.index * self.num_local_experts, self.num_local_experts)
        slots = self.permute(local_ids_SK, scores_SK, self.num_local_experts, sizes.num_slots)
        return routed(self.within.wait_rows(forwarded, within), slots, exchange._replace(within=within))

    def start_combine(self, y_SD: Tensor, exchange: HierarchicalExchange) -> Pending:
        assert exchange.within is not None, "a combine follows its dispatch"
        y_UD = self.within.sum_back(self.within.start_back(y_SD, exchange.within), exchange.within)
        return self.across.start_back(y_UD, exchange.across)

    def finish_combine(self, pending: Pending, exchange: HierarchicalExchange) -> Tensor:
        return self.across.sum_back(pending, exchange.across)

    def _read_counts(self, rows_M: Tensor, counts_MG2: Tensor) -> Sizes:
        """Exchange the numbers of rows and slots, across nodes and then within them: the only host read of a layer.

        Args:
            rows_M: this rank's rows for each node.
            counts_MG2: of these, rows and slots for each rank there.
        """
        (num_nodes, ranks_per_node, _), (across, within) = counts_MG2.shape, self.groups
        sent_MC = torch.cat([rows_M[:, None], counts_MG2.flatten(1)], dim=1)
        received_MC = all_to_all(sent_MC, [1] * num_nodes, [1] * num_nodes, across)
        forwarded_G2 = received_MC[:, 1:].sum(0).view(ranks_per_node, 2)
        received_G2 = all_to_all(forwarded_G2, [1] * ranks_per_node, [1] * ranks_per_node, within)
        of_ranks = torch.cat([forwarded_G2, received_G2], dim=1).flatten()
        read = torch.cat([rows_M, received_MC[:, 0], of_ranks]).tolist()
        sent_M, received_M, of_ranks_4G = read[:num_nodes], read[num_nodes : 2 * num_nodes], read[2 * num_nodes :]
        forwarded_G, _, received_G, slots_G = (of_ranks_4G[i::4] for i in range(4))
        return Sizes(sent_M, received_M, forwarded_G, received_G, sum(slots_G))
