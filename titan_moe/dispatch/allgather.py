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

from titan_moe.dispatch.base import Routed, TokenDispatcher, routed
from titan_moe.dispatch.bound import SlotBound
from titan_moe.dispatch.wire import all_gather, reduce_scatter
from titan_moe.kernels.slots import LayOut, lay_out_slots


class AllGatherExchange(NamedTuple):
    """The choices of the whole group, as this rank sees them."""

    local_ids_SK: Tensor
    """int, expert on this rank, -1 where the choice is another rank's."""
    scores_SK: Tensor


class AllGatherDispatcher(TokenDispatcher):
    """Gather the rows of all ranks, reduce-scatter the results. Every rank must bring the same number of tokens."""

    reads_host = False

    def __init__(
        self,
        num_experts: int,
        group: dist.ProcessGroup,
        lay_out: LayOut = lay_out_slots,
        bound: SlotBound | None = None,
    ) -> None:
        """`num_experts` is the layer's total; `group` holds the ranks that share it; `bound` bounds the slots."""
        super().__init__(lay_out)
        self.group = group
        self.bound = bound or SlotBound()
        self.num_local_experts = num_experts // group.size()
        self.rank = dist.get_rank(group)

    def prepare(self, topk_ids_TK: Tensor, topk_scores_TK: Tensor) -> AllGatherExchange:
        ids_SK = all_gather(topk_ids_TK, self.group)
        # the same operations on every rank: a compiler that saw `ids - 0` on the first rank alone could order that
        # rank's messages differently
        is_here_SK = ids_SK // self.num_local_experts == self.rank
        local_ids_SK = torch.where(is_here_SK, ids_SK % self.num_local_experts, -1)
        scores_SK = all_gather(topk_scores_TK, self.group)
        return AllGatherExchange(local_ids_SK, scores_SK)

    def send(self, x_TD: Tensor, exchange: AllGatherExchange) -> Routed:
        local_ids_SK, scores_SK = exchange
        num_rows, num_choices = local_ids_SK.shape
        num_slots = self.bound.num_slots(
            balanced=num_rows * num_choices // self.group.size(),
            worst=num_rows * min(num_choices, self.num_local_experts),
        )
        x_SD = all_gather(x_TD, self.group)
        slots = self.lay_out(local_ids_SK, scores_SK, self.num_local_experts, num_slots)
        if self.bound.can_overflow:
            self.bound.book(slots.overflowed)
        return routed(x_SD, slots, exchange)

    def send_back(self, y_SD: Tensor, exchange: AllGatherExchange) -> Tensor:
        # sums on the way: what a rank gets back is its tokens' results, reduced
        return reduce_scatter(y_SD, self.group)

    def reduce(self, y: Tensor, exchange: AllGatherExchange) -> Tensor:
        return y
