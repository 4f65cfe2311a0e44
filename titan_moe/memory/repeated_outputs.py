"""Outputs of a part that are made again in backward, whatever saves them.

What is kept is how to make an output: the part and its inputs. The first reader that asks in backward makes all outputs
of the part, and the last that asks frees them. Inputs may be such outputs themselves.
"""

from collections.abc import Callable
from contextlib import ExitStack
from functools import partial, wraps
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import Parameter
from torch.utils._pytree import tree_flatten, tree_map

from titan_moe.memory.saved_tensors import Saved, Scope, storage_of, unpacked


class RepeatedOutputs:
    """The outputs of the parts of one block, while its forward runs."""

    def __init__(self, scope: Scope | None = None) -> None:
        self.scope = scope or Scope()
        self.in_scope = self.scope.around

    def of(self, part: Callable[..., Any]) -> Callable[..., Any]:
        """The part, with outputs that are made again."""

        @wraps(part)
        def with_repeated_outputs(*args: Any) -> Any:
            outputs = part(*args)
            if self.scope.is_open:
                self._know(_Call(part, tree_map(self._input, args)), args, outputs)
            return outputs

        return with_repeated_outputs

    def _know(self, call: "_Call", args: Any, outputs: Any) -> None:
        of_inputs = {storage_of(value) for value in tree_flatten(args)[0] if isinstance(value, Tensor)}
        for index, output in enumerate(tree_flatten(outputs)[0]):
            # views of an input are kept, and parameters, which FSDP may have freed by then
            if (
                type(output) is Tensor
                and storage_of(output) not in of_inputs
                and not isinstance(output._base, Parameter)
            ):
                self.scope.know(output, partial(call.reader, index), output.storage_offset())
                call.strides[index] = output.stride()

    def _input(self, value: Any) -> Any:
        packed = self.scope.packed(value)
        return packed.detach().requires_grad_(value.requires_grad) if isinstance(packed, Tensor) else packed


class _Output(NamedTuple):
    """An output of a call."""

    call: "_Call"
    number: int

    def read(self) -> Tensor:
        """The output, made again."""
        return self.call.output(self.number)


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

    def reader(self, index: int) -> _Output:
        """One more that will ask for an output."""
        self.num_readers += 1
        return _Output(self, index)

    def output(self, index: int) -> Tensor:
        """An output, made again if nothing else has asked before."""
        if not self._outputs:
            args = tree_map(_input_again, self.args, is_leaf=lambda value: isinstance(value, Saved))
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
    return unpacked(value).requires_grad_(value.requires_grad) if isinstance(value, Saved) else value
