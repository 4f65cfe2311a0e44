"""Run forward and backward of a microbatch by pieces (plan/pipeline/pieces.py), with another microbatch in between.

FSDP's hooks do not run for pieces, so `ManualFSDP` gathers parameters and reduces gradients.
"""

from functools import partial
from typing import Any

from torch import Tensor

from titan_moe.dispatch.base import Exchange, Pending
from titan_moe.layers.attention import Context
from titan_moe.layers.block import Block
from titan_moe.layers.mlp import add_shared
from titan_moe.layers.moe import MoE
from titan_moe.models.transformer import Transformer
from titan_moe.parallel.autograd_segment import AutogradSegment
from titan_moe.profile.region import region


def are_dense(model: Transformer) -> list[bool]:
    """By layer, whether its feed-forward is dense: its kind in plan/pipeline/pieces.py."""
    return [not isinstance(block.feed_forward, MoE) for block in model.layers.values()]


class MicrobatchRun:
    """Forward and backward of one microbatch through a model, or a part of one (models/part.py).

    Layers are numbered as the model has them, from 0.
    """

    def __init__(
        self,
        model: Transformer,
        x: Tensor,
        labels_BN: Tensor,
        document_ids_BN: Tensor | None,
        scale: Tensor | None,
        read_BN: Tensor | None = None,
    ) -> None:
        """`x` is tokens [B, N], or hidden states [B, N, D] without the embedding; `read_BN` are the tokens then, where
        layers route by them. `scale` is that of the loss; None without the head."""
        self.model, self.scale, self.read_BN = model, scale, read_BN
        self.labels_BN, self.document_ids_BN = labels_BN, document_ids_BN
        self.blocks = list(model.layers.items())
        self.contexts: dict[str, Context] = {}  # by name of the layer
        self.activations: tuple[Any, ...] = (x,)  # inputs of the next piece
        self.segments: list[AutogradSegment] = []  # backward still has to run these
        self.grads: list[Tensor | None] = []
        """Of the outputs of the last segment, given for what the forward returns; after the whole backward of `x`."""

    def forward(self, layer: int, piece: str) -> None:
        """Run the next piece."""
        self.segments.append(AutogradSegment(partial(getattr(self, f"_{piece}"), layer)))
        self.activations = self.segments[-1](*self.activations)
        if piece == "head":
            (output,), self.contexts = self.activations, {}
            self.activations = (output.detach(),)

    def take_output(self) -> Tensor:
        """After the last piece: the loss, scaled, or hidden states, which are not kept."""
        (output,), self.activations = self.activations, ()
        return output

    def backward(self) -> None:
        """Run the backward of the last piece."""
        self.grads = self.segments.pop().backward(self.grads)

    def _embed(self, layer: int, x: Tensor) -> tuple[Tensor]:
        contexts = self.model.contexts(x, self.document_ids_BN)
        self.contexts = self.model.with_tokens(contexts, x if self.read_BN is None else self.read_BN)
        return (self.model.embed(x),)

    def _block(self, layer: int, x_BND: Tensor) -> tuple[Tensor]:
        return (self._at(layer).forward(x_BND, self._context(layer)),)

    def _front(self, layer: int, x_BND: Tensor) -> tuple[Any, ...]:
        block = self._at(layer)
        moe = block.feed_forward
        with region("block"):
            context = self._context(layer)
            h_BND, normed_BND = block.front(x_BND, context)
            x_TD = normed_BND.flatten(0, 1)
            topk_scores_TK, topk_ids_TK = moe.router(normed_BND, *context.of_experts)
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
        block = self._at(layer)
        moe = block.feed_forward
        with region("block"):
            y_TD = add_shared(moe.latent_up(moe.dispatcher.finish_combine(pending_y, exchange)), shared_TD)
            return (block.back(h_BND, y_TD.unflatten(0, h_BND.shape[:2])),)

    def _head(self, layer: int, x_BND: Tensor) -> tuple[Tensor]:
        out = self.model.head(self.model.norm(x_BND), self.labels_BN)
        return (out if self.scale is None else out * self.scale,)

    def _at(self, layer: int) -> Any:
        _, block = self.blocks[layer]
        assert isinstance(block, Block)
        return block

    def _context(self, layer: int) -> Context:
        name, _ = self.blocks[layer]
        return self.contexts[name]
