"""Load balance of experts and ranks, and one device-to-host copy for all scalars."""

from collections.abc import Sequence

import torch
from torch import Tensor


def expert_loads(tokens_per_expert: dict[str, Tensor]) -> dict[str, Tensor]:
    """Maximum over mean of the experts' token counts, for each layer: 1 is balanced, E is all tokens on one expert.

    Without token dropping the busiest expert determines the time of its layer. A layer without tokens has load 0.

    Shapes: counts [E] of any dtype → 0-dim fp64 on the same device, without host synchronisation.
    """
    counts = {layer: count_E.double() for layer, count_E in tokens_per_expert.items()}
    return {layer: count_E.max() / count_E.mean().clamp_min(1e-12) for layer, count_E in counts.items()}


def rank_loads(tokens_per_expert: dict[str, Tensor], num_ranks: int) -> dict[str, Tensor]:
    """Maximum over mean of the ranks' token counts, for each layer. A rank has E / num_ranks consecutive experts. The
    busiest rank determines the time of a layer, so this is the minimum slowdown by imbalance."""
    return expert_loads({layer: count_E.view(num_ranks, -1).sum(1) for layer, count_E in tokens_per_expert.items()})


def read_scalars(values: Sequence[Tensor | float]) -> list[float]:
    """Copy scalars to the host. All tensors together take one transfer."""
    tensors = [value.detach().double().reshape(()) for value in values if isinstance(value, Tensor)]
    numbers = iter(torch.stack(tensors).tolist() if tensors else [])
    return [next(numbers) if isinstance(value, Tensor) else float(value) for value in values]
