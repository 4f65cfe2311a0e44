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
it sends more: what has crossed is forwarded (plan/cost/links.py counts both).

Rows cross nodes by all-to-all. Within a node they have one of two ways, which give the same bits:

* `ByCollectives`: sizes depend on the routing. Counts of both stages are exchanged together, so the host reads once a
  layer. Ranks may have different numbers of tokens, also none.
* `OverSymmMem`: the kernels of symm_mem.py, without a host read: all sizes are static. A rank sends C rows to every
  node, of which the last are empty; C is what random routing needs times the capacity factor, at most T. So a bound
  costs bytes on the network. Within a node no more rows are read than are needed. A token that finds no room sets the
  flag of the capacity, and the step is taken again with C = T. Every rank must have the same number of tokens. A graph
  of a whole block that contains it needs the barriers of compile/read_backs.py on GPUs, which recipes add; without
  them its gradients were wrong.

Numerics: the sums over the ranks of a node and over nodes are in at least fp32 and in rank order. Between the two a sum
is rounded once to the dtype of rows, which `alltoall` does not do; so is the gradient of a row.

With asynchronous collectives the exchange between nodes overlaps with other work; that within the node is waited for in
`finish_dispatch` and `start_combine`, in the same order on all ranks.
"""

from abc import ABC, abstractmethod
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from titan_moe.config.dispatchers import HIERARCHICAL, HIERARCHICAL_SYMM_MEM, DispatcherFacts
from titan_moe.dispatch.alltoall import count_slots, own_experts
from titan_moe.dispatch.base import Pending, Routed, TokenDispatcher, routed
from titan_moe.dispatch.capacity import ExpertCapacity
from titan_moe.dispatch.collectives import SYNC, Collectives, all_to_all
from titan_moe.dispatch.row_exchange import PendingRows, RowCopies, RowExchange, copy_rows
from titan_moe.dispatch.symm_mem.dispatcher import symm_get, symm_plan, symm_put
from titan_moe.dispatch.symm_mem.memory import SymmMemory
from titan_moe.kernels.experts.formats import COMPUTE
from titan_moe.kernels.permute.permutation import Permutation, Permute, sort_by_expert
from titan_moe.kernels.symm_mem.row_plan import RowPlan
from titan_moe.plan.cost.loads import visit_probability


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

    ids_UK: Tensor
    """Experts of the rows that this rank sends, -1 for an empty row."""
    scores_TK: Tensor
    across: RowCopies
    sizes: Sizes | None = None
    """None where they are static."""
    within: Any = None
    """The inner exchange's plan, of the rows that this rank forwards: known once their ids are here."""


class InnerExchange(ABC):
    """What a node decides: how many rows cross to it, and how they get to the ranks of their experts and back."""

    facts: DispatcherFacts

    @abstractmethod
    def prepare(self, ids_TK: Tensor, scores_TK: Tensor) -> HierarchicalExchange:
        """Number the rows that cross."""

    @abstractmethod
    def plan(self, ids_UK: Tensor, exchange: HierarchicalExchange) -> Any:
        """Plan the way of the rows that have crossed; `ids_UK` are -1 for experts of other nodes."""

    @abstractmethod
    def send(
        self, x_UD: Tensor, scores_UK: Tensor, ids_UK: Tensor, exchange: HierarchicalExchange
    ) -> tuple[Tensor, Permutation]:
        """Send them by the plan: -> x_SD, and the slots of this rank's experts."""

    @abstractmethod
    def send_back(self, y_SD: Tensor, plan: Any) -> Tensor:
        """Send partial results back, and sum those of each row over the ranks of the node: -> y_UD."""


class HierarchicalDispatcher(TokenDispatcher):
    """Send rows over two levels of links."""

    def __init__(
        self,
        num_experts: int,
        groups: NodeGroups,
        permute: Permute = sort_by_expert,
        collectives: Collectives = SYNC,
        row_format: str = COMPUTE,
        *,
        memory: SymmMemory | None = None,
        capacity: ExpertCapacity | None = None,
        num_routed_experts: int | None = None,
    ) -> None:
        """`num_experts` is the layer's total, divided among the ranks of both groups, nodes first; `collectives` are
        synchronous or asynchronous; `row_format` is how rows and gradients of results are sent (`FORMATS`).

        With `memory`, of the ranks of this node for M·T tokens on each, rows within it are sent there, and `capacity`
        bounds rows and slots. `num_routed_experts` is smaller than `num_experts` if that counts replica slots."""
        super().__init__(permute, capacity)
        self.groups, (num_nodes, ranks_per_node) = groups, (groups.across.size(), groups.within.size())
        self.across = RowExchange(groups.across, collectives, row_format)
        num_local_experts = num_experts // (num_nodes * ranks_per_node)
        self.experts_of_node = ranks_per_node * num_local_experts
        self.first_expert_of_node = dist.get_rank(groups.across) * self.experts_of_node
        self.within: InnerExchange
        if memory is None:
            rows = RowExchange(groups.within, collectives, row_format)
            self.within = ByCollectives(num_local_experts, groups, permute, rows)
        else:
            num_routed = num_routed_experts or num_experts
            layer = num_local_experts, num_nodes, memory, permute, self.capacity, num_routed, row_format
            self.within = OverSymmMem(*layer)
        self.facts = self.within.facts

    def prepare(self, topk_ids_TK: Tensor, topk_scores_TK: Tensor) -> HierarchicalExchange:
        return self.within.prepare(topk_ids_TK, topk_scores_TK)

    def start_dispatch(self, x_TD: Tensor, exchange: HierarchicalExchange) -> PendingRows:
        return self.across.start(x_TD, exchange.ids_UK, exchange.scores_TK, exchange.across)

    def finish_dispatch(self, pending: PendingRows, exchange: HierarchicalExchange) -> Routed:
        ids_UK, scores_UK = self.across.wait_assignments(pending, exchange.across)
        ids_UK = own_experts(ids_UK, self.first_expert_of_node, self.experts_of_node)
        exchange = exchange._replace(within=self.within.plan(ids_UK, exchange))
        x_UD = self.across.wait_rows(pending, exchange.across)
        return routed(*self.within.send(x_UD, scores_UK, ids_UK, exchange), exchange)

    def start_combine(self, y_SD: Tensor, exchange: HierarchicalExchange) -> Pending:
        assert exchange.within is not None, "a combine follows its dispatch"
        return self.across.start_back(self.within.send_back(y_SD, exchange.within), exchange.across)

    def finish_combine(self, pending: Pending, exchange: HierarchicalExchange) -> Tensor:
        return self.across.sum_back(pending, exchange.across)


class ByCollectives(InnerExchange):
    """All-to-alls of exact sizes. A plan is the copies that are sent."""

    facts = HIERARCHICAL

    def __init__(self, num_local_experts: int, groups: NodeGroups, permute: Permute, rows: RowExchange) -> None:
        """`rows` are exchanged within the node."""
        self.num_local_experts, self.groups, self.permute, self.rows = num_local_experts, groups, permute, rows
        self.num_nodes, self.ranks_per_node = groups.across.size(), groups.within.size()
        self.first_expert = dist.get_rank(groups.within) * num_local_experts  # of those of the node

    def prepare(self, ids_TK: Tensor, scores_TK: Tensor) -> HierarchicalExchange:
        slots_TP = count_slots(ids_TK, self.num_local_experts, self.num_nodes * self.ranks_per_node)
        slots_TMG = slots_TP.unflatten(1, (self.num_nodes, self.ranks_per_node))
        needed_TMG = slots_TMG > 0
        sent_mask_TM = needed_TMG.any(2)
        sizes = self._read_counts(sent_mask_TM.sum(0), torch.stack([needed_TMG.sum(0), slots_TMG.sum(0)], dim=-1))
        across = copy_rows(sent_mask_TM, sizes.sent_M, sizes.received_M)
        return HierarchicalExchange(ids_TK[across.tokens_U], scores_TK, across, sizes)

    def plan(self, ids_UK: Tensor, exchange: HierarchicalExchange) -> RowCopies:
        assert exchange.sizes is not None, "prepare has read them"
        sent_mask_UG = count_slots(ids_UK, self.num_local_experts, self.ranks_per_node) > 0
        return copy_rows(sent_mask_UG, exchange.sizes.forwarded_G, exchange.sizes.received_G)

    def send(
        self, x_UD: Tensor, scores_UK: Tensor, ids_UK: Tensor, exchange: HierarchicalExchange
    ) -> tuple[Tensor, Permutation]:
        assert exchange.sizes is not None, "prepare has read them"
        plan, num_slots = exchange.within, exchange.sizes.num_slots
        pending = self.rows.start(x_UD, ids_UK[plan.tokens_U], scores_UK, plan)
        ids_SK, scores_SK = self.rows.wait_assignments(pending, plan)
        ids_SK = own_experts(ids_SK, self.first_expert, self.num_local_experts)
        slots = self.permute(ids_SK, scores_SK, self.num_local_experts, num_slots)
        return self.rows.wait_rows(pending, plan), slots

    def send_back(self, y_SD: Tensor, plan: RowCopies) -> Tensor:
        return self.rows.sum_back(self.rows.start_back(y_SD, plan), plan)

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


class SymmMemPlan(NamedTuple):
    """The plan of an exchange over symmetric memory."""

    rows: RowPlan
    max_rows: int
    """Number of rows that this rank has room for."""


class OverSymmMem(InnerExchange):
    """Kernels that access peers' memory, and static sizes."""

    facts = HIERARCHICAL_SYMM_MEM

    def __init__(
        self,
        num_local_experts: int,
        num_nodes: int,
        memory: SymmMemory,
        permute: Permute,
        capacity: ExpertCapacity,
        num_routed_experts: int,
        row_format: str,
    ) -> None:
        self.num_local_experts, self.num_routed_experts = num_local_experts, num_routed_experts
        self.memory, self.permute, self.capacity, self.row_format = memory, permute, capacity, row_format
        self.num_nodes, self.ranks_per_node = num_nodes, len(memory.peer_ptrs_P)
        self.num_ranks = num_nodes * self.ranks_per_node

    def prepare(self, ids_TK: Tensor, scores_TK: Tensor) -> HierarchicalExchange:
        num_tokens, experts_of_node = len(ids_TK), self.ranks_per_node * self.num_local_experts
        sent_mask_TM = count_slots(ids_TK, experts_of_node, self.num_nodes) > 0
        expected = num_tokens * self._visits(ids_TK, num_parts=self.num_nodes)
        rows_of_node = self.capacity.num_rows(expected, worst=num_tokens)
        most = sent_mask_TM.sum(0).max()
        self.capacity.record_load(most, expected, (most > rows_of_node).int())
        copies_TM, tokens_U = _number_copies(sent_mask_TM, rows_of_node)
        is_row_U = tokens_U < num_tokens
        tokens_U = torch.where(is_row_U, tokens_U, 0)  # an empty row is any existing one, for no expert
        ids_UK = torch.where(is_row_U[:, None], ids_TK[tokens_U], -1)
        splits = [rows_of_node] * self.num_nodes
        return HierarchicalExchange(ids_UK, scores_TK, RowCopies(tokens_U, copies_TM, splits, splits))

    def plan(self, ids_UK: Tensor, exchange: HierarchicalExchange) -> SymmMemPlan:
        worst = self.ranks_per_node * len(ids_UK)
        max_rows = self.capacity.num_rows(self._expected_rows(exchange.scores_TK), worst)
        rows = RowPlan(*symm_plan(ids_UK, *self.memory, self.num_local_experts, max_rows))
        return SymmMemPlan(rows, int(rows.recv_offsets_Q[-1]) if self.capacity.reads_sizes_on_host else max_rows)

    def send(
        self, x_UD: Tensor, scores_UK: Tensor, ids_UK: Tensor, exchange: HierarchicalExchange
    ) -> tuple[Tensor, Permutation]:
        capacity, num_local, (plan, max_rows) = self.capacity, self.num_local_experts, exchange.within
        x_SD, scores_SK, ids_SK = symm_get(
            x_UD, scores_UK, ids_UK, *plan[:3], *self.memory, num_local, self.row_format, max_rows
        )
        balanced, top_k = exchange.scores_TK.numel(), exchange.scores_TK.shape[1]
        num_slots = capacity.num_slots(ids_SK, balanced, worst=len(x_SD) * min(top_k, num_local))
        slots = self.permute(ids_SK, scores_SK, num_local, num_slots)
        capacity.record_load(plan.recv_offsets_Q[-1], self._expected_rows(exchange.scores_TK), plan.overflowed)
        capacity.record_load(slots.offsets_e[-1], balanced, slots.overflowed)
        return x_SD, slots

    def send_back(self, y_SD: Tensor, plan: SymmMemPlan) -> Tensor:
        return symm_put(y_SD, *plan.rows[:3], *self.memory, self.row_format)

    def _expected_rows(self, like_TK: Tensor) -> float:
        """The rows that a rank receives under random routing."""
        return len(like_TK) * self.num_ranks * self._visits(like_TK, num_parts=self.num_ranks)

    def _visits(self, like_TK: Tensor, num_parts: int) -> float:
        """The probability that random routing gives a token an expert of a node, or of a rank."""
        return visit_probability(self.num_routed_experts, self.num_routed_experts // num_parts, like_TK.shape[1])


def _number_copies(sent_mask_TM: Tensor, rows_of_node: int) -> tuple[Tensor, Tensor]:
    """Number the (node, token) pairs, C for each node: -> copies_TM, -1 for none or no room, and tokens_U, T for an
    empty row."""
    (num_tokens, num_nodes), device = sent_mask_TM.shape, sent_mask_TM.device
    # one scan over all pairs: Inductor of torch 2.11 cannot fuse a scan of each column with the column's number
    numbers_TM = sent_mask_TM.T.flatten().cumsum(0).view(num_nodes, num_tokens).T.contiguous()
    counts_M = sent_mask_TM.sum(0)
    index_TM = numbers_TM - 1 - (counts_M.cumsum(0) - counts_M)
    has_room_TM = sent_mask_TM & (index_TM < rows_of_node)
    copies_TM = index_TM + rows_of_node * torch.arange(num_nodes, device=device)
    # one extra element receives the pairs that are not sent
    targets_TM = torch.where(has_room_TM, copies_TM, rows_of_node * num_nodes)
    tokens_TM = torch.arange(num_tokens, device=device)[:, None].expand(sent_mask_TM.shape)
    tokens_U = torch.full((rows_of_node * num_nodes + 1,), num_tokens, dtype=torch.int64, device=device)
    tokens_U.scatter_(0, targets_TM.flatten(), tokens_TM.flatten())
    return torch.where(has_room_TM, copies_TM, -1).int(), tokens_U[:-1].int()
