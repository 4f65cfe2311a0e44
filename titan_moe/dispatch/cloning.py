"""A dispatcher around another one, with clones of hot experts on ranks with less load.

P ranks of the group · E experts · e experts that each rank owns · c replica slots of each rank · T tokens on this rank
K experts a token

The inner dispatcher sees e + c experts on a rank: its own, and those in its replica slots. This file plans the clones
and reassigns assignments to them; clone_weights.py exchanges the weights. Beside the inner dispatcher's communication,
a table of P·E counts is gathered. The host reads nothing.

The plan is some 70 small operations, and 50 for each replica slot. Launching them one by one costs the host more than
clones save. So the plan is compiled, and clones pay only in recorded steps.
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
    """The inner dispatcher's exchange, and the contents of the replica slots."""

    inner: Exchange
    experts_Pc: Tensor
    """int64, the expert in each replica slot, -1 for none."""


class CloningDispatcher(TokenDispatcher):
    """Plan clones for every exchange; the inner dispatcher sends the rows to them."""

    def __init__(self, inner: TokenDispatcher, num_experts: int, num_replicas: int, group: dist.ProcessGroup) -> None:
        """`num_experts` is the layer's total; `inner` must be built for `group.size() * num_replicas` more."""
        super().__init__(inner.permute, inner.capacity)
        self.inner, self.group = inner, group
        self.facts = inner.facts
        self.num_experts, self.num_replicas = num_experts, num_replicas
        self.rank = dist.get_rank(group)
        self.assign_replicas = assign_replicas

    def compile_pieces(self, compiled: Callable[[Any], Any]) -> None:
        self.assign_replicas = compiled(self.assign_replicas)
        self.inner.compile_pieces(compiled)

    def prepare(self, topk_ids_TK: Tensor, topk_scores_TK: Tensor) -> CloningExchange:
        index_TK, counts_E = self._index_within_expert(topk_ids_TK, topk_scores_TK.detach())
        counts_PE = all_gather(counts_E[None], self.group)
        ids_TK, experts_Pc = self.assign_replicas(topk_ids_TK, index_TK, counts_PE, self.num_replicas, self.rank)
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

    def _index_within_expert(self, ids_TK: Tensor, scores_TK: Tensor) -> tuple[Tensor, Tensor]:
        """Index of each assignment among this rank's assignments to its expert, in token order; int64 counts [E]."""
        slots = self.permute(ids_TK, scores_TK, self.num_experts, ids_TK.numel())
        ends_E = slots.offsets_e.long()
        counts_E = ends_E.diff(prepend=ends_E.new_zeros(1))
        return slots.slots_SK - (ends_E - counts_E)[ids_TK.long().clamp(min=0)], counts_E


def assign_replicas(
    ids_TK: Tensor, index_TK: Tensor, counts_PE: Tensor, num_replicas: int, rank: int
) -> tuple[Tensor, Tensor]:
    """Plan the clones, and reassign this rank's assignments.

    Returns: ids of the inner dispatcher's experts, where a rank's replica slots follow its own experts, -1 for none;
    and the experts in the replica slots [P, c].
    """
    plan = plan_clones(counts_PE, num_replicas)
    replica_TK = replica_slots(ids_TK, index_TK, reassign(counts_PE, plan, rank, stride=ids_TK.numel() + 1))
    num_own = counts_PE.shape[1] // counts_PE.shape[0]
    owner_TK = ids_TK // num_own * (num_own + num_replicas) + ids_TK % num_own
    clone_TK = replica_TK // num_replicas * (num_own + num_replicas) + num_own + replica_TK % num_replicas
    ids_TK = torch.where(ids_TK < 0, -1, torch.where(replica_TK < 0, owner_TK, clone_TK.to(ids_TK.dtype)))
    return ids_TK, plan.experts_Pc
