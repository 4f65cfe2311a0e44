"""One optimizer step.

M microbatches · B sequences of a microbatch · N tokens of a sequence · E experts
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn

from titan_moe.config.train import OptimConfig
from titan_moe.data.loader import Batch
from titan_moe.kernels.cross_entropy import IGNORE_LABEL
from titan_moe.parallel.balance import ExpertBalancer
from titan_moe.parallel.grads import clip_grad_norm

ForwardBackward = Callable[[nn.Module, Batch, Tensor], Tensor]
"""Runs all microbatches forward and backward; returns this rank's loss, scaled."""


class StepResult(NamedTuple):
    """What a step leaves on the device; reading it is the reader's wait."""

    loss: Tensor
    """Mean cross entropy of the step's label tokens over all ranks."""
    aux_loss: Tensor
    """Balancing losses on the same scale."""
    grad_norm: Tensor
    """Global norm before clipping."""
    tokens_per_expert: dict[str, Tensor]
    """Router name -> tokens that each expert was given by all ranks [E]."""


def forward_backward(model: nn.Module, batch: Batch, scale: Tensor) -> Tensor:
    """Microbatch after microbatch; gradients add up."""
    losses = []
    for microbatch in batch.microbatches():
        loss = model(*microbatch) * scale
        loss.backward()
        losses.append(loss.detach())
    return torch.stack(losses).sum()


class TrainStep:
    """All between a batch and the next weights. From the first forward to the optimizer the host reads nothing."""

    def __init__(
        self,
        model: nn.Module,
        optimizers: Any,
        schedule: Any,
        balancer: ExpertBalancer,
        config: OptimConfig,
        group: dist.ProcessGroup,
        forward_backward: ForwardBackward = forward_backward,
    ) -> None:
        self.model, self.optimizers, self.schedule = model, optimizers, schedule
        self.balancer, self.config, self.group = balancer, config, group
        self.forward_backward = forward_backward

    def __call__(self, batch: Batch) -> StepResult:
        scale = 1.0 / self._global_label_tokens(batch)
        self.balancer.start(scale)
        loss = self.forward_backward(self.model, batch, scale)
        losses = torch.stack([loss, self.balancer.aux_loss(loss)])
        dist.all_reduce(losses, group=self.group)
        loss, aux_loss = losses.unbind()
        grad_norm = clip_grad_norm(self.model.parameters(), self.config.max_grad_norm, self.group)
        tokens_per_expert = self.balancer.finish()
        self.optimizers.step()
        self.schedule.step()
        self.optimizers.zero_grad()
        return StepResult(loss, aux_loss, grad_norm, tokens_per_expert)

    def _global_label_tokens(self, batch: Batch) -> Tensor:
        count = (batch.labels_MBN != IGNORE_LABEL).sum().double()
        dist.all_reduce(count, group=self.group)
        return count.clamp(min=1)
