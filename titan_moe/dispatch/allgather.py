"""All-gather dispatcher: every rank of the group receives every row and computes those of its experts.

P ranks of the group · T tokens on each rank · K experts a token · e experts on this rank · D width

Bytes: a rank receives (P-1)·T·D elements and sends as many in the reduce-scatter, for any routing. This suits few ranks
and large K. Sizes are static, so the host reads nothing. The number of slots is the worst case, P·T·min(K, e), or the
balanced load T·K times a capacity factor.
"""

from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from titan_moe.config.dispatchers import ALLGATHER
from titan_moe.dispatch.base import Pending, Routed, TokenDispatcher, routed
from titan_moe.dispatch.capacity import ExpertCapacity
from titan_moe.dispatch.collectives import SYNC, Collectives
from titan_moe.kernels.permute.permutation import Permutation, Permute, sort_by_expert


class AllGatherExchange(NamedTuple):
    """The pending all-gathers of ids and scores: `finish_dispatch` waits for them."""

    ids_SK: Pending
    scores_SK: Pending


class AllGatherDispatcher(TokenDispatcher):
    """All-gather the rows, reduce-scatter the results. Every rank must have the same number of tokens."""

    facts = ALLGATHER

    def __init__(
        self,
        num_experts: int,
        group: dist.ProcessGroup,
        permute: Permute = sort_by_expert,
        capacity: ExpertCapacity | None = None,
        collectives: Collectives = SYNC,
    ) -> None:
        """`num_experts` is the layer's total, divided among the ranks of `group`; `capacity` bounds the slots;
        `collectives` are synchronous or asynchronous."""
        super().__init__(permute, capacity)
        self.group, self.collectives = group, collectives
        self.num_local_experts = num_experts // group.size()
        self.rank = dist.get_rank(group)

    def prepare(self, topk_ids_TK: Tensor, topk_scores_TK: Tensor) -> AllGatherExchange:
        start = self.collectives.all_gather.start
        return AllGatherExchange(start(topk_ids_TK, self.group), start(topk_scores_TK, self.group))

    def start_dispatch(self, x_TD: Tensor, exchange: AllGatherExchange) -> Pending:
        return self.collectives.all_gather.start(x_TD, self.group)

    def finish_dispatch(self, pending: Pending, exchange: AllGatherExchange) -> Routed:
        wait = self.collectives.all_gather.wait
        slots = self._permute(wait(exchange.ids_SK, self.group), wait(exchange.scores_SK, self.group))
        return routed(wait(pending, self.group), slots, exchange=None)  # combine needs no state

    def start_combine(self, y_SD: Tensor, exchange: None) -> Pending:
        # the collective sums: a rank receives its tokens' reduced results
        return self.collectives.reduce_scatter.start(y_SD, self.group)

    def finish_combine(self, pending: Pending, exchange: None) -> Tensor:
        return self.collectives.reduce_scatter.wait(pending, self.group)

    def _permute(self, ids_SK: Tensor, scores_SK: Tensor) -> Permutation:
        # the same operations on every rank: a compiler that simplified `ids - 0` on the first rank alone could order
        # that rank's collectives differently
        is_local_SK = ids_SK // self.num_local_experts == self.rank
        local_ids_SK = torch.where(is_local_SK, ids_SK % self.num_local_experts, -1)
        num_rows, top_k = ids_SK.shape
        balanced, worst = num_rows * top_k // self.group.size(), num_rows * min(top_k, self.num_local_experts)
        num_ranks = self.group.size()
        worst = self.most_slots(worst, num_rows // num_ranks, num_ranks, self.num_local_experts)
        num_slots = self.capacity.num_slots(local_ids_SK, balanced, worst)
        slots = self.permute(local_ids_SK, scores_SK, self.num_local_experts, num_slots)
        self.capacity.record_load(slots.offsets_e[-1], balanced, slots.overflowed)
        return slots
