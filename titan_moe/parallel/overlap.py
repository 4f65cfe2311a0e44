"""Interleave two microbatches by the schedule of plan/schedule.py: each hides the other's communication.

Blocks run in pieces (microbatch_run.py). Activations are little more than one microbatch's: a forward uses the memory
that the backward beside it frees.

It pays between nodes, where communication is slow; inside a node `overlap = "tile"` hides more (tools/RESULTS.md).
"""

import torch
from torch import Tensor, nn

from titan_moe.data.packing import Batch
from titan_moe.models.transformer import Transformer
from titan_moe.parallel.fsdp import ManualFSDP
from titan_moe.parallel.microbatch_run import MicrobatchRun, are_dense
from titan_moe.parallel.unsharded_experts import caching_casts
from titan_moe.plan.schedule import interleaved


def forward_backward_interleaved(model: nn.Module, batch: Batch, scale: Tensor) -> Tensor:
    """Forward and backward of all microbatches of a step; returns this rank's loss, scaled.

    Gradients are those of one microbatch after the other, summed in the same order, except for a tied embedding: its
    two gradients of a microbatch are added one after the other.
    """
    assert isinstance(model, Transformer)
    runs = [MicrobatchRun(model, *microbatch, scale) for microbatch in batch.microbatches()]
    parameters = ManualFSDP(model)
    with caching_casts(model):
        for kind, microbatch, layer, piece in interleaved(len(runs), are_dense(model)):
            match kind:
                case "gather":
                    parameters.gather(layer)
                case "await":
                    parameters.wait(layer)
                case "forward":
                    runs[microbatch].forward(layer, piece)
                case "backward":
                    runs[microbatch].backward()
                case "reduce_grads":
                    parameters.reduce_grads(layer, is_last=microbatch == len(runs) - 1)
    parameters.finish()
    return torch.stack([run.take_output() for run in runs]).sum()
