"""The gradients of a step, after its last backward: sums over tensor-parallel ranks, norm over all ranks, clipping."""

import math
from collections.abc import Collection, Iterable, Iterator
from typing import cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from titan_moe.parallel.mesh import Meshes
from titan_moe.parameters import TENSOR_AXIS, local
from titan_moe.plan.cost.replicated_grads import MESSAGE_ELEMENTS


class ReplicatedGrads:
    """The gradients of the parameters that every tensor-parallel rank has, or those of adapters that every rank of etp
    has; FSDP may shard them.

    Each rank computes them from a part of the tokens, or of the heads, so they must be summed over these ranks. They
    are summed once a step, after all microbatches are accumulated and FSDP has reduced them: this rank's shards, in one
    message (or several, of at most 64 Mi elements).
    """

    def __init__(
        self, parameters: Iterable[nn.Parameter], group: dist.ProcessGroup, dtype: torch.dtype, axis: str = TENSOR_AXIS
    ) -> None:
        """`parameters` are all of this rank; `group` has the ranks of the axis; `dtype` is that of the sum."""
        self.parameters = [parameter for parameter in parameters if _is_replicated(parameter, axis)]
        self.group, self.dtype = group, dtype

    @torch.no_grad()
    def sum(self) -> None:
        """Replace the gradients by their sums. Collective."""
        grads = [local(parameter.grad) for parameter in self.parameters if parameter.grad is not None]
        for message in _messages(grads):
            self._sum_message(message)  # a function of its own: its flat copy is freed before the next is made

    def _sum_message(self, message: list[Tensor]) -> None:
        flat = message[0].new_empty(sum(grad.numel() for grad in message), dtype=self.dtype)
        parts = [
            part.view_as(grad)
            for part, grad in zip(flat.split([grad.numel() for grad in message]), message, strict=True)
        ]
        torch._foreach_copy_(parts, message)
        dist.all_reduce(flat, group=self.group)
        torch._foreach_copy_(message, parts)


def _is_replicated(parameter: nn.Parameter, axis: str) -> bool:
    """Whether all ranks of an axis have the parameter."""
    if not parameter.requires_grad or not isinstance(parameter, DTensor):
        return False
    axes = zip(parameter.device_mesh.mesh_dim_names or (), parameter.placements, strict=False)
    return any(name == axis and placement.is_replicate() for name, placement in axes)


def _messages(grads: list[Tensor]) -> Iterator[list[Tensor]]:
    """Groups of gradients, in order, of at most `MESSAGE_ELEMENTS` if they are several."""
    message: list[Tensor] = []
    num_elements = 0
    for grad in grads:
        if message and num_elements + grad.numel() > MESSAGE_ELEMENTS:
            yield message
            message, num_elements = [], 0
        message.append(grad)
        num_elements += grad.numel()
    if message:
        yield message


@torch.no_grad()
def grad_norm(parameters: Iterable[nn.Parameter], meshes: Meshes, tied: Collection[nn.Parameter] = ()) -> Tensor:
    """The global 2-norm of all gradients, on the device, in at least fp32.

    Gradients are on two meshes, dense and expert, and every shard must count exactly once. A rank sums the squares of
    its shards, each divided by its number of copies in the pipeline stage, or in two stages if it is `tied`; one
    all-reduce over all ranks sums these.
    """
    with_grads = [parameter for parameter in parameters if parameter.grad is not None]
    grads = [cast(Tensor, parameter.grad) for parameter in with_grads]
    shards = [local(grad) for grad in grads]
    norms = torch._foreach_norm(shards, 2, torch.promote_types(shards[0].dtype, torch.float32))  # bf16 errs by 0.5 %
    num_stages = [2 if any(parameter is other for other in tied) else 1 for parameter in with_grads]
    copies = [n * _num_copies(grad, meshes.stage_group.size()) for n, grad in zip(num_stages, grads, strict=True)]
    torch._foreach_div_(norms, [math.sqrt(number) for number in copies])
    square = torch.stack(norms).square().sum()
    dist.all_reduce(square, group=meshes.world_group)
    return square.sqrt()


def clip_factor(norm: Tensor, max_norm: float) -> Tensor:
    """The factor for gradients of this norm, so that it does not exceed `max_norm` (0: no clipping).

    A norm that is not finite gives 1: gradients stay as they are, and the optimizer's guard skips the step.
    """
    if max_norm == 0:
        return torch.ones_like(norm)
    return torch.where(norm.isfinite(), (max_norm / (norm + 1e-6)).clamp(max=1.0), 1.0)


def _num_copies(grad: Tensor, num_ranks: int) -> int:
    """On how many ranks of a stage the shard is; its mesh may lack axes that it is replicated over."""
    if not isinstance(grad, DTensor):
        return num_ranks
    sizes = zip(grad.placements, grad.device_mesh.shape, strict=True)
    return num_ranks // math.prod(size for placement, size in sizes if not placement.is_replicate())
