"""Name the parts of a built model, so that a trace of it can be split by them.

A transform, so that layers know nothing of traces and runs that are not traced run nothing of this. It wraps methods
from outside: after compile, so that a compiled piece is one range and its graph is the same (a block that is compiled
whole is the range of the block, and nothing inside it has a name); before recompute, so that a forward that is repeated
in backward is named too.
"""

from torch import nn

from titan_moe.dispatch.base import TokenDispatcher
from titan_moe.layers.block import Block
from titan_moe.layers.head import LanguageModelHead
from titan_moe.layers.mlp import NoMLP
from titan_moe.layers.moe import MoE
from titan_moe.profile.region import marked


def apply(model: nn.Module) -> None:
    """Mark every part of the model in place; parameter names do not change."""
    for block in model.get_submodule("layers").children():
        if isinstance(block, Block):
            _mark(block, "attention", "front")
            if not isinstance(block.feed_forward, MoE):
                _mark(block.feed_forward, "dense", "forward")
        _mark(block, "block", "forward")
    for module in model.modules():
        if isinstance(module, MoE):
            _mark_moe(module)
        elif isinstance(module, LanguageModelHead):
            _mark(module, "head", "forward")
        elif isinstance(module, nn.Embedding):
            _mark(module, "embedding", "forward")
    for child in model.children():
        if isinstance(child, nn.RMSNorm):  # the norm before the head
            _mark(child, "head", "forward")


def _mark_moe(moe: MoE) -> None:
    dispatcher: TokenDispatcher = moe.dispatcher
    _mark(moe.router, "router", "forward")
    _mark(dispatcher, "dispatch", "prepare", "start_dispatch", "finish_dispatch")
    _mark(dispatcher, "combine", "start_combine", "finish_combine")
    _mark(moe.experts, "experts", "forward", "delayed_weights")
    if not isinstance(moe.shared_experts, NoMLP):
        _mark(moe.shared_experts, "shared", "forward")
    for latent in (moe.latent_down, moe.latent_up):
        if not isinstance(latent, nn.Identity):
            _mark(latent, "latent", "forward")


def _mark(owner: object, name: str, *methods: str) -> None:
    for method in methods:
        setattr(owner, method, marked(getattr(owner, method), name))
