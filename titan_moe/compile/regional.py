"""Compile every block with `fullgraph=True`, in pieces.

The dense part of a block (norms, attention, residual), its router, its experts and its shared experts are one graph
each. A dense block is one graph, and so is the softmax of the loss unless it is a Triton kernel. Dispatch and combine
stay eager, because the dispatcher may read sizes on the host. Where a part of a piece is recomputed by itself, the
piece is compiled by parts (`parts` of a layer): what is between them is then a tensor.

All blocks share their code and have no Python number that differs by layer, so each graph compiles once per model.
"""

from collections.abc import Callable, Collection, Iterator
from functools import partial, wraps
from typing import Any

import torch
from torch import Tensor, nn

from titan_moe.compile.read_backs import add_barriers
from titan_moe.config.perf import CompileConfig
from titan_moe.dispatch.base import ExpertInputs, Routed
from titan_moe.dispatch.clones.dispatcher import CloningExchange
from titan_moe.kernels.experts.weights import ExpertWeights
from titan_moe.kernels.loss.cross_entropy import linear_cross_entropy, loss_and_dlogits
from titan_moe.layers.block import Block
from titan_moe.layers.head import LanguageModelHead
from titan_moe.layers.moe import MoE
from titan_moe.layers.mtp import MTPBlock

Method = tuple[nn.Module, str]


def apply(
    model: nn.Module, config: CompileConfig, device: torch.device, borders: Collection[Method] = frozenset()
) -> None:
    """Compile every block in place. Parameter names do not change. No graph goes beyond the `borders`, methods whose
    outputs or inputs are tensors of their own."""
    if not config.compiles(device.type):
        return
    if device.type == "cuda":
        add_barriers()
    for module in model.modules():
        if isinstance(module, LanguageModelHead) and module.cross_entropy is linear_cross_entropy:
            module.cross_entropy = partial(linear_cross_entropy, softmax=_compile(loss_and_dlogits))
        elif isinstance(module, MoE):  # in a block of any class, also a user's
            for piece in (module.router, module.shared_experts):
                _compile_parts(piece, "forward", borders)
            if getattr(module.experts.mlp, "queue", None) is None:  # or it is kernels with side effects
                module.experts.compute = _compile_experts(module)  # type: ignore
        elif isinstance(module, Block):
            _compile_parts(module, "forward" if _is_dense(module) else "front", borders)
            if isinstance(module, MTPBlock) and not _is_dense(module):
                _compile_parts(module, "join", borders)


def modules_in_graphs(model: nn.Module, config: CompileConfig, device: torch.device) -> set[nn.Module]:
    """The modules whose computation `apply` compiles, so far as they are in graphs of their own or of their parents."""
    inside: set[nn.Module] = set()
    if not config.compiles(device.type):
        return inside
    for module in model.modules():
        if isinstance(module, MoE):
            for piece in (module.router, module.experts, module.shared_experts):
                inside.update(piece.modules())
        elif isinstance(module, Block):  # all of it, or its front
            inside.update((module if _is_dense(module) else module.attention).modules())
            inside.update([module.eh_proj] if isinstance(module, MTPBlock) else [])
    return inside


def _compile_parts(module: nn.Module, method: str, borders: Collection[Method]) -> None:
    """Compile a method as one graph, or its parts if one of them is, or has, a border."""
    parts = list(_parts(module, method))
    if not any(_has_border(*part, borders) for part in parts):
        if not getattr(module, "is_one_product", type(module) is nn.Linear):  # a graph adds nothing to one
            setattr(module, method, _compile(getattr(module, method)))
        return
    for part in parts:
        _compile_parts(*part, borders)


def _has_border(module: nn.Module, method: str, borders: Collection[Method]) -> bool:
    return (module, method) in borders or any(_has_border(*part, borders) for part in _parts(module, method))


def _parts(module: nn.Module, method: str) -> Iterator[Method]:
    """The methods that a method of a layer calls, as the layer lists them; None is a module that it lacks."""
    for name in getattr(type(module), "parts", {}).get(method, ()):
        if (owner := getattr(module, name)) is not None:
            yield (owner, "forward") if isinstance(owner, nn.Module) else (module, name)


def _is_dense(block: Block) -> bool:
    return not any(isinstance(module, MoE) for module in block.modules())


def _compile(function: Callable[..., Any]) -> Callable[..., Any]:
    return torch.compile(function, fullgraph=True)


def _compile_experts(moe: MoE) -> Callable[..., Any]:
    """Compile the expert MLP for any number of rows: at once where the host reads exact numbers, as hardly two calls
    have the same; else for the first number, and at a second one for any.

    Calls with zero rows or one row run eagerly: Dynamo specialises on 0 and 1, and the number of graphs per code object
    is limited. Both sizes occur under expert parallelism. Calls in pieces run eagerly too: they are rare, and the order
    of their exchanges must not change. Bounded and unbounded calls have separate code objects, and so have calls with
    clones and without: one that saw both sizes would become dynamic.
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
        capacity = moe.dispatcher.capacity
        if min(inputs.sizes) <= 1 or capacity.takes_pieces:
            return compute(inputs, rows, weights)
        is_suspended = capacity.is_suspended
        if isinstance(inputs, Routed) and (moe.dispatcher.facts.reads_host or is_suspended):
            _mark_any_number(rows, inputs)
        compiled = with_clones if isinstance(inputs.exchange, CloningExchange) else without_clones
        return compiled[is_suspended](inputs, rows, weights)

    return select_graph


def _mark_any_number(rows_SD: Tensor, inputs: Routed) -> None:
    """Tell the compiler that the numbers of rows and slots will differ."""
    for tensor in (rows_SD, inputs.rows_R, inputs.slots_SK, inputs.scores_R):
        torch._dynamo.maybe_mark_dynamic(tensor, 0)
