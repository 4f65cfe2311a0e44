"""Compile every block, whole or in pieces, each as one full graph.

In pieces, the dense part of a block (norms, attention, residual), its router, its experts and its shared experts are
graphs; a dense block is one piece, and so is the softmax of the loss, unless Triton makes it. The dispatch between them
stays eager, because it may read sizes on the host. Where the dispatcher reads nothing there, a block can be a single
graph instead: the compiler then sees the residual sum, the plan of the dispatch and the combine too, and the host
starts one graph a block.

All blocks have the same code and no Python number of their own, so each graph compiles once a model, not once a layer.
"""

from collections.abc import Callable
from functools import partial, wraps
from typing import Any

import torch
from torch import Tensor, nn

from titan_moe.config.perf import CompileConfig
from titan_moe.dispatch.base import ExpertInputs
from titan_moe.kernels.experts.weights import ExpertWeights
from titan_moe.kernels.loss.cross_entropy import linear_cross_entropy, loss_and_dlogits
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
    if not is_on(config, device):
        return
    inside_a_graph: set[nn.Module] = set()
    for module in model.modules():  # what surrounds a module comes before it
        if module in inside_a_graph:
            continue
        if _is_one_graph(module, spans_blocks(config, device)):
            inside_a_graph.update(module.modules())
            layers = [inside for inside in module.modules() if isinstance(inside, MoE)]
            forward = module.forward
            module.forward = _compile_with_experts(forward, layers) if layers else _compile_plainly(forward)
        else:
            _compile_pieces(module)


def _is_one_graph(module: nn.Module, spans_blocks: bool) -> bool:
    """A dense block always is. One with experts, or the MoE layer of a block of one's own, is if blocks are to be whole
    and no dispatcher reads the host."""
    layers = [layer for layer in module.modules() if isinstance(layer, MoE)]
    may_hold_experts = spans_blocks and not any(layer.dispatcher.reads_host for layer in layers)
    return isinstance(module, (Block, MoE)) and (not layers or may_hold_experts)


def _compile_pieces(module: nn.Module) -> None:
    if isinstance(module, LanguageModelHead) and module.cross_entropy is linear_cross_entropy:
        softmax = _compile_plainly(loss_and_dlogits)
        module.cross_entropy = partial(linear_cross_entropy, softmax=softmax)
    elif isinstance(module, MoE):  # in a block of any class, a user's too
        for piece in (module.router, module.shared_experts):
            piece.forward = _compile_plainly(piece.forward)  # type: ignore[method-assign]
        module.dispatcher.compile_pieces(_compile_plainly)
        module.experts.serve = _compile_for_many_rows(module)  # type: ignore
    elif isinstance(module, Block):
        module.front = _compile_plainly(module.front)  # type: ignore[method-assign]


def _compile_plainly(function: Callable[..., Any]) -> Callable[..., Any]:
    return torch.compile(function, fullgraph=True)


def _compile_with_experts(forward: Callable[..., Tensor], layers: list[MoE]) -> Callable[..., Tensor]:
    """Compile a whole block, or the MoE layer of a block of one's own, under a code object of its own.

    Graphs of one code object are limited in number, and dense blocks need theirs: training, validation, and two sizes
    while text is generated. Where the layers' bound does not hold, no compiler is asked: a graph would have to lay out
    the worst case, which a large model has no memory for.
    """

    @wraps(forward)
    def with_experts(*args: Any, **kwargs: Any) -> Tensor:
        return forward(*args, **kwargs)

    compiled = _compile_plainly(with_experts)

    @wraps(forward)
    def compiled_while_bounded(*args: Any, **kwargs: Any) -> Tensor:
        is_suspended = any(layer.dispatcher.capacity.is_suspended for layer in layers)
        return (forward if is_suspended else compiled)(*args, **kwargs)

    return compiled_while_bounded


def _compile_for_many_rows(moe: MoE) -> Callable[..., Any]:
    """Serve no row, or one, without the compiler, which would make a graph of its own for each of these sizes.

    Where rows travel between ranks both happen, and graphs of one piece are limited in number. Slots without their
    bound are served by another code object: one that saw both sizes would make a graph of any size for both.
    """
    serve = moe.experts.serve

    @wraps(serve)
    def serve_unbounded(inputs: ExpertInputs, weights: ExpertWeights) -> Any:
        return serve(inputs, weights)

    compiled, compiled_unbounded = _compile_plainly(serve), _compile_plainly(serve_unbounded)

    @wraps(serve)
    def serve_rows(inputs: ExpertInputs, weights: ExpertWeights) -> Any:
        if min(inputs.sizes) <= 1:
            return serve(inputs, weights)
        return (compiled_unbounded if moe.dispatcher.capacity.is_suspended else compiled)(inputs, weights)

    return serve_rows
