"""Let the host keep what blocks need for backward, by name (config/offload.py).

A tensor goes when the first operation saves it, and with it all that others save of the same memory. What is freed on
the GPU is therefore what nothing else holds: the input of a pipeline's stage stays.
"""

from collections.abc import Callable, Mapping
from functools import cache, partial, wraps
from typing import Any

import torch
from torch import Tensor, nn

from titan_moe.config.offload import OFFLOADABLE
from titan_moe.config.recompute import PartsByLayer
from titan_moe.memory.host_copies import Copies, Copy, CopyStream, NoStream
from titan_moe.memory.recompute import parts_of
from titan_moe.memory.saved_tensors import PLAIN, Known, Scope


def borders(model: nn.Module, offload: PartsByLayer) -> set[tuple[nn.Module, str]]:
    """The methods that no graph of the compiler may go beyond: their inputs are tensors of their own."""
    blocks = model.get_submodule("layers").named_children()
    parts = [part for layer, block in blocks for part in parts_of(block, offload.names_of(int(layer)), OFFLOADABLE)]
    # attention runs between its projections' graphs
    ends = ((module.out, "forward") if name == "attention" else (module, method) for name, module, method in parts)
    return set(ends)


def copies_of(device: torch.device) -> Copies:
    """The copies of a rank with this device."""
    return Copies(CopyStream(device) if device.type == "cuda" else NoStream())


def apply(model: nn.Module, offload: PartsByLayer, copies: Copies, scopes: Mapping[str, Scope]) -> None:
    """Replace methods of the blocks' modules by those whose saved tensors the host keeps, in the scopes of the blocks
    by layer. Parameter names do not change.

    Runs after recompute, whose parts then take tensors of the host as inputs.
    """
    for layer, block in model.get_submodule("layers").named_children():
        parts = list(parts_of(block, offload.names_of(int(layer)), OFFLOADABLE))
        scope = scopes[layer]
        of_block = _OfBlock(copies, scope)
        for name, module, method in parts:
            if name == "block":
                scope.at_start.append(of_block.keep)
            else:
                way = of_block.keeping_input if OFFLOADABLE[name].what == "inputs" else of_block.keeping_saved
                setattr(module, method, way(getattr(module, method)))
        if parts:
            scope.surround(block)
        if offload.layers:
            block.forward = _taking_turns(block.forward, copies)


def _taking_turns(forward: Callable[..., Any], copies: Copies) -> Callable[..., Any]:
    """The forward of a block, also of one of which the host keeps nothing. Tensors of the blocks before leave in its
    forward, and come back in its backward."""

    @wraps(forward)
    def with_turn(*args: Any, **kwargs: Any) -> Any:
        if not torch.is_grad_enabled():
            return forward(*args, **kwargs)
        of_block = copies.begin()
        output = forward(*args, **kwargs)
        if isinstance(output, Tensor) and output.requires_grad:
            output.register_hook(lambda gradient: of_block.ask())
        return output

    return with_turn


class _OfBlock:
    """What the host keeps of a block."""

    def __init__(self, copies: Copies, scope: Scope) -> None:
        self.copies, self.scope = copies, scope

    def keep(self, x: Any, *args: Any, **kwargs: Any) -> None:
        """Let the host keep a tensor, once something saves it."""
        if self.scope.is_open and type(x) in PLAIN:
            self.scope.know(x, self._source(x.detach()), 0)

    def keeping_input(self, part: Callable[..., Any]) -> Callable[..., Any]:
        """A part whose first argument the host keeps."""

        @wraps(part)
        def with_input(x: Any, *args: Any, **kwargs: Any) -> Any:
            self.keep(x)
            return part(x, *args, **kwargs)

        return with_input

    def keeping_saved(self, part: Callable[..., Any]) -> Callable[..., Any]:
        """A part of which the host keeps all that it saves, but masks and what has their size."""

        @wraps(part)
        def with_saved(*args: Any, **kwargs: Any) -> Any:
            masks = [mask.shape[-2:] for it in args if isinstance(mask := getattr(it, "mask", None), Tensor)]
            masks += [torch.Size((queries, keys + 1)) for queries, keys in masks]  # with a sink

            def take(value: Tensor) -> Known | None:
                return None if value.shape[-2:] in masks else Known(self._source(value), value.detach(), 0)

            self.scope.takes = take
            try:
                return part(*args, **kwargs)
            finally:
                self.scope.takes = None

        return with_saved

    def _source(self, tensor: Tensor) -> Callable[[], Copy]:
        """Makes its copy when it is first saved."""
        return cache(partial(self.copies.keep, tensor))
