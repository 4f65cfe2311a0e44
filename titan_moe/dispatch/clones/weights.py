"""Get weights of clones from their owners, and return their gradients.

P ranks of the group · e experts that each rank owns · c replica slots of each rank · I all replica slots (P·c), rank by
rank · N elements of an expert

The plan is on the device alone, so sizes are static. With collectives every rank sends c experts to every other, most
of which are not read, and the gradients of its c clones to all: each way a rank receives (P-1)·c experts, 66 MB of
Qwen3-30B-A3B in bf16 with 8 ranks and one replica slot. Over symmetric memory it reads c experts, 9.4 MB.
"""

from abc import ABC, abstractmethod
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from titan_moe.dispatch.clones.dispatcher import CloningExchange
from titan_moe.dispatch.collectives import all_gather, all_to_all
from titan_moe.dispatch.symm_mem.memory import SymmMemory
from titan_moe.kernels.experts.weights import ExpertUse, Tensors
from titan_moe.kernels.symm_mem.arrays import SymmArray
from titan_moe.kernels.symm_mem.barrier import symm_barrier
from titan_moe.kernels.symm_mem.clones import add_gradients, clone_arrays, pull_weights, stage_gradients, stage_weights


class CloneWeights(ABC):
    """The transform that gets the weights of an exchange's clones, if it has any; a subclass defines how they are
    communicated.

    Own weights pass through it, so that gradients of clones are added to theirs in one place. Rows pass through it, so
    that exchanges over symmetric memory keep their order in a graph: rows before clones, and gradients in reverse.
    """

    def __call__(self, use: ExpertUse) -> ExpertUse:
        """Rows [S, D], or this rank's own, and own weights [e, ...] -> the same, with clones [c, ...]; differentiable.
        Weights with room, [e + c, ...], have the clones in it: a GEMM needs no copy. The clone in an empty slot is
        undefined."""
        weights, x_SD, exchange = use
        if not isinstance(exchange, CloningExchange):
            return use
        has_room = len(weights.gate_up.own) > exchange.num_own
        function = partial(_FillRoom.apply, self, exchange.num_own) if has_room else partial(_GetClones.apply, self)
        x_SD, *tensors = function(x_SD, exchange.experts_Pc, self.after(exchange), *weights.tensors())
        return use._replace(weights=weights.with_tensors(tensors), rows=x_SD)

    def after(self, exchange: CloningExchange) -> Tensor:
        """A tensor, beside the rows, that orders the weights after the exchanges before theirs; none by default."""
        return exchange.experts_Pc[:0]

    @abstractmethod
    def get(self, x_SD: Tensor, own: Tensors, experts_Pc: Tensor, after: Tensor) -> Tensors:
        """Own weights -> those of clones, after the rows of the exchange."""

    def fill(self, room: Tensors, x_SD: Tensor, own: Tensors, experts_Pc: Tensor, after: Tensor) -> None:
        """Write the clones into the room behind own weights, [c, ...]; not in a graph."""
        for place, clone in zip(room, self.get(x_SD, own, experts_Pc, after), strict=True):
            place.copy_(clone)

    @abstractmethod
    def add(self, dx_SD: Tensor, own: Tensors, clones: Tensors, experts_Pc: Tensor) -> Tensors:
        """Add the gradients of all ranks' clones to those of own weights: in rank order, in at least fp32, rounded
        once. `dx_SD` is not changed."""


class _GetClones(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, clone_weights: CloneWeights, *tensors: Tensor) -> tuple[Tensor, ...]:
        # for Dynamo of torch 2.11, as in kernels/experts/fused_mlp.py
        x_SD, experts_Pc, after, *own = tensors
        ctx.save_for_backward(experts_Pc)
        ctx.clone_weights = clone_weights
        clones = clone_weights.get(x_SD, own, experts_Pc, after)
        return x_SD.view_as(x_SD), *[weight.view_as(weight) for weight in own], *clones

    @staticmethod
    def backward(ctx: Any, dx_SD: Tensor, *grads: Tensor) -> tuple[Tensor | None, ...]:
        (experts_Pc,) = ctx.saved_tensors
        own, clones = grads[: len(grads) // 2], grads[len(grads) // 2 :]
        return None, dx_SD, None, None, *ctx.clone_weights.add(dx_SD, own, clones, experts_Pc)


class _FillRoom(torch.autograd.Function):
    """Clones in the room behind own weights, not for graphs: it writes what it is given, gradients too."""

    @staticmethod
    def forward(ctx: Any, clone_weights: CloneWeights, num_own: int, *tensors: Tensor) -> tuple[Tensor, ...]:
        x_SD, experts_Pc, after, *roomy = tensors
        ctx.save_for_backward(experts_Pc)
        ctx.clone_weights, ctx.num_own = clone_weights, num_own
        own, room = zip(*[(weight[:num_own], weight[num_own:]) for weight in roomy], strict=True)
        clone_weights.fill(room, x_SD, own, experts_Pc, after)
        torch.autograd.graph.increment_version(roomy)  # a backward that still needs other clones there must fail
        return x_SD.view_as(x_SD), *[weight.view_as(weight) for weight in roomy]

    @staticmethod
    def backward(ctx: Any, dx_SD: Tensor, *grads: Tensor) -> tuple[Tensor | None, ...]:
        (experts_Pc,) = ctx.saved_tensors
        own, clones = zip(*[(grad[: ctx.num_own], grad[ctx.num_own :]) for grad in grads], strict=True)
        for grad, total in zip(own, ctx.clone_weights.add(dx_SD, own, clones, experts_Pc), strict=True):
            if total.data_ptr() != grad.data_ptr():
                grad.copy_(total)
        return None, None, dx_SD, None, None, *grads


class CollectiveCloneWeights(CloneWeights):
    """Communicate by collectives; all ranks send and receive equal sizes."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        self.group, self.rank = group, dist.get_rank(group)

    def get(self, x_SD: Tensor, own: Tensors, experts_Pc: Tensor, after: Tensor) -> Tensors:
        num_experts, (num_ranks, num_replicas) = own[0].shape[0], experts_Pc.shape
        # where this rank is not the owner, any expert: it is not read
        sent_I = (experts_Pc % num_experts).flatten()
        equal = [num_replicas] * num_ranks
        all_IN = all_to_all(_pack([weight[sent_I] for weight in own]), equal, equal, self.group)
        owner_c = (experts_Pc[self.rank] // num_experts).clamp(min=0)
        return _unpack(all_IN[owner_c * num_replicas + torch.arange(num_replicas, device=owner_c.device)], own)

    def add(self, dx_SD: Tensor, own: Tensors, clones: Tensors, experts_Pc: Tensor) -> Tensors:
        all_IN, num_experts = all_gather(_pack(clones), self.group), own[0].shape[0]
        # the same operations on every rank, as in allgather.py
        local_I = torch.where(experts_Pc // num_experts == self.rank, experts_Pc % num_experts, -1).flatten()
        is_clone_eI = torch.arange(num_experts, device=local_I.device)[:, None] == local_I
        return [_add(grad, is_clone_eI, all_grad) for grad, all_grad in zip(own, _unpack(all_IN, own), strict=True)]


def _pack(weights: Tensors) -> Tensor:
    """All parameters of an expert in one row, for one collective."""
    return torch.cat([weight.flatten(1) for weight in weights], dim=1)


def _unpack(packed_IN: Tensor, like: Tensors) -> list[Tensor]:
    """The inverse, as views in the shapes of `like`."""
    parts = packed_IN.split([weight[0].numel() for weight in like], dim=1)
    return [part.unflatten(1, weight.shape[1:]) for part, weight in zip(parts, like, strict=True)]


def _add(own_eN: Tensor, is_clone_eI: Tensor, clones_IN: Tensor) -> Tensor:
    """Add each expert's clones to it, as a product with zeros and ones. One nonfinite gradient makes all sums
    nonfinite; the step is skipped anyway."""
    sums = torch.addmm(own_eN.flatten(1), is_clone_eI.to(own_eN.dtype), clones_IN.flatten(1))
    return sums.view_as(own_eN)


class SymmMemCloneWeights(CloneWeights):
    """Communicate over symmetric memory, in exchanges between those of `SymmMemDispatcher`, on their stream."""

    def __init__(self, memory: SymmMemory) -> None:
        self.memory = memory

    def after(self, exchange: CloningExchange) -> Tensor:
        # fused experts get their rows after the weights, and before them there is the plan alone
        return exchange.inner.plan.recv_offsets_Q

    def get(self, x_SD: Tensor, own: Tensors, experts_Pc: Tensor, after: Tensor) -> Tensors:
        return _get_clones(x_SD, after, own, experts_Pc, *self.memory)

    def fill(self, room: Tensors, x_SD: Tensor, own: Tensors, experts_Pc: Tensor, after: Tensor) -> None:
        _exchange_weights(own, experts_Pc, *self.memory, room)

    def add(self, dx_SD: Tensor, own: Tensors, clones: Tensors, experts_Pc: Tensor) -> Tensors:
        # sums are in place: nothing else reads these gradients
        own = [grad.contiguous() for grad in own]
        if torch.compiler.is_compiling():  # in a graph they may be views of one tensor
            own = [grad.clone() for grad in own]
        _add_clones(dx_SD, own, clones, experts_Pc, *self.memory)
        return own


def _exchange_weights(
    own: Tensors, experts_Pc: Tensor, memory: Tensor, peer_ptrs_P: Tensor, rank: int, room: Tensors | None = None
) -> list[Tensor]:
    """Clones from their owners, in `room` if it is given."""
    own, experts_Pc = [weight.contiguous() for weight in own], experts_Pc.contiguous()
    signals, staged = _place_for(own, len(own[0]), experts_Pc, memory, peer_ptrs_P)
    symm_barrier(signals, rank)
    stage_weights(own, experts_Pc, staged, rank)
    symm_barrier(signals, rank)
    return list(pull_weights(own, experts_Pc, staged, rank, room))


@torch.library.custom_op("titan_moe::symm_get_clones", mutates_args=())
def _get_clones(
    x_SD: Tensor, after: Tensor, own: Tensors, experts_Pc: Tensor, memory: Tensor, peer_ptrs_P: Tensor, rank: int
) -> list[Tensor]:
    """Rows and `after` are not read; they order this after their exchanges."""
    return _exchange_weights(own, experts_Pc, memory, peer_ptrs_P, rank)


@_get_clones.register_fake
def _(x_SD: Tensor, after: Tensor, own: Tensors, experts_Pc: Tensor, *_: Any) -> list[Tensor]:
    return [weight.new_empty(experts_Pc.shape[1], *weight.shape[1:]) for weight in own]


@torch.library.custom_op("titan_moe::symm_add_clones", mutates_args=("dx_SD", "own"))
def _add_clones(
    dx_SD: Tensor, own: Tensors, clones: Tensors, experts_Pc: Tensor,
    memory: Tensor, peer_ptrs_P: Tensor, rank: int,
) -> None:  # fmt: skip
    """`dx_SD` is not written; as a mutated argument, it orders this before what reads it."""
    experts_Pc = experts_Pc.contiguous()
    signals, staged = _place_for(clones, len(own[0]), experts_Pc, memory, peer_ptrs_P)
    symm_barrier(signals, rank)
    stage_gradients([clone.contiguous() for clone in clones], experts_Pc, staged, rank)
    symm_barrier(signals, rank)
    add_gradients(own, experts_Pc, staged, rank)


def _place_for(
    weights: Tensors, num_local_experts: int, experts_Pc: Tensor, memory: Tensor, peer_ptrs_P: Tensor
) -> tuple[SymmArray, SymmArray]:
    num_elements = sum(weight[0].numel() for weight in weights)
    return clone_arrays(memory, peer_ptrs_P, num_local_experts, experts_Pc.shape[1], num_elements, weights[0].dtype)
