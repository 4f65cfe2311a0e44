"""Weights of clones come from their homes, and their gradients go back.

P ranks of the group · e experts at home on each rank · c spare slots of each rank · I all spare slots (P·c), rank by
rank · N elements of an expert

In sizes that depend on nothing, so that the host need not know the plan: every rank sends c experts to every other,
most of which nobody reads, in one message; the gradients of its c clones go to all. So (P-1)·c experts arrive at a rank
on each way, however few are cloned: with 8 ranks and one spare slot, 66 MB of Qwen3-30B-A3B's in bf16. A rank that
reaches its peers' memory would pull at most c, and another `FetchClones` is all that it takes.
"""

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from titan_moe.dispatch.cloning import CloningExchange
from titan_moe.dispatch.wire import all_gather, all_to_all

FetchClones = Callable[[Tensor, Tensor, CloningExchange], tuple[Tensor, ...]]
"""A rank's own gate_up and down, and what was planned -> own gate_up and down, the clones' gate_up and down.

Own weights go through it, so that their gradient and what clones send home are summed in one place."""


class CloneFetcher:
    """Fetch clones by messages between equals."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        self.group, self.rank = group, dist.get_rank(group)

    def __call__(self, gate_up: Tensor, down: Tensor, exchange: CloningExchange) -> tuple[Tensor, ...]:
        """[e, ...] -> [e, ...] and [c, ...]; differentiable. An empty slot holds some expert that nobody reads."""
        return _Fetch.apply(gate_up, down, exchange.experts_Pc, self.group, self.rank)


class _Fetch(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, gate_up: Tensor, down: Tensor, experts_Pc: Tensor, group: dist.ProcessGroup, rank: int
    ) -> tuple[Tensor, ...]:
        ctx.save_for_backward(experts_Pc)
        ctx.group, ctx.rank = group, rank
        num_experts, (num_ranks, num_spare) = gate_up.shape[0], experts_Pc.shape
        # where this rank is not the home, any expert: what it sends is not read
        sent_I = (experts_Pc % num_experts).flatten()
        equal = [num_spare] * num_ranks
        both_IN = all_to_all(_pack(gate_up[sent_I], down[sent_I]), equal, equal, group)
        home_c = (experts_Pc[rank] // num_experts).clamp(min=0)
        both_cN = both_IN[home_c * num_spare + torch.arange(num_spare, device=home_c.device)]
        return gate_up.view_as(gate_up), down.view_as(down), *_unpack(both_cN, gate_up, down)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        own_gate_up, own_down, gate_up, down = grads
        (experts_Pc,) = ctx.saved_tensors
        both_IN = all_gather(_pack(gate_up, down), ctx.group)
        num_experts = own_gate_up.shape[0]
        # the same operations on every rank, as in allgather.py
        local_I = torch.where(experts_Pc // num_experts == ctx.rank, experts_Pc % num_experts, -1).flatten()
        is_clone_eI = torch.arange(num_experts, device=local_I.device)[:, None] == local_I
        homecoming = zip((own_gate_up, own_down), _unpack(both_IN, gate_up, down), strict=True)
        return *(_add(own, is_clone_eI, clones) for own, clones in homecoming), None, None, None


def _pack(gate_up: Tensor, down: Tensor) -> Tensor:
    """Both weights of an expert in one row: one message, and no order of two that ranks could differ in."""
    return torch.cat([gate_up.flatten(1), down.flatten(1)], dim=1)


def _unpack(both: Tensor, gate_up: Tensor, down: Tensor) -> tuple[Tensor, Tensor]:
    """Rows of both weights -> views, in the shapes of experts like these."""
    width = gate_up[0].numel()
    return both[:, :width].unflatten(1, gate_up.shape[1:]), both[:, width:].unflatten(1, down.shape[1:])


def _add(own_eN: Tensor, is_clone_eI: Tensor, clones_IN: Tensor) -> Tensor:
    """Add each expert's clones to it, in rank order, in at least fp32, rounding once: a product with zeros and ones.

    So one that is not finite makes all sums so: the step is void then, whichever expert it began with.
    """
    sums = torch.addmm(own_eN.flatten(1), is_clone_eI.to(own_eN.dtype), clones_IN.flatten(1))
    return sums.view_as(own_eN)
