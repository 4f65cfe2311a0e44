"""Tensors that the operations of a block save for backward, and what is kept in their place.

Autograd hands each tensor that an operation saves to a hook. If it lies in memory that the block's scope knows, what is
kept is a source of that memory and where the tensor lies in it. Which operation saves it does not matter.
"""

from collections.abc import Callable
from functools import wraps
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

PLAIN = (Tensor, nn.Parameter)


class Source(Protocol):
    """What has a tensor for backward."""

    def read(self) -> Tensor:
        """The tensor. Each reader asks once."""
        ...


class Known(NamedTuple):
    """Memory that is kept otherwise."""

    source: Callable[[], Source]  # one for each reader
    tensor: Tensor  # in this memory: while it is here, the storage lives
    origin: int  # where the source's tensor begins in it


class Saved(NamedTuple):
    """A tensor in that of a source."""

    source: Source
    size: torch.Size
    stride: tuple[int, ...]
    offset: int
    requires_grad: bool


class Scope:
    """The memory that is kept otherwise of one block, while its forward runs."""

    def __init__(self) -> None:
        self.at_start: list[Callable[..., None]] = []
        """Called with the arguments of the forward."""
        self.takes: Callable[[Tensor], Known | None] | None = None
        """Makes a tensor known that is saved now, unless another that is kept lies in the same memory."""
        self._known: dict[int, Known] = {}  # by storage, of the forward under way
        self._kept: set[int] = set()  # storages of other saved tensors
        self._is_surrounded = self._is_open = False

    @property
    def is_open(self) -> bool:
        """Whether a forward is under way whose tensors are saved."""
        return self._is_open and torch.is_grad_enabled()

    def surround(self, block: nn.Module) -> None:
        """Replace the forward of the block by one that has this scope."""
        if not self._is_surrounded:
            block.forward = self.around(block.forward)
            self._is_surrounded = True

    def know(self, tensor: Tensor, source: Callable[[], Source], origin: int) -> None:
        """Let this memory be kept by a source from now on, unless it is already."""
        self._known.setdefault(storage_of(tensor), Known(source, tensor.detach(), origin))

    def packed(self, value: Any) -> Any:
        """What is kept of a saved tensor: a `Saved`, or the tensor."""
        if type(value) not in PLAIN:
            return value
        if not value.numel():
            return alone(value)
        place = storage_of(value)
        found = self._known.get(place)
        is_new = found is None and place not in self._kept and value.is_floating_point() and value.dim() > 0
        if is_new and self.takes is not None and (found := self.takes(value)) is not None:
            self._known[place] = found
        if found is None or found.tensor.dtype != value.dtype:
            self._kept.add(place)
            return alone(value)
        offset = value.storage_offset() - found.origin
        return Saved(found.source(), value.size(), value.stride(), offset, value.requires_grad)

    def around(self, forward: Callable[..., Any]) -> Callable[..., Any]:
        """A forward that has this scope."""

        @wraps(forward)
        def with_hooks(*args: Any, **kwargs: Any) -> Any:
            if not torch.is_grad_enabled():
                return forward(*args, **kwargs)
            self._is_open = True
            try:
                for act in self.at_start:
                    act(*args, **kwargs)
                with saved_tensors_hooks(self.packed, unpacked):
                    return forward(*args, **kwargs)
            finally:
                self._is_open = False
                self._known.clear()
                self._kept.clear()

        return with_hooks


def unpacked(value: Any) -> Any:
    """The tensor of what was kept."""
    if not isinstance(value, Saved):
        return value
    tensor = value.source.read()
    return tensor.as_strided(value.size, value.stride, tensor.storage_offset() + value.offset)


def alone(value: Tensor) -> Tensor:
    """The tensor without the node that made it. A node whose hook keeps its own output is never freed, unless backward
    runs it; autograd ties what is unpacked to its node again."""
    return value.detach() if value.grad_fn is not None else value


def storage_of(value: Tensor) -> int:
    """The identity of a tensor's memory. Its address is none: FSDP frees parameters whose storage lives on."""
    return value.untyped_storage()._cdata
