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
from titan_moe.dispatch.capacity import ExpertCapacity
from titan_moe.optim.adamw import Optimizers
from titan_moe.parallel import fsdp, unsharded_experts
from titan_moe.parallel.balance import ExpertBalancer
from titan_moe.parallel.grads import clip_factor, grad_norm
from titan_moe.profile.region import region

Microbatch = tuple[Tensor, Tensor, Tensor | None]
"""Tokens, labels and, where documents are packed, their numbers."""


class StepResult(NamedTuple):
    """What a step leaves on the device; reading it is the reader's wait."""

    loss: Tensor  # mean cross entropy over the label tokens of all ranks
    aux_loss: Tensor  # balancing losses, on the same scale
    grad_norm: Tensor  # global norm before clipping
    tokens_per_expert: dict[str, Tensor]  # router name -> tokens that each expert was given by all ranks [E]
    has_overflowed: Tensor  # bool: some rank's rows did not fit their slots, or did not come: nothing was changed
    num_skipped: Tensor  # int64: steps so far that changed nothing, because their gradients were not finite


def forward_backward(model: nn.Module, batch: Batch, scale: Tensor) -> Tensor:
    """Run microbatch after microbatch, gradients adding up; returns this rank's loss, scaled."""
    return torch.stack([run_microbatch(model, microbatch, scale) for microbatch in batch.microbatches()]).sum()


def forward_backward_gathered(model: nn.Module, batch: Batch, scale: Tensor) -> Tensor:
    """The same, with parameters gathered by the first microbatch and gradients reduced by the last."""
    microbatches = list(batch.microbatches())
    losses = []
    with unsharded_experts.caching_casts(model):
        for number, microbatch in enumerate(microbatches, start=1):
            fsdp.set_unsharded_accumulation(model, number < len(microbatches))
            losses.append(_forward_backward(model, microbatch, scale))
    return torch.stack(losses).sum()


def run_microbatch(model: nn.Module, microbatch: Microbatch, scale: Tensor) -> Tensor:
    """Forward and backward of a microbatch alone; returns the loss, scaled."""
    with unsharded_experts.caching_casts(model):
        return _forward_backward(model, microbatch, scale)


def _forward_backward(model: nn.Module, microbatch: Microbatch, scale: Tensor) -> Tensor:
    loss = model(*microbatch) * scale
    loss.backward()
    return loss.detach()


@dataclass
class TrainStep:
    """All between a batch and the next weights, on the device: the host reads nothing.

    A step whose gradients are not finite, or whose rows did not fit their slots, changes neither weights nor moments,
    step counts or biases, on any rank.
    """

    model: nn.Module
    optimizers: Optimizers
    balancer: ExpertBalancer
    capacity: ExpertCapacity
    max_grad_norm: float
    group: dist.ProcessGroup
    num_skipped: Tensor
    forward_backward: Callable[[nn.Module, Batch, Tensor], Tensor] = forward_backward

    def __call__(self, batch: Batch) -> StepResult:
        scale = 1.0 / self.count_labels(batch)
        self.balancer.start(scale)
        self.capacity.reset()
        loss = self.forward_backward(self.model, batch, scale)
        sums = torch.stack([loss, self.balancer.aux_loss(loss), self.capacity.invalidates_step.to(loss.dtype)])
        dist.all_reduce(sums, group=self.group)
        has_overflowed = sums[2] > 0
        with region("clip"):
            norm = grad_norm(self.model.parameters(), self.group)
        skips_update = has_overflowed | ~norm.isfinite()
        tokens_per_expert = self.balancer.finish(skips_update)
        with region("optimizer"):
            factor = clip_factor(norm, self.max_grad_norm) if self.max_grad_norm > 0 else None
            self.optimizers.step(found_inf=skips_update.float(), grad_factor=factor)
            self.optimizers.zero_grad()
        self.num_skipped.add_(skips_update & ~has_overflowed)
        return StepResult(sums[0], sums[1], norm, tokens_per_expert, has_overflowed, self.num_skipped)

    def count_labels(self, batch: Batch) -> Tensor:
        """Label tokens of all ranks' batches, at least one, on the device."""
        count = (batch.labels_MBN != IGNORE_LABEL).sum().double()
        dist.all_reduce(count, group=self.group)
        return count.clamp(min=1)
