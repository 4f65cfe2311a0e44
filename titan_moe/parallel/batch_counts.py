"""The experts' counts of the whole batch of a step, for `model.moe.aux_losses.global_batch`.

The gradient of that loss needs the loads of all microbatches before the first backward. With one microbatch each layer
sums them over ranks in its forward. With several, all forwards run once before, without gradients and without the
head, and count; so it is where a forward uses a router several times (`model.mtp.repeats_layer`).

E experts
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
import torch.distributed as dist
from torch import Tensor, nn

from titan_moe.layers.balance import LoadBalance
from titan_moe.models.transformer import Transformer
from titan_moe.parallel.mesh import Meshes
from titan_moe.parallel.sequence import sum_over_ranks


def sum_counts_of_batch(model: nn.Module, meshes: Meshes) -> None:
    """Sum the counts of the layers over the ranks that have other tokens of the batch, in place."""
    if dist.get_world_size(meshes.data_group) > 1:
        for balance in _balances([model]):
            balance.sum_over_batch = SumOverBatch(meshes.data_group)


class SumOverBatch:
    """`LoadBalance.sum_over_batch` over the ranks of dp and cp.

    Ranks of cp have the sums of their whole sequences already, so all counts become cp times as large, and loads stay.
    """

    def __init__(self, group: dist.ProcessGroup) -> None:
        self.group_name = group.group_name

    def __call__(self, counts_E: Tensor) -> Tensor:
        return sum_over_ranks(counts_E, self.group_name)


class BatchCounts:
    """Counts ahead of a step's microbatches."""

    def __init__(self, parts: Sequence[nn.Module], meshes: Meshes, num_uses: int = 1) -> None:
        """A forward uses a router up to `num_uses` times."""
        self.balances, self.group, self.num_uses = _balances(parts), meshes.data_group, num_uses
        self.counters: list[LoadBalance | Transformer] = [
            *self.balances,
            *(part for part in parts if isinstance(part, Transformer)),
        ]

    def start(self, num_microbatches: int) -> bool:
        """Begin a step; returns whether its microbatches must be counted ahead."""
        counts_ahead = num_microbatches * self.num_uses > 1
        for balance in self.balances:
            balance.counts_ahead = counts_ahead
            balance.batch_counts_E.zero_()
        return counts_ahead

    @contextmanager
    def counting(self) -> Iterator[None]:
        """Run all forwards of the step within it, without gradients: they count, and have no result. Collective at its
        end."""
        try:
            for counter in self.counters:
                counter.is_counting = True
            yield
        finally:
            for counter in self.counters:
                counter.is_counting = False
        if self.balances:  # those of this stage; layers have equally many experts
            counts_LE = torch.stack([balance.batch_counts_E for balance in self.balances])
            dist.all_reduce(counts_LE, group=self.group)
            for balance, counts_E in zip(self.balances, counts_LE, strict=True):
                balance.batch_counts_E.copy_(counts_E)


def _balances(parts: Sequence[nn.Module]) -> list[LoadBalance]:
    modules = (module for part in parts for module in part.modules())
    return [module for module in modules if isinstance(module, LoadBalance) and module.coefs.global_batch]
