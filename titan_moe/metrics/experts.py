"""How evenly tokens fall on experts, and how numbers come home from the device."""

from collections.abc import Sequence

import torch
from torch import Tensor


def expert_loads(tokens_per_expert: dict[str, Tensor]) -> dict[str, Tensor]:
    """The busiest expert's tokens over the mean of its layer, a layer: 1 is even, E is all on one.

    With dropless experts the busiest one sets the pace of its layer. A layer that saw no token has load 0.

    Shapes: counts [E] of any dtype → fp64 scalars on the same device, nothing is read.
    """
    counts = {layer: count_E.double() for layer, count_E in tokens_per_expert.items()}
    return {layer: count_E.max() / count_E.mean().clamp_min(1e-12) for layer, count_E in counts.items()}


def rank_loads(tokens_per_expert: dict[str, Tensor], num_ranks: int) -> dict[str, Tensor]:
    """The same of the ranks that share a layer's experts, each with as many consecutive ones.

    A layer takes as long as its busiest rank, so this is what uneven routing costs at least.
    """
    return expert_loads({layer: count_E.view(num_ranks, -1).sum(1) for layer, count_E in tokens_per_expert.items()})


def read(values: Sequence[Tensor | float]) -> list[float]:
    """Bring scalars to the host in one transfer, however many tensors are among them."""
    tensors = [value.detach().double().reshape(()) for value in values if isinstance(value, Tensor)]
    numbers = iter(torch.stack(tensors).tolist() if tensors else [])
    return [next(numbers) if isinstance(value, Tensor) else float(value) for value in values]
