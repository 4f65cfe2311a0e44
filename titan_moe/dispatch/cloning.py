"""Any dispatcher, with clones of hot experts on ranks that have room.

P ranks of the group · E experts · e experts at home on each rank · c spare slots of each rank · T tokens · K choices

To the dispatcher inside, a rank has e + c experts: its own ones, and whatever lies in its spare slots. Here is decided
what that is, and which choices it takes over; `clone_weights.py` brings the weights. Beside what the dispatcher inside
moves, a table of P·E counts is gathered; nothing is read by the host.

The plan is some 70 small operations and 50 for each spare slot, a lot for a host to launch one by one, so it is a piece
to compile. On 4 H200s, the fullest at 1.2 times the mean, steps of 24 layers of Qwen3 took 558 ms with clones and 566
without where they were recorded; launched 621 and 581.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from titan_moe.dispatch.base import Exchange, ExpertInputs, Pending, TokenDispatcher
from titan_moe.dispatch.clone_plan import plan_clones, reassign, replica_slots
from titan_moe.dispatch.collectives import all_gather


class CloningExchange(NamedTuple):
    """What the dispatcher inside remembers, and what lies in the spare slots."""

    inner: Exchange
    experts_Pc: Tensor
    """int64, the expert in each rank's spare slots, -1 for none."""


class CloningDispatcher(TokenDispatcher):
    """Plan clones for every exchange, and let another dispatcher move the rows to them."""

    def __init__(self, inner: TokenDispatcher, num_experts: int, num_replicas: int, group: dist.ProcessGroup) -> None:
        """`num_experts` is the layer's total; `inner` was built for `group.size() * num_replicas` more."""
        super().__init__(inner.permute)
        self.inner, self.group = inner, group
        self.capacity, self.facts = inner.capacity, inner.facts
        self.num_experts, self.num_replicas = num_experts, num_replicas
        self.rank = dist.get_rank(group)
        self.assign_replicas = assign_replicas

    def compile_pieces(self, compiled: Callable[[Any], Any]) -> None:
        self.assign_replicas = compiled(self.assign_replicas)
        self.inner.compile_pieces(compiled)

    def prepare(self, topk_ids_TK: Tensor, topk_scores_TK: Tensor) -> CloningExchange:
        nth_TK, counts_E = self._number(topk_ids_TK, topk_scores_TK.detach())
        counts_PE = all_gather(counts_E[None], self.group)
        ids_TK, experts_Pc = self.assign_replicas(topk_ids_TK, nth_TK, counts_PE, self.num_replicas, self.rank)
        return CloningExchange(self.inner.prepare(ids_TK, topk_scores_TK), experts_Pc)

    def start_dispatch(self, x_TD: Tensor, exchange: CloningExchange) -> Pending:
        return self.inner.start_dispatch(x_TD, exchange.inner)

    def finish_dispatch(self, sent: Pending, exchange: CloningExchange) -> ExpertInputs:
        inputs = self.inner.finish_dispatch(sent, exchange.inner)
        return inputs.with_exchange(exchange._replace(inner=inputs.exchange))

    def start_combine(self, y_SD: Tensor, exchange: CloningExchange) -> Pending:
        return self.inner.start_combine(y_SD, exchange.inner)

    def finish_combine(self, y: Pending, exchange: CloningExchange) -> Tensor:
        return self.inner.finish_combine(y, exchange.inner)

    def _number(self, ids_TK: Tensor, scores_TK: Tensor) -> tuple[Tensor, Tensor]:
        """Number this rank's choices of each expert, in token order: -> numbers [T, K] and int64 counts [E]."""
        slots = self.permute(ids_TK, scores_TK, self.num_experts, ids_TK.numel())
        ends_E = slots.offsets_e.long()
        counts_E = ends_E.diff(prepend=ends_E.new_zeros(1))
        return slots.slots_SK - (ends_E - counts_E)[ids_TK.long().clamp(min=0)], counts_E


def assign_replicas(
    ids_TK: Tensor, nth_TK: Tensor, counts_PE: Tensor, num_replicas: int, rank: int
) -> tuple[Tensor, Tensor]:
    """Decide where every choice of this rank is served.

    Returns: the choices as experts of the dispatcher inside, a rank's own ones before its spare slots, -1 for none; and
    what lies in the spare slots [P, c].
    """
    plan = plan_clones(counts_PE, num_replicas)
    spare_TK = replica_slots(ids_TK, nth_TK, reassign(counts_PE, plan, rank, stride=ids_TK.numel() + 1))
    own = counts_PE.shape[1] // counts_PE.shape[0]
    home_TK = ids_TK // own * (own + num_replicas) + ids_TK % own
    clone_TK = spare_TK // num_replicas * (own + num_replicas) + own + spare_TK % num_replicas
    ids_TK = torch.where(ids_TK < 0, -1, torch.where(spare_TK < 0, home_TK, clone_TK.to(ids_TK.dtype)))
    return ids_TK, plan.experts_Pc
