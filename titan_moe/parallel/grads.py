"""The norm of all gradients over all ranks, and clipping by it."""

import math
from collections.abc import Iterable

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from titan_moe.optim.state import local
from titan_moe.parallel.mesh import Meshes


@torch.no_grad()
def grad_norm(parameters: Iterable[nn.Parameter], meshes: Meshes) -> Tensor:
    """The global 2-norm of all gradients, on the device, in at least fp32.

    Gradients live on different meshes, dense and expert, and every shard must count exactly once: each rank sums the
    squares of its shards, divided by the copies of them that the ranks of its pipeline stage hold, and one all-reduce
    over all ranks adds them up.
    """
    grads = _grads(parameters)
    shards = [local(grad) for grad in grads]
    wide = torch.promote_types(shards[0].dtype, torch.float32)  # a norm in bf16 would be half a percent wrong
    norms = torch._foreach_norm(shards, 2, wide)
    torch._foreach_div_(norms, [math.sqrt(_num_copies(grad, meshes.stage_group.size())) for grad in grads])
    square = torch.stack(norms).square().sum()
    dist.all_reduce(square, group=meshes.world_group)
    return square.sqrt()


def clip_factor(norm: Tensor, max_norm: float) -> Tensor:
    """What gradients of a norm are multiplied by so that it does not exceed `max_norm` (0: nothing is clipped).

    A norm that is not finite gives 1: what is broken stays visibly broken, what is not stays as it is, and it is for
    the guard of the optimizer to skip the step.
    """
    if max_norm == 0:
        return torch.ones_like(norm)
    return torch.where(norm.isfinite(), (max_norm / (norm + 1e-6)).clamp(max=1.0), 1.0)


def _grads(parameters: Iterable[nn.Parameter]) -> list[Tensor]:
    return [p.grad for p in parameters if p.grad is not None]


def _num_copies(grad: Tensor, num_ranks: int) -> int:
    """On how many of a stage's ranks the same shard lies; its own mesh may lack axes that it is replicated over."""
    if not isinstance(grad, DTensor):
        return num_ranks
    sizes = zip(grad.placements, grad.device_mesh.shape, strict=True)
    return num_ranks // math.prod(size for placement, size in sizes if not placement.is_replicate())
