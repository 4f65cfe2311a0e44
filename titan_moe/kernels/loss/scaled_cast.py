"""Multiply a tensor by a scalar on the device and cast it, without an fp32 temporary.

Physics: memory-bound, reads and writes every element once. In plain PyTorch the fp32 product is a tensor too:
for the weight gradient of an output head a gigabyte, at the moment when memory peaks.
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
    """Compute x · factor in fp32 and round once to `dtype`. x is contiguous, of any shape; factor is a scalar."""
    out = torch.empty_like(x, dtype=dtype)
    if x.numel():
        _scaled_cast_kernel[(triton.cdiv(x.numel(), BLOCK),)](x, factor, out, x.numel(), BLOCK=BLOCK, num_warps=8)
    return out
