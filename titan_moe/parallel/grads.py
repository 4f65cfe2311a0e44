"""What is summed over ranks between backward and the optimizer: the gradient norm, expert counts, token counts."""

from collections.abc import Iterable

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor


@torch.no_grad()
def global_grad_norm(parameters: Iterable[nn.Parameter]) -> Tensor:
    """2-norm of all gradients of the model, every shard counted exactly once, on the device.

    Gradients live on different meshes (dense and expert), which `get_total_norm` refuses to mix: the squares are summed
    mesh by mesh. Replicated mesh axes hold equal gradients and count once.
    """
    squares = []
    for group in _by_layout(p.grad for p in parameters if p.grad is not None):
        norm = torch.nn.utils.get_total_norm(group)
        squares.append((norm.full_tensor() if isinstance(norm, DTensor) else norm).square())
    return torch.stack(squares).sum().sqrt()


@torch.no_grad()
def clip_grad_norm(parameters: Iterable[nn.Parameter], max_norm: float) -> Tensor:
    """Scale all gradients so that their global norm is at most `max_norm` (0: leave them); returns the norm before."""
    parameters = list(parameters)
    norm = global_grad_norm(parameters)
    if max_norm > 0:
        factor = (max_norm / (norm + 1e-6)).clamp(max=1.0)
        for group in _by_layout(p.grad for p in parameters if p.grad is not None):
            torch._foreach_mul_([g.to_local() if isinstance(g, DTensor) else g for g in group], factor)
    return norm


def _by_layout(grads: Iterable[Tensor]) -> list[list[Tensor]]:
    groups: dict[object, list[Tensor]] = {}
    for grad in grads:
        layout = (grad.device_mesh, grad.placements) if isinstance(grad, DTensor) else None
        groups.setdefault((layout, grad.dtype), []).append(grad)
    return list(groups.values())
