"""Every rank of the group sees every row and serves those that its experts want.

P ranks of the group · T tokens on each of them · K choices · e experts on this rank · D width

Bytes: (P-1)·T·D elements arrive and as many leave again in the reduce-scatter, whatever the routing: good for few
ranks and many choices. Sizes are static, so the host reads nothing: slots are laid out for the worst case,
P·T·min(K, e), or up to a bound over the balanced load, T·K.
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
    """The choices of the whole group, on their way: `finish_dispatch` waits for them."""

    ids_SK: Pending
    scores_SK: Pending


class AllGatherDispatcher(TokenDispatcher):
    """Gather the rows of all ranks, reduce-scatter the results. Every rank must bring the same number of tokens."""

    facts = ALLGATHER

    def __init__(
        self,
        num_experts: int,
        group: dist.ProcessGroup,
        permute: Permute = sort_by_expert,
        capacity: ExpertCapacity | None = None,
        wire: Collectives = SYNC,
    ) -> None:
        """`num_experts` is the layer's total; `group` holds the ranks that share it; `bound` bounds the slots; `wire`
        carries the messages."""
        super().__init__(permute)
        self.group, self.wire = group, wire
        self.capacity = capacity or ExpertCapacity()
        self.num_local_experts = num_experts // group.size()
        self.rank = dist.get_rank(group)

    def prepare(self, topk_ids_TK: Tensor, topk_scores_TK: Tensor) -> AllGatherExchange:
        start = self.wire.all_gather.start
        return AllGatherExchange(start(topk_ids_TK, self.group), start(topk_scores_TK, self.group))

    def start_dispatch(self, x_TD: Tensor, exchange: AllGatherExchange) -> Pending:
        return self.wire.all_gather.start(x_TD, self.group)

    def finish_dispatch(self, sent: Pending, exchange: AllGatherExchange) -> Routed:
        wait = self.wire.all_gather.wait
        slots = self._permute(wait(exchange.ids_SK, self.group), wait(exchange.scores_SK, self.group))
        return routed(wait(sent, self.group), slots, exchange=None)  # the way back needs nothing

    def start_combine(self, y_SD: Tensor, exchange: None) -> Pending:
        # sums on the way: what a rank gets back is its tokens' results, reduced
        return self.wire.reduce_scatter.start(y_SD, self.group)

    def finish_combine(self, y: Pending, exchange: None) -> Tensor:
        return self.wire.reduce_scatter.wait(y, self.group)

    def _permute(self, ids_SK: Tensor, scores_SK: Tensor) -> Permutation:
        # the same operations on every rank: a compiler that saw `ids - 0` on the first rank alone could order that
        # rank's messages differently
        is_here_SK = ids_SK // self.num_local_experts == self.rank
        local_ids_SK = torch.where(is_here_SK, ids_SK % self.num_local_experts, -1)
        num_rows, num_choices = ids_SK.shape
        num_slots = self.capacity.num_slots(
            local_ids_SK,
            balanced=num_rows * num_choices // self.group.size(),
            worst=num_rows * min(num_choices, self.num_local_experts),
        )
        slots = self.permute(local_ids_SK, scores_SK, self.num_local_experts, num_slots)
        if self.capacity.is_bounded:
            self.capacity.book(slots.overflowed)
        return slots
