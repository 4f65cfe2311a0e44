"""Interleave two microbatches by the schedule of plan/schedule.py: each hides the other's communication.

Blocks run in pieces, past the hooks of FSDP, so `ManualFSDP` gathers parameters and reduces gradients. Activations are
little more than one microbatch's: a forward uses the memory that the backward beside it frees.

It pays between nodes, where communication is slow; inside a node `overlap = "tile"` hides more (tools/RESULTS.md).
"""

from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from titan_moe.data.packing import Batch
from titan_moe.dispatch.base import Exchange, Pending
from titan_moe.layers.attention import Context
from titan_moe.layers.block import Block
from titan_moe.layers.mlp import add_shared
from titan_moe.layers.moe import MoE
from titan_moe.models.transformer import Transformer
from titan_moe.parallel.autograd_segment import AutogradSegment
from titan_moe.parallel.fsdp import ManualFSDP
from titan_moe.parallel.unsharded_experts import caching_casts
from titan_moe.plan.schedule import interleaved
from titan_moe.profile.region import region


def forward_backward_interleaved(model: nn.Module, batch: Batch, scale: Tensor) -> Tensor:
    """Forward and backward of all microbatches of a step; returns this rank's loss, scaled.

    Gradients are those of one microbatch after the other, summed in the same order, except for a tied embedding: its
    two gradients of a microbatch are added one after the other.
    """
    assert isinstance(model, Transformer)
    is_dense = [not isinstance(block.feed_forward, MoE) for block in model.layers.values()]
    runs = [MicrobatchRun(model, *microbatch, scale) for microbatch in batch.microbatches()]
    parameters = ManualFSDP(model)
    with caching_casts(model):
        for kind, microbatch, layer, piece in interleaved(len(runs), is_dense):
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
    return torch.stack([run.loss for run in runs]).sum()


class MicrobatchRun:
    """Forward and backward of one microbatch, piece by piece."""

    def __init__(
        self, model: Transformer, tokens_BN: Tensor, labels_BN: Tensor, document_ids_BN: Tensor | None, scale: Tensor
    ) -> None:
        self.model, self.scale = model, scale
        self.tokens_BN, self.labels_BN, self.document_ids_BN = tokens_BN, labels_BN, document_ids_BN
        self.contexts: dict[str, Context] = {}  # by layer
        self.activations: tuple[Any, ...] = ()  # inputs of the next piece
        self.segments: list[AutogradSegment] = []  # backward still has to run these
        self.grads: list[Tensor | None] = []  # of the outputs of the last segment
        self.loss: Tensor

    def forward(self, layer: int, piece: str) -> None:
        """Run the next piece."""
        self.segments.append(AutogradSegment(partial(getattr(self, f"_{piece}"), layer)))
        self.activations = self.segments[-1](*self.activations)
        if piece == "head":
            (loss,), self.activations, self.contexts = self.activations, (), {}
            self.loss, self.grads = loss.detach(), [torch.ones_like(loss)]

    def backward(self) -> None:
        """Run the backward of the last piece."""
        self.grads = self.segments.pop().backward(self.grads)

    def _embed(self, layer: int) -> tuple[Tensor]:
        self.contexts = self.model.contexts(self.tokens_BN, self.document_ids_BN)
        return (self.model.embed(self.tokens_BN),)

    def _block(self, layer: int, x_BND: Tensor) -> tuple[Tensor]:
        return (self._at(layer).forward(x_BND, self.contexts[str(layer)]),)

    def _front(self, layer: int, x_BND: Tensor) -> tuple[Any, ...]:
        block = self._at(layer)
        moe = block.feed_forward
        with region("block"):
            h_BND, normed_BND = block.front(x_BND, self.contexts[str(layer)])
            x_TD = normed_BND.flatten(0, 1)
            topk_scores_TK, topk_ids_TK = moe.router(normed_BND)
            x_TL = moe.latent_down(x_TD)
            exchange = moe.dispatcher.prepare(topk_ids_TK, topk_scores_TK)
            return h_BND, x_TD, moe.dispatcher.start_dispatch(x_TL, exchange), exchange

    def _experts(
        self, layer: int, h_BND: Tensor, x_TD: Tensor, pending: Pending, exchange: Exchange
    ) -> tuple[Any, ...]:
        moe = self._at(layer).feed_forward
        with region("block"):
            # first, so that backward sends the gradients of rows before it computes those of weights
            ready = moe.experts.delayed_weights()
            routed = moe.dispatcher.finish_dispatch(pending, exchange)
            y_SL = moe.experts(routed, ready)
            pending_y = moe.dispatcher.start_combine(y_SL, routed.exchange)
            return h_BND, moe.shared_experts(x_TD), pending_y, routed.exchange  # shared experts run during the combine

    def _back(
        self, layer: int, h_BND: Tensor, shared_TD: Tensor | None, pending_y: Pending, exchange: Exchange
    ) -> tuple[Tensor]:
        moe = self._at(layer).feed_forward
        with region("block"):
            y_TD = add_shared(moe.latent_up(moe.dispatcher.finish_combine(pending_y, exchange)), shared_TD)
            return (h_BND + y_TD.unflatten(0, h_BND.shape[:2]),)

    def _head(self, layer: int, x_BND: Tensor) -> tuple[Tensor]:
        return (self.model.head(self.model.norm(x_BND), self.labels_BN) * self.scale,)

    def _at(self, layer: int) -> Any:
        block = self.model.layers[str(layer)]
        assert isinstance(block, Block)
        return block
