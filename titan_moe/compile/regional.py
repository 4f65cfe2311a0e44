"""Compile every block with `fullgraph=True`, as one graph or in pieces.

In pieces, the dense part of a block (norms, attention, residual), its router, its experts and its shared experts are
one graph each. A dense block is one graph, and so is the softmax of the loss unless it is a Triton kernel. Dispatch and
combine stay eager, because the dispatcher may read sizes on the host. With a dispatcher that does not, a whole block
can be one graph: the compiler then also fuses the residual sum and the indices of dispatch and combine, and the host
launches one graph per block.

All blocks share their code and have no Python number that differs by layer, so each graph compiles once per model.
"""

from collections.abc import Callable
from functools import partial, wraps
from typing import Any

import torch
from torch import Tensor, nn

from titan_moe.compile.read_backs import add_barriers
from titan_moe.config.perf import CompileConfig
from titan_moe.dispatch.base import ExpertInputs, Routed
from titan_moe.dispatch.cloning import CloningExchange
from titan_moe.kernels.experts.delayed_weight_grads import QueuedMLP
from titan_moe.kernels.experts.weights import ExpertWeights
from titan_moe.kernels.loss.cross_entropy import linear_cross_entropy, loss_and_dlogits
from titan_moe.layers.block import Block
from titan_moe.layers.head import LanguageModelHead
from titan_moe.layers.moe import MoE


def apply(model: nn.Module, config: CompileConfig, device: torch.device) -> None:
    """Compile every block in place. Parameter names do not change."""
    if not config.compiles(device.type):
        return
    if device.type == "cuda":
        add_barriers()
    compiled: set[nn.Module] = set()
    for module in model.modules():  # parents come before children
        if module in compiled:
            continue
        if _is_one_graph(module, config.compiles_blocks(device.type)):
            compiled.update(module.modules())
            layers = [child for child in module.modules() if isinstance(child, MoE)]
            forward = module.forward
            module.forward = _compile_moe_block(forward, layers) if layers else _compile(forward)
        else:
            _compile_pieces(module)


def modules_in_graphs(model: nn.Module, config: CompileConfig, device: torch.device) -> set[nn.Module]:
    """The modules whose computation `apply` compiles, so far as they are in graphs of their own or of their parents."""
    inside: set[nn.Module] = set()
    if not config.compiles(device.type):
        return inside
    for module in model.modules():
        if _is_one_graph(module, config.compiles_blocks(device.type)):
            inside.update(module.modules())
        elif isinstance(module, MoE):
            for piece in (module.router, module.experts, module.shared_experts):
                inside.update(piece.modules())
        elif isinstance(module, Block):  # its front
            inside.update(module.attention.modules())
    return inside


def _is_one_graph(module: nn.Module, compiles_blocks: bool) -> bool:
    """Whether a module is compiled as one graph. A dense block always is. A MoE block, or the MoE layer of a user's
    block, is if `compile.extent = "block"` and its dispatcher does not read the host."""
    layers = [layer for layer in module.modules() if isinstance(layer, MoE)]
    may_include_experts = compiles_blocks and not any(layer.dispatcher.facts.reads_host for layer in layers)
    return isinstance(module, (Block, MoE)) and (not layers or may_include_experts)


def _compile_pieces(module: nn.Module) -> None:
    if isinstance(module, LanguageModelHead) and module.cross_entropy is linear_cross_entropy:
        module.cross_entropy = partial(linear_cross_entropy, softmax=_compile(loss_and_dlogits))
    elif isinstance(module, MoE):  # in a block of any class, also a user's
        for piece in (module.router, module.shared_experts):
            piece.forward = _compile(piece.forward)  # type: ignore[method-assign]
        if not isinstance(module.experts.mlp, QueuedMLP):  # which is one kernel after the other, and has side effects
            module.experts.compute = _compile_experts(module)  # type: ignore
    elif isinstance(module, Block):
        module.front = _compile(module.front)  # type: ignore[method-assign]


def _compile(function: Callable[..., Any]) -> Callable[..., Any]:
    return torch.compile(function, fullgraph=True)


def _compile_moe_block(forward: Callable[..., Tensor], layers: list[MoE]) -> Callable[..., Tensor]:
    """Compile a MoE block, or the MoE layer of a user's block, under a separate code object.

    Dynamo limits the number of graphs per code object, and dense blocks need theirs: training, validation, and two
    sizes in text generation. Calls with suspended expert capacity run eagerly: a graph would allocate for the worst
    case, for which a large model has no memory.
    """

    @wraps(forward)
    def with_experts(*args: Any, **kwargs: Any) -> Tensor:
        return forward(*args, **kwargs)

    compiled = _compile(with_experts)

    @wraps(forward)
    def compiled_while_bounded(*args: Any, **kwargs: Any) -> Tensor:
        is_suspended = any(layer.dispatcher.capacity.is_suspended for layer in layers)
        return (forward if is_suspended else compiled)(*args, **kwargs)

    return compiled_while_bounded


def _compile_experts(moe: MoE) -> Callable[..., Any]:
    """Compile the expert MLP for any number of rows: at once where the host reads exact numbers, as hardly two calls
    have the same; else for the first number, and at a second one for any.

    Calls with zero rows or one row run eagerly: Dynamo specialises on 0 and 1, and the number of graphs per code object
    is limited. Both sizes occur under expert parallelism. Bounded and unbounded calls have separate code objects, and
    so have calls with clones and without: one that saw both sizes would become dynamic.
    """
    compute = moe.experts.compute

    @wraps(compute)
    def unbounded_experts(inputs: ExpertInputs, rows: Tensor, weights: ExpertWeights) -> Any:
        return compute(inputs, rows, weights)

    @wraps(compute)
    def experts_and_clones(inputs: ExpertInputs, rows: Tensor, weights: ExpertWeights) -> Any:
        return compute(inputs, rows, weights)

    @wraps(compute)
    def unbounded_experts_and_clones(inputs: ExpertInputs, rows: Tensor, weights: ExpertWeights) -> Any:
        return compute(inputs, rows, weights)

    with_clones = _compile(experts_and_clones), _compile(unbounded_experts_and_clones)
    without_clones = _compile(compute), _compile(unbounded_experts)

    @wraps(compute)
    def select_graph(inputs: ExpertInputs, rows: Tensor, weights: ExpertWeights) -> Any:
        if min(inputs.sizes) <= 1:
            return compute(inputs, rows, weights)
        is_suspended = moe.dispatcher.capacity.is_suspended
        if isinstance(inputs, Routed) and (moe.dispatcher.facts.reads_host or is_suspended):
            _mark_any_number(rows, inputs)
        compiled = with_clones if isinstance(inputs.exchange, CloningExchange) else without_clones
        return compiled[is_suspended](inputs, rows, weights)

    return select_graph


def _mark_any_number(rows_SD: Tensor, inputs: Routed) -> None:
    """Tell the compiler that the numbers of rows and slots will differ."""
    for tensor in (rows_SD, inputs.rows_R, inputs.slots_SK, inputs.scores_R):
        torch._dynamo.maybe_mark_dynamic(tensor, 0)
