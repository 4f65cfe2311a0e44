"""Wrap the parts of a built model in regions, by which a trace is broken down.

This is a transform: layers contain no tracing code, and untraced runs do not apply it. It wraps methods after compile,
so that a compiled graph is unchanged and one range. It wraps before recompute, so that a recomputed forward has its
range too.
"""

from torch import nn

from titan_moe.layers.block import Block
from titan_moe.layers.head import LanguageModelHead
from titan_moe.layers.mlp import NoMLP
from titan_moe.layers.moe import MoE
from titan_moe.layers.mtp import MTPBlock
from titan_moe.profile.region import in_region


def apply(model: nn.Module) -> None:
    """Wrap every part of the model in place. Parameter names do not change."""
    for block in model.get_submodule("layers").children():
        if isinstance(block, Block):
            _wrap(block, "attention", "front")
            if not isinstance(block.feed_forward, MoE):
                _wrap(block.feed_forward, "dense", "forward")
        if isinstance(block, MTPBlock):
            _wrap(block, "mtp", "join")
        _wrap(block, "block", "forward")
    for module in model.modules():
        if isinstance(module, MoE):
            _wrap_moe(module)
        elif isinstance(module, LanguageModelHead):
            _wrap(module, "head", "forward")
        elif isinstance(module, nn.Embedding):
            _wrap(module, "embedding", "forward")
    for child in model.children():
        if isinstance(child, (nn.RMSNorm, nn.LayerNorm)):  # the norm before the head
            _wrap(child, "head", "forward")


def _wrap_moe(moe: MoE) -> None:
    _wrap(moe.router, "router", "forward")
    _wrap(moe.dispatcher, "dispatch", "prepare", "start_dispatch", "finish_dispatch")
    _wrap(moe.dispatcher, "combine", "start_combine", "finish_combine")
    _wrap(moe.experts, "experts", "forward", "delayed_weights")
    if not isinstance(moe.shared_experts, NoMLP):
        _wrap(moe.shared_experts, "shared", "forward")
    for latent in (moe.latent_down, moe.latent_up):
        if not isinstance(latent, nn.Identity):
            _wrap(latent, "latent", "forward")


def _wrap(owner: object, name: str, *methods: str) -> None:
    for method in methods:
        setattr(owner, method, in_region(getattr(owner, method), name))
