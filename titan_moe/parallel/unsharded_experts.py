"""Unsharded experts: parameters cast for compute, and gradients accumulated in place.

With edp = 1 there is nothing to gather or reduce, but FSDP would copy 16 bytes a parameter to bf16 weights and 20 to 30
back to fp32 gradients, every microbatch. Here a parameter is cast once a use, or once a step (6 bytes), and a gradient
is added to the master's in one pass (10 bytes, the first of a step 6), in the dtype of the optimizer's gradients. The
weights of split masters are used as they are.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard

from titan_moe.config.kernels import Backend
from titan_moe.dispatch.clones.optional import ReplicaSlots
from titan_moe.kernels.choose import ACCUMULATE
from titan_moe.kernels.experts.delayed_weight_grads import can_delay
from titan_moe.kernels.experts.format import ExpertFormat
from titan_moe.kernels.experts.fused_mlp import format_of
from titan_moe.kernels.experts.plain import PLAIN
from titan_moe.kernels.experts.weights import ExpertUse, ExpertWeights
from titan_moe.kernels.optim.accumulate import Accumulate
from titan_moe.layers.experts import GroupedExperts
from titan_moe.parameters import local


class UnshardedWeights:
    """The transform of unsharded experts: master parameters -> plain tensors in compute's dtype, with codes in the
    MLP's format."""

    def __init__(
        self,
        dtype: torch.dtype | None,
        format: ExpertFormat = PLAIN,
        *,
        keeps: bool,
        accumulate: Accumulate,
        room: ReplicaSlots | None = None,
    ) -> None:
        """`dtype` is compute's, None if it is the parameters'. With `keeps`, copies and codes last for every use inside
        `caching_casts`, else for one use and its backward. `accumulate` adds gradients up. A copy has `room` for as
        many clones behind the experts, which is left out while it is not used."""
        self.dtype, self.format, self.keeps = dtype, format, keeps
        self.accumulate, self.room = accumulate, room or ReplicaSlots()
        self.is_keeping = False
        self.copies: dict[int, Tensor] = {}
        self.codes: tuple[Tensor, ...] = ()

    def __call__(self, use: ExpertUse) -> ExpertUse:
        codes = self._quantized(use.weights)
        weights = use.weights.with_tensors([self.cast(master) for master in use.weights.tensors()])
        return use._replace(weights=weights._replace(codes=codes))

    @property
    def has_codes(self) -> bool:
        """Whether codes stand for weights, whose copies are not read then. Where clones follow the weights, codes are
        made of both, for each use. A graph has no cache, and without gradients a copy could be stale: there they are
        made of the weights anew."""
        has_cache = not torch.compiler.is_compiling() and torch.is_grad_enabled()
        return self.format.is_rounded and has_cache and not self.room.number_in_use

    def cast(self, weight: Tensor) -> Tensor:
        """Master parameter -> plain tensor in compute's dtype. A copy that is not read has no memory."""
        if weight.itemsize == 1:  # stored as codes
            return local(weight)
        if torch.compiler.is_compiling() or not torch.is_grad_enabled():
            return local(weight) if self.dtype is None else local(weight).to(self.dtype)
        if self.dtype is None or (not weight.requires_grad and weight.dtype == self.dtype and not self.has_codes):
            is_plain = not weight.is_leaf or weight.grad_dtype == weight.dtype
            return local(weight) if is_plain else _Cast.apply(weight, local(weight.detach()), self.accumulate)
        if self.has_codes:
            master = local(weight)
            return _Cast.apply(weight, master.new_empty((), dtype=self.dtype).expand_as(master), self.accumulate)
        copy = self.copies.get(id(weight))
        if copy is None:
            with torch.no_grad():
                master = local(weight)
                # with all the room: a rank does not run out of memory when its replica slots come into use
                copy = master.new_empty((len(master) + self.room.number, *master.shape[1:]), dtype=self.dtype)
                copy[: len(master)] = master
                copy = copy[: len(master) + self.room.number_in_use]
            if self.keeps and self.is_keeping:
                self.copies[id(weight)] = copy
        return _Cast.apply(weight, copy, self.accumulate)

    def _quantized(self, masters: ExpertWeights) -> tuple[Tensor, ...]:
        if not self.has_codes:
            return ()
        if self.codes:
            return self.codes
        gate_up, down = (local(parameter.own).detach() for parameter in (masters.gate_up, masters.down))
        codes = tuple(self.format.quantize(gate_up, down, (self.dtype or down.dtype) == torch.bfloat16))
        if self.keeps and self.is_keeping:
            self.codes = codes
        return codes

    def clear(self) -> None:
        """Drop what is kept."""
        self.copies.clear()
        self.codes = ()


class _Cast(torch.autograd.Function):
    """Replace a master by its copy; add gradients to the master's, in its `grad_dtype`."""

    @staticmethod
    def forward(ctx: Any, master: Tensor, copy: Tensor, accumulate: Accumulate) -> Tensor:
        ctx.master, ctx.accumulate = master, accumulate
        return copy.detach()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[None, None, None]:
        master = ctx.master
        is_first = master.grad is None
        if is_first:
            fresh = torch.empty_like(local(master), dtype=master.grad_dtype)
            master.grad = _spread(fresh, master.device_mesh, master.placements)
        ctx.accumulate(local(master.grad), grad[: len(local(master))], is_first)
        return None, None, None


def use_unsharded_experts(
    experts: GroupedExperts,
    mesh: DeviceMesh,
    dtype: torch.dtype | None,
    *,
    keeps: bool,
    gradients: Backend = "torch",
    delay_weight_grads_of_experts: bool = False,
    room: ReplicaSlots | None = None,
) -> None:
    """Use a layer's parameters as they are, in place of FSDP on a mesh of one rank.

    Parameters are DTensors of the ep mesh or, where ep = 1, become DTensors on `mesh`. `dtype` is compute's if it
    differs from the parameters'; `keeps` lets a copy last for more than one use; `gradients` names the implementation
    that accumulates; `delay_weight_grads_of_experts` computes them while those of rows are sent, if the experts' MLP
    can. Copies have `room` for clones.
    """
    for name, weight in list(experts.named_parameters(recurse=False)):
        if not isinstance(weight, DTensor):
            spread = _spread(weight.data, mesh, [Shard(0)] * mesh.ndim)
            experts.register_parameter(name, nn.Parameter(spread, requires_grad=weight.requires_grad))
    experts.transforms["local"] = UnshardedWeights(
        dtype, format_of(experts.mlp), keeps=keeps, accumulate=ACCUMULATE[gradients], room=room
    )
    experts.delays_weight_grads = delay_weight_grads_of_experts and can_delay(experts.mlp)


@contextmanager
def caching_casts(model: nn.Module) -> Iterator[None]:
    """Keep casts for a microbatch or a step, and drop them at its end, also after an error."""
    layers = [experts for experts in model.modules() if isinstance(experts, GroupedExperts)]
    caches = [experts.transforms.get("local") for experts in layers]
    keepers = [it for it in caches if isinstance(it, UnshardedWeights) and not it.is_keeping]  # an outer call's stay
    for keeper in keepers:
        keeper.is_keeping = True
    try:
        yield
    finally:
        for keeper in keepers:
            keeper.is_keeping = False
            keeper.clear()


def _spread(part: Tensor, mesh: DeviceMesh, placements: Any) -> DTensor:
    return DTensor.from_local(part, mesh, placements, run_check=False)
