"""Multiply by a number that lives on the device, and round once, with nothing wide in between.

Physics: memory-bound, reads and writes every element once. In plain PyTorch the product in fp32 would be a tensor too:
for the weight gradient of an output head that is a gigabyte, at the moment when memory peaks.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

BLOCK = 4096


@triton.jit
def _scaled_cast_kernel(x_ptr, factor_ptr, out_ptr, num_elements, BLOCK: tl.constexpr):
    element = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    keep = element < num_elements
    scaled = tl.load(x_ptr + element, mask=keep, other=0.0).to(tl.float32) * tl.load(factor_ptr).to(tl.float32)
    tl.store(out_ptr + element, scaled.to(out_ptr.dtype.element_ty), mask=keep)


def scaled_cast(x: Tensor, factor: Tensor, dtype: torch.dtype) -> Tensor:
    """x · factor in `dtype`, multiplied in fp32; x contiguous, of any shape, factor a scalar."""
    out = torch.empty_like(x, dtype=dtype)
    if x.numel():
        _scaled_cast_kernel[(triton.cdiv(x.numel(), BLOCK),)](x, factor, out, x.numel(), BLOCK=BLOCK, num_warps=8)
    return out
