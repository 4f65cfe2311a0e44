"""Forward and backward of a step, the only part of it that sees the model.

M microbatches · B sequences of a microbatch · N tokens of a sequence
"""

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor, nn

from titan_moe.config.parallel import ParallelConfig
from titan_moe.data.packing import Batch
from titan_moe.parallel import fsdp, unsharded_experts
from titan_moe.parallel.overlap import forward_backward_interleaved

Microbatch = tuple[Tensor, Tensor, Tensor | None]
"""Tokens, labels, and document ids where documents are packed."""
ForwardBackward = Callable[[Batch, Tensor], Tensor]
"""Batch, scale of the loss -> this rank's loss, scaled; accumulates gradients."""


def build_forward_backward(parts: list[nn.Module], parallel: ParallelConfig) -> ForwardBackward:
    """Choose the order of a step's microbatches, and bind the model."""
    (model,) = parts  # several parts need a pipeline schedule
    if parallel.overlap == "microbatch":
        return partial(forward_backward_interleaved, model)
    return partial(forward_backward_gathered if parallel.accumulate_unsharded else forward_backward, model)


def forward_backward(model: nn.Module, batch: Batch, scale: Tensor) -> Tensor:
    """Run one microbatch after the other, accumulating gradients; returns this rank's loss, scaled."""
    return torch.stack([run_microbatch(model, microbatch, scale) for microbatch in batch.microbatches()]).sum()


def forward_backward_gathered(model: nn.Module, batch: Batch, scale: Tensor) -> Tensor:
    """The same, with parameters gathered by the first microbatch and gradients reduced by the last."""
    microbatches = list(batch.microbatches())
    losses = []
    with unsharded_experts.caching_casts(model):
        for number, microbatch in enumerate(microbatches, start=1):
            fsdp.set_unsharded_accumulation(model, number < len(microbatches))
            losses.append(run_microbatch(model, microbatch, scale))
    return torch.stack(losses).sum()


def run_microbatch(model: nn.Module, microbatch: Microbatch, scale: Tensor) -> Tensor:
    """Forward and backward of one microbatch; returns the loss, scaled."""
    with unsharded_experts.caching_casts(model):
        loss = model(*microbatch) * scale
        loss.backward()
    return loss.detach()
