"""The norm of all gradients over all ranks, and clipping by it."""

import math
from collections.abc import Collection, Iterable
from typing import cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from titan_moe.parallel.mesh import Meshes
from titan_moe.parameters import local


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
