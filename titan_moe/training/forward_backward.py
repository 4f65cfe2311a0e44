"""Forward and backward of a step, the only part of it that sees the model.

M microbatches · B sequences of a microbatch · N tokens of a sequence
"""

from collections.abc import Callable
from contextlib import ExitStack
from functools import partial

import torch
from torch import Tensor, nn

from titan_moe.config.recipe import sums_replicas_once
from titan_moe.data.packing import Batch
from titan_moe.dispatch.capacity import ExpertCapacity
from titan_moe.kernels.delayed_weight_grads import WeightGradQueue
from titan_moe.parallel import fsdp
from titan_moe.parallel.batch_counts import BatchCounts
from titan_moe.parallel.mesh import Meshes
from titan_moe.parallel.pipeline.forward_backward import Pipeline
from titan_moe.parallel.pipeline.model import Model
from titan_moe.parallel.pipeline.stages import TiedEmbedding
from titan_moe.parallel.routing import StepRouting
from titan_moe.parallel.unsharded_experts import caching_casts
from titan_moe.plan.resolved import Resolved

Microbatch = tuple[Tensor, Tensor, Tensor | None]
"""Tokens, labels, and document ids where documents are packed."""
ForwardBackward = Callable[[Batch, Tensor], Tensor]
"""Batch, scale of the loss -> this rank's loss, scaled; accumulates gradients."""


def build_forward_backward(
    parts: list[nn.Module],
    resolved: Resolved,
    meshes: Meshes,
    tied: TiedEmbedding | None,
    queue: WeightGradQueue | None,
    *,
    capacity: ExpertCapacity,
    routing: StepRouting,
) -> ForwardBackward:
    """Choose the order of a step's microbatches, and bind the model. `queue` has the weight gradients that its layers
    delay; microbatches in flight share the arena of `capacity`, and route by the ids of `routing`."""
    p = resolved.recipe.parallel
    if p.pp > 1 or p.overlap == "microbatch" or p.accumulate_unsharded:
        return Pipeline(parts, resolved, meshes, tied, queue, capacity=capacity, routing=routing)
    return partial(forward_backward, *parts, routing=routing, sums_once=sums_replicas_once(resolved.recipe))


def counting_ahead(
    forward_backward: ForwardBackward,
    model: Model,
    parts: list[nn.Module],
    counts: BatchCounts,
    *,
    capacity: ExpertCapacity,
    routing: StepRouting,
) -> ForwardBackward:
    """Let a step of several microbatches run all their forwards first, but for the head, so that balancing losses have
    its counts."""

    def run(batch: Batch, scale: Tensor) -> Tensor:
        if counts.start(len(batch.tokens_MBN)):
            with torch.no_grad(), counts.counting(), capacity.unbounded():
                for number, microbatch in enumerate(batch.microbatches()):
                    with ExitStack() as replays:
                        for part in parts:
                            replays.enter_context(routing.of(part, number))
                        model(*microbatch)
            for part in parts:
                fsdp.reshard_all(part)
        return forward_backward(batch, scale)

    return run


def forward_backward(model: nn.Module, batch: Batch, scale: Tensor, *, routing: StepRouting, sums_once: bool) -> Tensor:
    """Run one microbatch after the other, accumulating gradients; returns this rank's loss, scaled. With `sums_once`
    the last one sums gradients over replicas, else each."""
    losses = []
    for number, microbatch in enumerate(batch.microbatches()):
        if sums_once:
            fsdp.set_replica_reduction(model, number == len(batch.tokens_MBN) - 1)
        with routing.of(model, number):  # in backward too: what it repeats is then compiled as in forward
            losses.append(run_microbatch(model, microbatch, scale))
    return torch.stack(losses).sum()


def run_microbatch(model: nn.Module, microbatch: Microbatch, scale: Tensor) -> Tensor:
    """Forward and backward of one microbatch; returns the loss, scaled."""
    with caching_casts(model):
        loss = model(*microbatch) * scale
        loss.backward()
    return loss.detach()
