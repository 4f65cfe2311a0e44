"""Modules whose buffers keep their precision when the module is converted, as by `.bfloat16()`."""

from collections.abc import Callable
from typing import Self

import torch
from torch import Tensor, nn


class WideBuffers(nn.Module):
    """Convert or move parameters and buffers, but the buffers named in `wide_buffers` to no dtype narrower than fp32.

    They are sums of many small terms, which stop growing in bf16, and factors outside of fp16's range. All buffers have
    their start values once they leave the meta device, where `to_empty` gives memory that is not written.
    """

    wide_buffers: tuple[str, ...] = ()

    def reset_buffers(self) -> None:
        """Fill the buffers with their start values."""
        raise NotImplementedError

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        was_on_meta = any(buffer.is_meta for buffer in self.buffers(recurse=False))
        before = {name: self.get_buffer(name) for name in self.wide_buffers}
        super()._apply(fn, recurse)
        for name, buffer in before.items():
            converted = self.get_buffer(name)
            if converted.dtype.itemsize < torch.float32.itemsize:
                setattr(self, name, buffer.to(converted.device))
        if was_on_meta and not any(buffer.is_meta for buffer in self.buffers(recurse=False)):
            self.reset_buffers()  # a state dict does not fill those that are not persistent
        return self
