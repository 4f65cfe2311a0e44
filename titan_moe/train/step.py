"""One optimizer step.

M microbatches · B sequences of a microbatch · N tokens of a sequence · E experts
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn

from titan_moe.data.packing import IGNORE_LABEL, Batch
from titan_moe.optim.adamw import Optimizers
from titan_moe.optim.schedule import Schedules
from titan_moe.parallel.balance import ExpertBalancer
from titan_moe.parallel.grads import clip_grad_norm
from titan_moe.profile.region import region


class StepResult(NamedTuple):
    """What a step leaves on the device; reading it is the reader's wait."""

    loss: Tensor  # mean cross entropy over the label tokens of all ranks
    aux_loss: Tensor  # balancing losses, on the same scale
    grad_norm: Tensor  # global norm before clipping
    tokens_per_expert: dict[str, Tensor]  # router name -> tokens that each expert was given by all ranks [E]


def forward_backward(model: nn.Module, batch: Batch, scale: Tensor) -> Tensor:
    """Run microbatch after microbatch, gradients adding up; returns this rank's loss, scaled."""
    losses = []
    for microbatch in batch.microbatches():
        loss = model(*microbatch) * scale
        loss.backward()
        losses.append(loss.detach())
    return torch.stack(losses).sum()


@dataclass
class TrainStep:
    """All between a batch and the next weights. From the first forward to the optimizer the host reads nothing."""

    model: nn.Module
    optimizers: Optimizers
    schedule: Schedules
    balancer: ExpertBalancer
    max_grad_norm: float
    group: dist.ProcessGroup
    forward_backward: Callable[[nn.Module, Batch, Tensor], Tensor] = forward_backward

    def __call__(self, batch: Batch) -> StepResult:
        scale = 1.0 / self.count_labels(batch)
        self.balancer.start(scale)
        loss = self.forward_backward(self.model, batch, scale)
        losses = torch.stack([loss, self.balancer.aux_loss(loss)])
        dist.all_reduce(losses, group=self.group)
        with region("clip"):
            grad_norm = clip_grad_norm(self.model.parameters(), self.max_grad_norm, self.group)
        tokens_per_expert = self.balancer.finish()
        with region("optimizer"):
            self.optimizers.step()
            self.schedule.step()
            self.optimizers.zero_grad()
        return StepResult(losses[0], losses[1], grad_norm, tokens_per_expert)

    def count_labels(self, batch: Batch) -> Tensor:
        """Label tokens of all ranks' batches, at least one, on the device."""
        count = (batch.labels_MBN != IGNORE_LABEL).sum().double()
        dist.all_reduce(count, group=self.group)
        return count.clamp(min=1)
