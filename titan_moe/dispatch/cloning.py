"""Any dispatcher, with clones of hot experts on ranks that have room.

P ranks of the group · E experts · e experts at home on each rank · c spare slots of each rank · T tokens · K choices

To the dispatcher inside, a rank has e + c experts: its own ones, and whatever lies in its spare slots. Here is decided
what that is, and which choices it takes over; `clone_weights.py` brings the weights. Beside what the dispatcher inside
moves, a table of P·E counts is gathered; nothing is read by the host.
"""

from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from titan_moe.dispatch.base import Exchange, Routed, TokenDispatcher
from titan_moe.dispatch.clone_plan import plan_clones, spare_slots, takeovers
from titan_moe.dispatch.wire import all_gather


class CloningExchange(NamedTuple):
    """What the dispatcher inside remembers, and what lies in the spare slots."""

    inner: Exchange
    experts_Pc: Tensor
    """int64, the expert in each rank's spare slots, -1 for none."""


class CloningDispatcher(TokenDispatcher):
    """Plan clones for every exchange, and let another dispatcher move the rows to them."""

    def __init__(self, inner: TokenDispatcher, num_experts: int, num_spare: int, group: dist.ProcessGroup) -> None:
        """`num_experts` is the layer's total; `inner` was built for `group.size() * num_spare` more."""
        super().__init__(inner.lay_out)
        self.inner, self.group = inner, group
        self.bound, self.reads_host = inner.bound, inner.reads_host
        self.num_experts, self.num_spare = num_experts, num_spare
        self.num_local_experts = num_experts // group.size()
        self.rank = dist.get_rank(group)

    def prepare(self, topk_ids_TK: Tensor, topk_scores_TK: Tensor) -> CloningExchange:
        nth_TK, counts_E = self._number(topk_ids_TK, topk_scores_TK.detach())
        counts_PE = all_gather(counts_E[None], self.group)
        plan = plan_clones(counts_PE, self.num_spare)
        taken = takeovers(counts_PE, plan, self.rank, stride=topk_ids_TK.numel() + 1)
        ids_TK = self._places(topk_ids_TK, spare_slots(topk_ids_TK, nth_TK, taken))
        return CloningExchange(self.inner.prepare(ids_TK, topk_scores_TK), plan.experts_Pc)

    def send(self, x_TD: Tensor, exchange: CloningExchange) -> Routed:
        routed = self.inner.send(x_TD, exchange.inner)
        return routed._replace(exchange=exchange._replace(inner=routed.exchange))

    def send_back(self, y_SD: Tensor, exchange: CloningExchange) -> Tensor:
        return self.inner.send_back(y_SD, exchange.inner)

    def reduce(self, y: Tensor, exchange: CloningExchange) -> Tensor:
        return self.inner.reduce(y, exchange.inner)

    def _number(self, ids_TK: Tensor, scores_TK: Tensor) -> tuple[Tensor, Tensor]:
        """Number this rank's choices of each expert, in token order: -> numbers [T, K] and int64 counts [E]."""
        slots = self.lay_out(ids_TK, scores_TK, self.num_experts, ids_TK.numel())
        ends_E = slots.offsets_e.long()
        counts_E = ends_E.diff(prepend=ends_E.new_zeros(1))
        return slots.slots_SK - (ends_E - counts_E)[ids_TK.long().clamp(min=0)], counts_E

    def _places(self, ids_TK: Tensor, spare_TK: Tensor) -> Tensor:
        """The expert, as the dispatcher inside counts them: own ones of a rank before its spare slots."""
        num_places = self.num_local_experts + self.num_spare
        home_TK = ids_TK // self.num_local_experts * num_places + ids_TK % self.num_local_experts
        clone_TK = spare_TK // self.num_spare * num_places + self.num_local_experts + spare_TK % self.num_spare
        return torch.where(ids_TK < 0, -1, torch.where(spare_TK < 0, home_TK, clone_TK.to(ids_TK.dtype)))
