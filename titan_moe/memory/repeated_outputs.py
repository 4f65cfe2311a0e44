"""Outputs of a part that are made again in backward, whatever saves them.

Autograd hands each tensor that a later operation saves to a hook. If it lies in the storage of such an output, the hook
keeps how to make it: the part, its inputs, and where the tensor lies in the output. The first that asks in backward
makes all outputs of the part, and the last that asks frees them. Inputs may be such outputs themselves.
"""

from collections.abc import Callable
from contextlib import ExitStack
from functools import wraps
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils._pytree import tree_flatten, tree_map

PLAIN = (Tensor, nn.Parameter)


class RepeatedOutputs:
    """The outputs of the parts of one block, while its forward runs."""

    def __init__(self) -> None:
        self._outputs: dict[int, tuple[_Call, int, Tensor]] = {}
        """By storage, of the forward under way. The tensor keeps the storage alive."""
        self._is_open = False

    def of(self, part: Callable[..., Any]) -> Callable[..., Any]:
        """The part, with outputs that are made again."""

        @wraps(part)
        def with_repeated_outputs(*args: Any) -> Any:
            outputs = part(*args)
            if self._is_open and torch.is_grad_enabled():
                self._know(_Call(part, tree_map(self._input, args)), args, outputs)
            return outputs

        return with_repeated_outputs

    def in_scope(self, forward: Callable[..., Any]) -> Callable[..., Any]:
        """The forward of a block that has these parts."""

        @wraps(forward)
        def with_hooks(*args: Any, **kwargs: Any) -> Any:
            if not torch.is_grad_enabled():
                return forward(*args, **kwargs)
            self._is_open = True
            try:
                with saved_tensors_hooks(self._packed, _unpacked):
                    return forward(*args, **kwargs)
            finally:
                self._is_open = False
                self._outputs.clear()

        return with_hooks

    def _know(self, call: "_Call", args: Any, outputs: Any) -> None:
        of_inputs = {_storage(value) for value in tree_flatten(args)[0] if isinstance(value, Tensor)}
        for index, output in enumerate(tree_flatten(outputs)[0]):
            # views of an input are kept, and parameters, which FSDP may have freed by then
            if type(output) is Tensor and (storage := _storage(output)) not in of_inputs and not _is_weight(output):
                self._outputs[storage] = call, index, output.detach()
                call.strides[index] = output.stride()

    def _packed(self, value: Any) -> Any:
        """How to make a tensor, or what was given."""
        found = self._outputs.get(_storage(value)) if type(value) in PLAIN and value.numel() else None
        if found is None or found[2].dtype != value.dtype:
            return value
        call, index, output = found
        call.num_readers += 1
        place = value.size(), value.stride(), value.storage_offset() - output.storage_offset()
        return _Saved(call, index, *place, value.requires_grad)

    def _input(self, value: Any) -> Any:
        packed = self._packed(value)
        return packed.detach().requires_grad_(value.requires_grad) if isinstance(packed, Tensor) else packed


class _Saved(NamedTuple):
    """A tensor in an output of a call."""

    call: "_Call"
    number: int
    size: torch.Size
    stride: tuple[int, ...]
    offset: int
    requires_grad: bool


class _Call:
    """A part, its inputs, and what readers in backward have not taken yet."""

    def __init__(self, part: Callable[..., Any], args: Any) -> None:
        self.part, self.args = part, args
        self.autocasts = [
            (device, torch.get_autocast_dtype(device), torch.is_autocast_enabled(device)) for device in ("cpu", "cuda")
        ]
        self.strides: dict[int, tuple[int, ...]] = {}
        self.num_readers = 0
        self._outputs: list[Tensor] = []

    def output(self, index: int) -> Tensor:
        """An output, made again if nothing else has asked before."""
        if not self._outputs:
            args = tree_map(_input_again, self.args, is_leaf=lambda value: isinstance(value, _Saved))
            with ExitStack() as contexts:
                contexts.enter_context(torch.enable_grad())  # the same graphs of the compiler, and so the same bits
                for device, dtype, is_enabled in self.autocasts:
                    contexts.enter_context(torch.autocast(device, dtype, is_enabled))
                outputs = tree_flatten(self.part(*args))[0]
                self._outputs = [value.detach() if isinstance(value, Tensor) else value for value in outputs]
        output = self._outputs[index]
        if output.stride() != self.strides[index]:
            raise RuntimeError(
                f"backward makes a tensor with strides {output.stride()}, which forward made with "
                f"{self.strides[index]}; name fewer parts in memory.recompute"
            )
        self.num_readers -= 1
        if self.num_readers <= 0:
            self._outputs = []
        return output


def _input_again(value: Any) -> Any:
    return _unpacked(value).requires_grad_(value.requires_grad) if isinstance(value, _Saved) else value


def _unpacked(value: Any) -> Any:
    if not isinstance(value, _Saved):
        return value
    output = value.call.output(value.number)
    return output.as_strided(value.size, value.stride, output.storage_offset() + value.offset)


def _is_weight(value: Tensor) -> bool:
    return isinstance(value._base, nn.Parameter)


def _storage(value: Tensor) -> int:
    """The identity of a tensor's memory. Its address is none: FSDP frees parameters whose storage lives on."""
    return value.untyped_storage()._cdata
