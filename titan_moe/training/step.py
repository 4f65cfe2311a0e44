"""One optimizer step.

M microbatches · B sequences of a microbatch · N tokens of a sequence · E experts
"""

from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn

from titan_moe.data.packing import IGNORE_LABEL, Batch
from titan_moe.dispatch.capacity import ExpertCapacity
from titan_moe.dispatch.optional_clones import ReplicaSlots
from titan_moe.metrics.experts import mean_rank_load
from titan_moe.optim.build import Optimizers
from titan_moe.parallel.balance import ExpertBalancer
from titan_moe.parallel.grads import ReplicatedGrads, clip_factor, grad_norm
from titan_moe.parallel.mesh import Meshes
from titan_moe.profile.region import region
from titan_moe.training.forward_backward import ForwardBackward
from titan_moe.training.spikes import Spikes


class StepResult(NamedTuple):
    """Results on the device; reading one waits for the step."""

    loss: Tensor  # mean cross entropy over the label tokens of all ranks
    aux_loss: Tensor  # balancing losses, a mean over all tokens of all ranks, with a label or not
    grad_norm: Tensor  # global norm before clipping
    tokens_per_expert: dict[str, Tensor]  # router name -> tokens of each expert over all ranks [E]
    has_overflowed: Tensor  # bool: rows of some rank overflowed their room or did not arrive: nothing was changed
    needed_factor: Tensor  # fp32: capacity factor that the step needed, the largest of all ranks
    imbalance: Tensor  # fp64: load of the busiest ep rank over the mean, averaged over layers; 1 without replica slots
    num_skipped: Tensor  # int64: steps so far that were skipped because gradients were not finite
    num_skipped_in_row: Tensor  # int64: of those, the ones since the last step with finite gradients
    num_spikes: Tensor  # int64: steps so far that were skipped as spikes


@dataclass
class TrainStep:
    """One optimizer step, without a host read.

    A step with gradients that are not finite, rows that overflowed their slots, or a spike, if `spikes` looks for them,
    changes no weights, moments, step counts or biases on any rank.
    """

    forward_backward: ForwardBackward
    optimizers: Optimizers
    balancer: ExpertBalancer
    capacity: ExpertCapacity
    replicas: ReplicaSlots
    max_grad_norm: float
    meshes: Meshes
    spikes: Spikes | None
    num_skipped: Tensor
    num_skipped_in_row: Tensor
    num_spikes: Tensor
    tied: tuple[nn.Parameter, ...] = ()
    """Parameters that two stages of a pipeline have."""
    replicated: ReplicatedGrads | None = None
    """What tensor-parallel ranks sum."""

    def __call__(self, batch: Batch) -> StepResult:
        num_labels, num_tokens = self.count(batch)
        scale = 1.0 / num_labels.clamp(min=1)
        self.balancer.start(1.0 / num_tokens)
        self.capacity.reset()
        loss = self.forward_backward(batch, scale)
        self.finish_gradients()
        # ranks of cp have the same balancing losses, those of their whole sequences
        losses = torch.stack([loss, self.balancer.aux_loss(loss) / self.meshes.sizes.cp])
        dist.all_reduce(losses, group=self.meshes.loss_group)
        loads = torch.stack([self.capacity.invalidates_step.float(), self.capacity.needed_factor()])
        dist.all_reduce(loads, dist.ReduceOp.MAX, group=self.meshes.world_group)
        has_overflowed = loads[0] > 0
        with region("clip"):
            norm = grad_norm(self.optimizers.parameters, self.meshes, self.tied)
        is_spike = self._find_spike(losses[0], norm, has_overflowed)
        skips_update = has_overflowed | ~norm.isfinite() | is_spike
        tokens_per_expert = self.balancer.finish(skips_update)
        with region("optimizer"):
            factor = clip_factor(norm, self.max_grad_norm) if self.max_grad_norm > 0 else None
            self.optimizers.step(found_inf=skips_update.float(), grad_factor=factor)
            self.optimizers.zero_grad()
        self._count_skips(norm, is_spike, has_overflowed)
        counts = self.num_skipped, self.num_skipped_in_row, self.num_spikes
        of_ranks = has_overflowed, loads[1], self._imbalance(tokens_per_expert, norm)
        return StepResult(losses[0], losses[1], norm, tokens_per_expert, *of_ranks, *counts)

    def finish_gradients(self) -> None:
        """After all microbatches: the sums that are left."""
        if self.replicated is not None:
            with region("sharding"):
                self.replicated.sum()

    def _imbalance(self, tokens_per_expert: dict[str, Tensor], like: Tensor) -> Tensor:
        """As `StepResult` has it; tokens of clones count on the ranks that own the experts."""
        if not self.replicas.number or not tokens_per_expert:
            return torch.ones_like(like, dtype=torch.float64)
        return mean_rank_load(tokens_per_expert, self.meshes.sizes.ep)

    def _find_spike(self, loss: Tensor, norm: Tensor, has_overflowed: Tensor) -> Tensor:
        if self.spikes is None:
            return torch.zeros_like(has_overflowed)
        is_spike = self.spikes.find(loss, norm) & norm.isfinite() & ~has_overflowed
        self.spikes.record(loss, norm, ~has_overflowed)
        return is_spike

    def _count_skips(self, norm: Tensor, is_spike: Tensor, has_overflowed: Tensor) -> None:
        """Count a step without an update. One that overflowed is not counted: it is taken again."""
        is_void = ~norm.isfinite()
        self.num_skipped.add_(is_void & ~has_overflowed)
        in_row = torch.where(has_overflowed, self.num_skipped_in_row, (self.num_skipped_in_row + 1) * is_void)
        self.num_skipped_in_row.copy_(in_row)
        self.num_spikes.add_(is_spike)

    def count(self, batch: Batch) -> tuple[Tensor, Tensor]:
        """Label tokens and tokens of the batches of all ranks, on the device. Routers see tokens without a label too,
        so the first number divides the loss and the second the balancing losses."""
        has_label_MBN = batch.labels_MBN != IGNORE_LABEL
        counts = torch.stack([has_label_MBN.sum(), torch.ones_like(has_label_MBN).sum()]).double()
        dist.all_reduce(counts, group=self.meshes.data_group)
        return counts[0], counts[1]
