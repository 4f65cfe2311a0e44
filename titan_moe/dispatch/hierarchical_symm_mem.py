"""Hierarchical dispatcher over symmetric memory: rows once a node by all-to-all, then once a rank over NVLink.

P ranks of the ep group = M nodes of G ranks · T tokens on each rank · K experts a token · e experts on a rank
C rows that a rank sends to each node · U = M·C rows that it receives and forwards · S rows that a rank has room for

It sends the rows of `hierarchical` and has its numerics, bit for bit, without its host read: all sizes are static. A
rank sends C rows to every node, of which the last are empty; C is what random routing needs times the capacity factor,
at most T. So a bound costs bytes on the network: C·M rows, where `hierarchical` sends those that are needed. Within a
node the kernels of symm_mem.py plan and read no more than the rows that are needed. A token that finds no room sets the
flag of the capacity, and the step is taken again with C = T.

A graph of a whole block that contains it needs the barriers of compile/read_backs.py on GPUs, which recipes add;
without them its gradients were wrong.

Every rank must have the same number of tokens. The exchange between nodes may overlap with other work; that over
symmetric memory runs in `finish_dispatch` and `start_combine`, in the same order on all ranks.
"""

from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from titan_moe.config.dispatchers import HIERARCHICAL_SYMM_MEM
from titan_moe.dispatch.alltoall import count_slots, own_experts
from titan_moe.dispatch.base import Pending, Routed, TokenDispatcher, routed
from titan_moe.dispatch.capacity import ExpertCapacity
from titan_moe.dispatch.collectives import SYNC, Collectives
from titan_moe.dispatch.row_exchange import PendingRows, RowCopies, RowExchange
from titan_moe.dispatch.row_format import PLAIN
from titan_moe.dispatch.symm_mem import symm_get, symm_plan, symm_put
from titan_moe.dispatch.symm_memory import SymmMemory
from titan_moe.kernels.permute.permutation import Permute, sort_by_expert
from titan_moe.kernels.symm_mem.row_plan import RowPlan
from titan_moe.plan.loads import visit_probability


class HierarchicalSymmMemExchange(NamedTuple):
    """The routing, what is sent across nodes, and the plan within this node."""

    ids_UK: Tensor
    """Experts of the rows that this rank sends, -1 for an empty row."""
    scores_TK: Tensor
    across: RowCopies
    within: RowPlan | None = None
    """Of the rows that this rank forwards: known once their ids are here."""


class HierarchicalSymmMemDispatcher(TokenDispatcher):
    """Send rows by collectives between nodes and by kernels that access peers' memory within one."""

    facts = HIERARCHICAL_SYMM_MEM

    def __init__(
        self,
        num_experts: int,
        across: dist.ProcessGroup,
        memory: SymmMemory,
        permute: Permute = sort_by_expert,
        capacity: ExpertCapacity | None = None,
        num_routed_experts: int | None = None,
        collectives: Collectives = SYNC,
        row_format: str = PLAIN,
    ) -> None:
        """`num_experts` is the layer's total, divided among the ranks of `across` and of `memory`, nodes first.
        `memory` is of the ranks of this node, for M·T tokens on each. `capacity` bounds rows and slots.
        `num_routed_experts` is smaller than `num_experts` if that counts replica slots."""
        super().__init__(permute, capacity)
        self.memory, self.row_format = memory, row_format
        self.across = RowExchange(across, collectives, row_format)
        self.num_nodes, self.node, self.ranks_per_node = across.size(), dist.get_rank(across), len(memory.peer_ptrs_P)
        self.num_ranks = self.num_nodes * self.ranks_per_node
        self.num_routed_experts = num_routed_experts or num_experts
        self.num_local_experts = num_experts // self.num_ranks

    def prepare(self, topk_ids_TK: Tensor, topk_scores_TK: Tensor) -> HierarchicalSymmMemExchange:
        num_tokens, experts_of_node = len(topk_ids_TK), self.ranks_per_node * self.num_local_experts
        sent_mask_TM = count_slots(topk_ids_TK, experts_of_node, self.num_nodes) > 0
        expected = num_tokens * self._visits(topk_ids_TK, num_parts=self.num_nodes)
        rows_of_node = self.capacity.num_rows(expected, worst=num_tokens)
        most = sent_mask_TM.sum(0).max()
        self.capacity.record_load(most, expected, (most > rows_of_node).int())
        copies_TM, tokens_U = _number_copies(sent_mask_TM, rows_of_node)
        is_row_U = tokens_U < num_tokens
        tokens_U = torch.where(is_row_U, tokens_U, 0)  # an empty row is any existing one, for no expert
        ids_UK = torch.where(is_row_U[:, None], topk_ids_TK[tokens_U], -1)
        splits = [rows_of_node] * self.num_nodes
        return HierarchicalSymmMemExchange(ids_UK, topk_scores_TK, RowCopies(tokens_U, copies_TM, splits, splits))

    def start_dispatch(self, x_TD: Tensor, exchange: HierarchicalSymmMemExchange) -> PendingRows:
        return self.across.start(x_TD, exchange.ids_UK, exchange.scores_TK, exchange.across)

    def finish_dispatch(self, pending: PendingRows, exchange: HierarchicalSymmMemExchange) -> Routed:
        capacity, num_local = self.capacity, self.num_local_experts
        num_tokens, top_k = exchange.scores_TK.shape
        ids_UK, scores_UK = self.across.wait_assignments(pending, exchange.across)
        experts_of_node = self.ranks_per_node * num_local
        ids_UK = own_experts(ids_UK, self.node * experts_of_node, experts_of_node)
        expected = num_tokens * self.num_ranks * self._visits(exchange.scores_TK, num_parts=self.num_ranks)
        max_rows = capacity.num_rows(expected, worst=self.ranks_per_node * len(ids_UK))
        plan = RowPlan(*symm_plan(ids_UK, *self.memory, num_local, max_rows))
        if capacity.reads_sizes_on_host:
            max_rows = int(plan.recv_offsets_Q[-1])
        x_UD = self.across.wait_rows(pending, exchange.across)
        x_SD, scores_SK, ids_SK = symm_get(
            x_UD, scores_UK, ids_UK, *plan[:3], *self.memory, num_local, self.row_format, max_rows
        )
        balanced = num_tokens * top_k
        num_slots = capacity.num_slots(ids_SK, balanced, worst=len(x_SD) * min(top_k, num_local))
        slots = self.permute(ids_SK, scores_SK, num_local, num_slots)
        capacity.record_load(plan.recv_offsets_Q[-1], expected, plan.overflowed)
        capacity.record_load(slots.offsets_e[-1], balanced, slots.overflowed)
        return routed(x_SD, slots, exchange._replace(within=plan))

    def start_combine(self, y_SD: Tensor, exchange: HierarchicalSymmMemExchange) -> Pending:
        assert exchange.within is not None, "a combine follows its dispatch"
        y_UD = symm_put(y_SD, *exchange.within[:3], *self.memory, self.row_format)  # summed over the ranks of the node
        return self.across.start_back(y_UD, exchange.across)

    def finish_combine(self, pending: Pending, exchange: HierarchicalSymmMemExchange) -> Tensor:
        return self.across.sum_back(pending, exchange.across)

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
