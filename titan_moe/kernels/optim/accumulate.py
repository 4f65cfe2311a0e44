"""Accumulate a gradient into a total of another dtype, in the total's dtype, in one pass over memory.

Physics: memory-bound. A bf16 gradient and an fp32 total move 2 + 4 + 4 = 10 bytes an element. The first gradient of a
step overwrites the total, which is neither zeroed nor read: 2 + 4 = 6 bytes. PyTorch's `add_` makes no wide accesses
where dtypes differ. Here a warp accesses whole cache lines, a thread has 48 bytes in flight, and the weights of a layer
fill tens of thousands of programs. Aim: faster than PyTorch's `add_`.

bf16 converts to fp32 exactly and the sum is rounded once, so the result has the bits of PyTorch's.
"""

from collections.abc import Callable

import torch
import triton
import triton.language as tl
from torch import Tensor

from titan_moe.kernels.registry import Kernel, register

BLOCK = 2048
Accumulate = Callable[[Tensor, Tensor, bool], Tensor]
"""total, addend, is_first -> total, changed in place."""


def accumulate_reference(total: Tensor, addend: Tensor, is_first: bool = False) -> Tensor:
    """Add in place, or overwrite with `is_first`; return the total."""
    return total.copy_(addend) if is_first else total.add_(addend)


@triton.jit
def _accumulate_kernel(total_ptr, addend_ptr, num_elements, IS_FIRST: tl.constexpr, BLOCK: tl.constexpr):
    element = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    keep = element < num_elements
    # a thread loads four consecutive elements of each tensor, 16 and 8 bytes; eight would need a shuffle to store
    value = tl.load(addend_ptr + tl.max_contiguous(element, 4), mask=keep, other=0.0).to(tl.float32)
    if not IS_FIRST:
        value += tl.load(total_ptr + element, mask=keep, other=0.0)
    tl.store(total_ptr + element, value, mask=keep)


def launch_accumulate(total: Tensor, addend: Tensor, is_first: bool = False) -> None:
    """The reference in Triton: an fp32 total and an fp32 or bf16 addend of the same shape, both contiguous."""
    num_elements = total.numel()
    if num_elements:
        _accumulate_kernel[(triton.cdiv(num_elements, BLOCK),)](
            total, addend, num_elements, IS_FIRST=is_first, BLOCK=BLOCK, num_warps=8
        )


@torch.library.custom_op("titan_moe::accumulate", mutates_args=("total",))
def _accumulate(total: Tensor, addend: Tensor, is_first: bool) -> None:
    if total.shape != addend.shape:
        raise ValueError(
            f"accumulate needs equal shapes: the total has {list(total.shape)}, the addend {list(addend.shape)}; "
            f"expand the addend first"
        )
    is_mixed = total.dtype == torch.float32 and addend.dtype == torch.bfloat16
    if total.is_cuda and is_mixed and total.is_contiguous() and addend.is_contiguous():
        launch_accumulate(total, addend, is_first)
    else:
        accumulate_reference(total, addend, is_first)


_accumulate.register_fake(lambda total, addend, is_first: None)


def accumulate(total: Tensor, addend: Tensor, is_first: bool = False) -> Tensor:
    """Add to a total of the same shape, in its dtype. With `is_first` the total is overwritten and never read.

    Triton adds bf16 to fp32 where both are contiguous on a GPU, PyTorch everything else, for example a transposed
    addend. Both give the same bits.

    Raises: ValueError for different shapes.
    """
    _accumulate(total, addend, is_first)
    return total


register(Kernel("accumulate", accumulate, accumulate_reference))
