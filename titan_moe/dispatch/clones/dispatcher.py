"""A dispatcher around another one, with clones of hot experts on ranks with less load.

P ranks of the group · E experts · e experts that each rank owns · c replica slots of each rank · T tokens on this rank
K experts a token

The inner dispatcher sees e + c experts on a rank: its own, and those in its replica slots. This file has the clones
planned and assignments reassigned to them (kernels/clones/); weights.py exchanges the weights. Beside the inner
dispatcher's communication, a table of P·E counts is gathered, over symmetric memory if there is any. The host reads
nothing.
"""

from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from titan_moe.dispatch.base import Exchange, ExpertInputs, Pending, TokenDispatcher
from titan_moe.dispatch.collectives import all_gather
from titan_moe.dispatch.symm_mem.memory import SymmMemory
from titan_moe.kernels.clones.plan import ClonePlan, empty_plan, launch_plan, plan_clones, plan_clones_reference
from titan_moe.kernels.clones.reassign import reassign, reassign_reference
from titan_moe.kernels.permute.counting_sort import counting_sort
from titan_moe.kernels.symm_mem.barrier import symm_barrier
from titan_moe.kernels.symm_mem.clones import count_arrays, send_counts


class CloningExchange(NamedTuple):
    """The inner dispatcher's exchange, and the contents of the replica slots."""

    inner: Exchange
    experts_Pc: Tensor
    """int64, the expert in each replica slot, -1 for none."""
    num_own: int
    """Experts that each rank owns."""


class CloningDispatcher(TokenDispatcher):
    """Plan clones for every exchange; the inner dispatcher sends the rows to them."""

    def __init__(
        self,
        inner: TokenDispatcher,
        num_experts: int,
        num_replicas: int,
        group: dist.ProcessGroup,
        memory: SymmMemory | None = None,
        cost: int = 0,
    ) -> None:
        """`num_experts` is the layer's total; `inner` must be built for `group.size() * num_replicas` more. Counts are
        exchanged over `memory`, that of `inner`, or by a collective of `group` without it. `cost` as for
        `plan_clones`."""
        super().__init__(inner.permute, inner.capacity)
        self.inner, self.group, self.memory = inner, group, memory
        self.facts = inner.facts
        self.num_experts, self.num_replicas, self.cost = num_experts, num_replicas, cost
        self.rank = dist.get_rank(group)
        is_triton = memory is not None or inner.permute is counting_sort
        self.plan_clones = plan_clones if is_triton else plan_clones_reference
        self.reassign = reassign if is_triton else reassign_reference

    def prepare(self, topk_ids_TK: Tensor, topk_scores_TK: Tensor) -> CloningExchange:
        slots = self.permute(topk_ids_TK, topk_scores_TK.detach(), self.num_experts, topk_ids_TK.numel())
        plan = self._plan(slots.offsets_e)
        ids_TK = self.reassign(topk_ids_TK, slots.slots_SK, slots.offsets_e, *plan)
        num_own = self.num_experts // self.group.size()
        return CloningExchange(self.inner.prepare(ids_TK, topk_scores_TK), plan.experts_Pc, num_own)

    def start_dispatch(self, x_TD: Tensor, exchange: CloningExchange) -> Pending:
        return self.inner.start_dispatch(x_TD, exchange.inner)

    def finish_dispatch(self, sent: Pending, exchange: CloningExchange) -> ExpertInputs:
        inputs = self.inner.finish_dispatch(sent, exchange.inner)
        return inputs.with_exchange(exchange._replace(inner=inputs.exchange))

    def start_combine(self, y_SD: Tensor, exchange: CloningExchange) -> Pending:
        return self.inner.start_combine(y_SD, exchange.inner)

    def finish_combine(self, y: Pending, exchange: CloningExchange) -> Tensor:
        return self.inner.finish_combine(y, exchange.inner)

    def _plan(self, offsets_E: Tensor) -> ClonePlan:
        """The plan, from the running ends of this rank's assignments to each expert."""
        if self.memory is not None:
            return ClonePlan(*_plan_over_symm_mem(offsets_E, *self.memory, self.num_replicas, self.cost))
        counts_E = offsets_E.diff(prepend=offsets_E.new_zeros(1))
        return self.plan_clones(all_gather(counts_E[None], self.group), self.num_replicas, self.rank, self.cost)


@torch.library.custom_op("titan_moe::symm_plan_clones", mutates_args=())
def _plan_over_symm_mem(
    offsets_E: Tensor, memory: Tensor, peer_ptrs_P: Tensor, rank: int, num_replicas: int, cost: int
) -> tuple[Tensor, Tensor, Tensor]:
    signals, counts = count_arrays(memory, peer_ptrs_P, len(offsets_E))
    symm_barrier(signals, rank)
    send_counts(offsets_E.contiguous(), counts, rank)
    symm_barrier(signals, rank)
    return tuple(launch_plan(counts.local, num_replicas, rank, cost, signals.local))


@_plan_over_symm_mem.register_fake
def _(
    offsets_E: Tensor, memory: Tensor, peer_ptrs_P: Tensor, rank: int, num_replicas: int, cost: int
) -> tuple[Tensor, ...]:
    return tuple(empty_plan(offsets_E.new_empty(peer_ptrs_P.numel(), len(offsets_E)), num_replicas))
