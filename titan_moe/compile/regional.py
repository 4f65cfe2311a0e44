"""Compile every block, whole or in pieces, each as one full graph.

In pieces, the dense part of a block (norms, attention, residual), its router, its experts and its shared experts are
graphs; a dense block is one piece, and so is the softmax of the loss. The dispatch between them stays eager, because it
may read sizes on the host. Where the dispatcher reads nothing there, a block can be a single graph instead: the
compiler then sees the residual sum, the plan of the dispatch and the combine too, and the host calls one graph a
block.

All blocks have the same code and no Python number of their own, so each graph compiles once a model, not once a layer.
"""

from collections.abc import Callable
from functools import wraps
from typing import Any

import torch
from torch import Tensor, nn

from titan_moe.config.perf import CompileConfig
from titan_moe.dispatch.base import Routed
from titan_moe.layers.block import Block
from titan_moe.layers.head import LanguageModelHead
from titan_moe.layers.moe import MoE


def is_on(config: CompileConfig, device: torch.device) -> bool:
    """Whether this run compiles."""
    return config.regional == "on" or (config.regional == "on_cuda" and device.type == "cuda")


def spans_blocks(config: CompileConfig, device: torch.device) -> bool:
    """Whether this run compiles blocks whole, so that nothing may hook into them from outside."""
    return is_on(config, device) and config.extent == "block"


def apply(model: nn.Module, config: CompileConfig, device: torch.device) -> None:
    """Compile every block in place; parameter names do not change."""
    if is_on(config, device):
        _compile(model, spans_blocks=spans_blocks(config, device))


def _compile(module: nn.Module, *, spans_blocks: bool) -> None:
    layers = [layer for layer in module.modules() if isinstance(layer, MoE)]
    if isinstance(module, Block) and not layers:
        module.forward = torch.compile(module.forward, fullgraph=True)  # type: ignore[method-assign]
        return
    if spans_blocks and isinstance(module, (Block, MoE)) and not any(layer.dispatcher.reads_host for layer in layers):
        module.forward = _compile_with_experts(module.forward)  # type: ignore[method-assign]
        return
    if isinstance(module, LanguageModelHead):
        module.softmax = torch.compile(module.softmax, fullgraph=True)
    elif isinstance(module, MoE):
        for piece in (module.router, module.shared_experts):
            piece.forward = torch.compile(piece.forward, fullgraph=True)  # type: ignore[method-assign]
        module.experts.forward = _compile_for_many_rows(module.experts.forward)  # type: ignore
    elif isinstance(module, Block):
        module.front = torch.compile(module.front, fullgraph=True)  # type: ignore[method-assign]
    for child in module.children():
        _compile(child, spans_blocks=spans_blocks)


def _compile_with_experts(forward: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Compile a whole block, or the MoE layer of a block of one's own, under a code object of its own.

    Graphs of one code object are limited in number, and dense blocks need theirs: training, validation, and two sizes
    while text is generated.
    """

    @wraps(forward)
    def with_experts(*args: Any) -> Tensor:
        return forward(*args)

    return torch.compile(with_experts, fullgraph=True)


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
