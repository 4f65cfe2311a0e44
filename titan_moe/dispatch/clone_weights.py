"""Weights of clones come from their homes, and their gradients go back.

P ranks of the group · e experts at home on each rank · c spare slots of each rank · I all spare slots (P·c), rank by
rank · N elements of an expert

The host knows no plan, so no message can have its size. Between equals every rank sends c experts to every other, most
of which nobody reads, in one message, and the gradients of its c clones go to all: (P-1)·c experts arrive at a rank on
each way, however few are cloned, 66 MB of Qwen3-30B-A3B's in bf16 with 8 ranks and one spare slot. A rank that reaches
its peers' memory reads what it wants and no more: c experts, 9.4 MB.
"""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from titan_moe.dispatch.cloning import CloningExchange
from titan_moe.dispatch.collectives import all_gather, all_to_all
from titan_moe.dispatch.symm_mem import SymmMemory
from titan_moe.kernels.symm_mem.arrays import SymmArray
from titan_moe.kernels.symm_mem.barrier import symm_barrier
from titan_moe.kernels.symm_mem.clones import add_gradients, clone_arrays, pull_weights, stage_gradients, stage_weights


class Gradients(NamedTuple):
    """Of what comes out of a fetch."""

    x_SD: Tensor
    own_gate_up: Tensor
    own_down: Tensor
    gate_up: Tensor
    """Of clones, as the next."""
    down: Tensor


class CloneWeights(ABC):
    """Fetch clones for an exchange; how they travel is a subclass's.

    Own weights go through it, so that their gradient and what clones send home are summed in one place; and the rows
    that arrived: over shared memory clones come behind them, and gradients of clones leave before theirs, in a graph
    too. (Rows that experts will fetch themselves go through it as they lie at home, and no graph orders them.)
    """

    def __call__(self, x_SD: Tensor, gate_up: Tensor, down: Tensor, exchange: CloningExchange) -> tuple[Tensor, ...]:
        """Rows [S, D], or this rank's own, and own weights [e, ...] -> the same, and clones' weights [c, ...];
        differentiable. What is in an empty slot nobody reads."""
        return _Fetch.apply(x_SD, gate_up, down, exchange.experts_Pc, self)

    @abstractmethod
    def fetch(self, x_SD: Tensor, gate_up: Tensor, down: Tensor, experts_Pc: Tensor) -> tuple[Tensor, Tensor]:
        """Own weights -> the clones', once the rows that the exchange brings, if it does, are there."""

    @abstractmethod
    def add_home(self, grads: Gradients, experts_Pc: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Gradients of the rows, as they are, and of own weights, to which everyone's clones' are added in rank order,
        in at least fp32, rounding once."""


class _Fetch(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x_SD: Tensor, gate_up: Tensor, down: Tensor, experts_Pc: Tensor, fetcher: CloneWeights
    ) -> tuple[Tensor, ...]:
        ctx.save_for_backward(experts_Pc)
        ctx.fetcher = fetcher
        own = x_SD.view_as(x_SD), gate_up.view_as(gate_up), down.view_as(down)
        return *own, *fetcher.fetch(x_SD, gate_up, down, experts_Pc)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        return *ctx.fetcher.add_home(Gradients(*grads), *ctx.saved_tensors), None, None


class CollectiveCloneWeights(CloneWeights):
    """By collectives, in which all ranks send and get as much."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        self.group, self.rank = group, dist.get_rank(group)

    def fetch(self, x_SD: Tensor, gate_up: Tensor, down: Tensor, experts_Pc: Tensor) -> tuple[Tensor, Tensor]:
        num_experts, (num_ranks, num_replicas) = gate_up.shape[0], experts_Pc.shape
        # where this rank is not the home, any expert: what it sends is not read
        sent_I = (experts_Pc % num_experts).flatten()
        equal = [num_replicas] * num_ranks
        both_IN = all_to_all(_pack(gate_up[sent_I], down[sent_I]), equal, equal, self.group)
        home_c = (experts_Pc[self.rank] // num_experts).clamp(min=0)
        return _unpack(both_IN[home_c * num_replicas + torch.arange(num_replicas, device=home_c.device)], gate_up, down)

    def add_home(self, grads: Gradients, experts_Pc: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        x_SD, own_gate_up, own_down, gate_up, down = grads
        both_IN = all_gather(_pack(gate_up, down), self.group)
        num_experts = own_gate_up.shape[0]
        # the same operations on every rank, as in allgather.py
        local_I = torch.where(experts_Pc // num_experts == self.rank, experts_Pc % num_experts, -1).flatten()
        is_clone_eI = torch.arange(num_experts, device=local_I.device)[:, None] == local_I
        all_gate_up, all_down = _unpack(both_IN, gate_up, down)
        return x_SD, _add(own_gate_up, is_clone_eI, all_gate_up), _add(own_down, is_clone_eI, all_down)


def _pack(gate_up: Tensor, down: Tensor) -> Tensor:
    """Both weights of an expert in one row: one message, and no order of two that ranks could differ in."""
    return torch.cat([gate_up.flatten(1), down.flatten(1)], dim=1)


def _unpack(both: Tensor, gate_up: Tensor, down: Tensor) -> tuple[Tensor, Tensor]:
    """Rows of both weights -> views, in the shapes of experts like these."""
    width = gate_up[0].numel()
    return both[:, :width].unflatten(1, gate_up.shape[1:]), both[:, width:].unflatten(1, down.shape[1:])


def _add(own_eN: Tensor, is_clone_eI: Tensor, clones_IN: Tensor) -> Tensor:
    """Add each expert's clones to it: a product with zeros and ones.

    So one that is not finite makes all sums so: the step is void then, whichever expert it began with.
    """
    sums = torch.addmm(own_eN.flatten(1), is_clone_eI.to(own_eN.dtype), clones_IN.flatten(1))
    return sums.view_as(own_eN)


class SymmMemCloneWeights(CloneWeights):
    """Out of the memory that the ranks share, in exchanges like those of `SymmMemDispatcher`: between its own, on their
    stream."""

    def __init__(self, memory: SymmMemory) -> None:
        self.memory = memory

    def fetch(self, x_SD: Tensor, gate_up: Tensor, down: Tensor, experts_Pc: Tensor) -> tuple[Tensor, Tensor]:
        return _get_clones(x_SD, gate_up, down, experts_Pc, *self.memory)

    def add_home(self, grads: Gradients, experts_Pc: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        # sums are made in place: these are the gradients of one use, which nobody else has seen
        own_gate_up, own_down = grads.own_gate_up.contiguous(), grads.own_down.contiguous()
        if torch.compiler.is_compiling():  # where they may be parts of one tensor that a graph knows as a whole
            own_gate_up, own_down = own_gate_up.clone(), own_down.clone()
        _add_clones(grads.x_SD, own_gate_up, own_down, grads.gate_up, grads.down, experts_Pc, *self.memory)
        return grads.x_SD, own_gate_up, own_down


@torch.library.custom_op("titan_moe::symm_get_clones", mutates_args=())
def _get_clones(
    x_SD: Tensor, gate_up: Tensor, down: Tensor, experts_Pc: Tensor, memory: Tensor, peer_ptrs_P: Tensor, rank: int
) -> tuple[Tensor, Tensor]:
    """The rows are not read: who needs them comes after the exchange that brought them."""
    weights, experts_Pc = (gate_up.contiguous(), down.contiguous()), experts_Pc.contiguous()
    signals, staged = _place_for(weights, len(gate_up), experts_Pc, memory, peer_ptrs_P)
    symm_barrier(signals, rank)
    stage_weights(weights, experts_Pc, staged, rank)
    symm_barrier(signals, rank)
    return pull_weights(weights, experts_Pc, staged, rank)


@_get_clones.register_fake
def _(
    x_SD: Tensor, gate_up: Tensor, down: Tensor, experts_Pc: Tensor, memory: Tensor, peer_ptrs_P: Tensor, rank: int
) -> tuple[Tensor, Tensor]:
    num_replicas = experts_Pc.shape[1]
    return gate_up.new_empty(num_replicas, *gate_up.shape[1:]), down.new_empty(num_replicas, *down.shape[1:])


@torch.library.custom_op("titan_moe::symm_add_clones", mutates_args=("dx_SD", "own_gate_up", "own_down"))
def _add_clones(
    dx_SD: Tensor, own_gate_up: Tensor, own_down: Tensor, gate_up: Tensor, down: Tensor, experts_Pc: Tensor,
    memory: Tensor, peer_ptrs_P: Tensor, rank: int,
) -> None:  # fmt: skip
    """The rows' gradients are not touched: who reads what this may have changed comes after it."""
    clones, experts_Pc = (gate_up, down), experts_Pc.contiguous()
    signals, staged = _place_for(clones, len(own_gate_up), experts_Pc, memory, peer_ptrs_P)
    symm_barrier(signals, rank)
    stage_gradients(clones, staged)
    symm_barrier(signals, rank)
    add_gradients((own_gate_up, own_down), experts_Pc, staged, rank)


def _place_for(
    weights: Sequence[Tensor], num_local_experts: int, experts_Pc: Tensor, memory: Tensor, peer_ptrs_P: Tensor
) -> tuple[SymmArray, SymmArray]:
    num_elements = sum(weight[0].numel() for weight in weights)
    return clone_arrays(memory, peer_ptrs_P, num_local_experts, experts_Pc.shape[1], num_elements, weights[0].dtype)
