"""Load balance of experts and ranks, from the token counts of a step.

The counts are those of one optimizer step, summed over its microbatches and over all ranks. A peak of one microbatch is
therefore at least what is reported. With clones the counts are those of the original experts: a token of a clone counts
on the rank that owns the expert.

L layers · E experts · P ranks, with e experts each
"""

import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor


def expert_loads(tokens_per_expert: dict[str, Tensor]) -> dict[str, Tensor]:
    """Maximum over mean of the experts' token counts, for each layer: 1 is balanced, E / K is all tokens on one expert.

    Without token dropping the busiest expert determines the time of its layer. A layer without tokens has load 0.

    Shapes: counts [E] of any dtype → 0-dim fp64 on the same device, without host synchronisation.
    """
    counts = {layer: count_E.double() for layer, count_E in tokens_per_expert.items()}
    return {layer: count_E.max() / count_E.mean().clamp_min(1e-12) for layer, count_E in counts.items()}


def idle_experts(tokens_per_expert: dict[str, Tensor]) -> dict[str, Tensor]:
    """Number of experts without a token, for each layer."""
    return {layer: (count_E == 0).sum() for layer, count_E in tokens_per_expert.items()}


def rank_loads(tokens_per_expert: dict[str, Tensor], num_ranks: int) -> dict[str, Tensor]:
    """Maximum over mean of the ranks' token counts, for each layer. A rank has E / num_ranks consecutive experts. The
    busiest rank determines the time of a layer, so this is the minimum slowdown by imbalance."""
    return expert_loads(_tokens_per_rank(tokens_per_expert, num_ranks))


def share_entropy(share_sums: Mapping[str, Tensor]) -> Tensor:
    """The entropy of the experts' mean shares of the scores over that of equal ones, averaged over layers: 1 is even, 0
    is one expert. 0-dim fp32, without host synchronisation; 0 without layers."""
    entropies = [torch.zeros(0)]
    by_number = defaultdict[int, list[Tensor]](list)
    for sums_E in share_sums.values():
        by_number[len(sums_E)].append(sums_E)
    for number, alike in by_number.items():
        sums_LE = torch.stack(alike).float()
        shares_LE = sums_LE / sums_LE.sum(1, keepdim=True).clamp_min(1e-20)
        entropies.append(torch.special.entr(shares_LE).sum(1) / max(math.log(number), 1e-20))
    return torch.cat(entropies[1:] or entropies).mean().nan_to_num()


class Overload(NamedTuple):
    """Megatron Core's overload factors (`log_moe_overload_factor`) of a step: 1 is balanced. All 0-dim."""

    avg: Tensor
    """Busiest rank over the mean, averaged over layers."""
    max: Tensor
    """The largest of the layers: the peak of a buffer that layers share."""
    cum: Tensor
    """Busiest rank over the mean of the sums over layers: the peak of what a rank keeps for the backward."""
    busiest_rank: Tensor
    """The ep rank with the largest sum over layers."""


def overload_factors(tokens_per_expert: dict[str, Tensor], num_ranks: int) -> Overload:
    """Summarise the imbalance of the ranks of an ep group over all layers, of which there is at least one."""
    loads_L = _rank_loads(tokens_per_expert, num_ranks)
    sums = torch.stack(list(_tokens_per_rank(tokens_per_expert, num_ranks).values())).sum(0)
    return Overload(loads_L.mean(), loads_L.max(), expert_loads({"": sums})[""], sums.argmax())


def mean_rank_load(tokens_per_expert: dict[str, Tensor], num_ranks: int) -> Tensor:
    """`Overload.avg` by itself: 0-dim fp64 on the device of the counts, without host synchronisation."""
    return _rank_loads(tokens_per_expert, num_ranks).mean()


def load_map(tokens_per_expert: dict[str, Tensor]) -> Tensor:
    """Token counts over the mean of their layer [L, E], for layers with equally many experts."""
    counts_LE = torch.stack(list(tokens_per_expert.values())).double()
    return counts_LE / counts_LE.mean(1, keepdim=True).clamp_min(1e-12)


def _rank_loads(tokens_per_expert: dict[str, Tensor], num_ranks: int) -> Tensor:
    """`rank_loads` of all layers [L], in another order, and in few operations: a step computes them on the device."""
    by_number = defaultdict[int, list[Tensor]](list)
    for count_E in tokens_per_expert.values():
        by_number[len(count_E)].append(count_E)
    alike_LPe = [torch.stack(counts).unflatten(1, (num_ranks, -1)) for counts in by_number.values()]
    tokens_LP = torch.cat([counts_LPe.sum(2) for counts_LPe in alike_LPe]).double()
    return tokens_LP.amax(1) / tokens_LP.mean(1).clamp_min(1e-12)


def _tokens_per_rank(tokens_per_expert: dict[str, Tensor], num_ranks: int) -> dict[str, Tensor]:
    return {layer: count_E.view(num_ranks, -1).sum(1) for layer, count_E in tokens_per_expert.items()}


def read_values(values: Sequence[Tensor | float]) -> list[Tensor]:
    """Copy values of any shape to the host, as fp64. All tensors together take one transfer."""
    tensors = [value.detach().double() for value in values if isinstance(value, Tensor)]
    flat = torch.cat([tensor.flatten() for tensor in tensors]).cpu() if tensors else torch.empty(0)
    pieces = iter(flat.split([tensor.numel() for tensor in tensors]))
    return [
        next(pieces).view(value.shape) if isinstance(value, Tensor) else torch.tensor(value, dtype=torch.float64)
        for value in values
    ]


def read_scalars(values: Sequence[Tensor | float]) -> list[float]:
    """Copy scalars to the host. All tensors together take one transfer."""
    return [value.item() for value in read_values(values)]
