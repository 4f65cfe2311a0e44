"""Compile the pieces of every block, each as one full graph.

The dense part of a block (norms, attention, residual), its router, its experts and its shared experts are pieces; a
dense block is one piece, and so is the softmax of the loss, unless Triton makes it. The dispatch between them stays
eager, because it may read sizes on the host and its collectives are its own. All blocks have the same code and no
Python number of their own, so each piece compiles once a model, not once a layer.
"""

from collections.abc import Callable
from functools import partial, wraps

import torch
from torch import Tensor, nn

from titan_moe.config.perf import CompileConfig
from titan_moe.dispatch.base import Routed
from titan_moe.kernels.cross_entropy import linear_cross_entropy, loss_and_dlogits
from titan_moe.layers.block import Block
from titan_moe.layers.head import LanguageModelHead
from titan_moe.layers.moe import MoE


def is_on(config: CompileConfig, device: torch.device) -> bool:
    """Whether this run compiles."""
    return config.regional == "on" or (config.regional == "on_cuda" and device.type == "cuda")


def apply(model: nn.Module, config: CompileConfig, device: torch.device) -> None:
    """Compile every block's pieces in place; parameter names do not change."""
    if not is_on(config, device):
        return
    for module in model.modules():
        if isinstance(module, LanguageModelHead) and module.cross_entropy is linear_cross_entropy:
            softmax = torch.compile(loss_and_dlogits, fullgraph=True)
            module.cross_entropy = partial(linear_cross_entropy, softmax=softmax)
        elif isinstance(module, MoE):  # in a block of any class, a user's too
            for piece in (module.router, module.shared_experts):
                piece.forward = torch.compile(piece.forward, fullgraph=True)  # type: ignore[method-assign]
            module.experts.forward = _compile_for_many_rows(module.experts.forward)  # type: ignore
        elif isinstance(module, Block) and isinstance(module.feed_forward, MoE):
            module.front = torch.compile(module.front, fullgraph=True)  # type: ignore[method-assign]
        elif isinstance(module, Block):
            module.forward = torch.compile(module.forward, fullgraph=True)  # type: ignore[method-assign]


def _compile_for_many_rows(serve: Callable[[Routed], Tensor]) -> Callable[[Routed], Tensor]:
    """Serve no row, or one, without the compiler, which would make a graph of its own for each of these sizes.

    Where rows travel between ranks both happen, and graphs of one piece are limited in number.
    """
    compiled = torch.compile(serve, fullgraph=True)

    @wraps(serve)
    def serve_rows(routed: Routed) -> Tensor:
        is_many = min(routed.x_SD.shape[0], routed.rows_R.shape[0]) > 1
        return (compiled if is_many else serve)(routed)

    return serve_rows
