"""Forward and backward of a step: the one thing in it that holds the model.

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
"""Tokens, labels and, where documents are packed, their numbers."""
ForwardBackward = Callable[[Batch, Tensor], Tensor]
"""Batch, scale of the loss -> this rank's loss, scaled; gradients are added to those of the parameters."""


def build_forward_backward(parts: list[nn.Module], parallel: ParallelConfig) -> ForwardBackward:
    """Choose how the microbatches of a step follow each other, and give it the model."""
    (model,) = parts  # several are a pipeline's, whose schedule runs them
    if parallel.overlap == "microbatch":
        return partial(forward_backward_interleaved, model)
    return partial(forward_backward_gathered if parallel.accumulate_unsharded else forward_backward, model)


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
            losses.append(_run(model, microbatch, scale))
    return torch.stack(losses).sum()


def run_microbatch(model: nn.Module, microbatch: Microbatch, scale: Tensor) -> Tensor:
    """Forward and backward of a microbatch alone; returns the loss, scaled."""
    with unsharded_experts.caching_casts(model):
        return _run(model, microbatch, scale)


def _run(model: nn.Module, microbatch: Microbatch, scale: Tensor) -> Tensor:
    loss = model(*microbatch) * scale
    loss.backward()
    return loss.detach()
