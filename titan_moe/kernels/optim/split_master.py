"""fp32 masters in two parts: a bf16 weight, which GEMMs read, and a remainder of 16 bits, which the optimizer adds.

The bits of a master are those of its weight, shifted up by 16, plus the remainder, a signed number. So the weight is
the bf16 number nearest to the master; of two that are equally near, it is the one farther from zero (a cast takes the
even one). A master that is not a number stays one, without the bits that tell which.

Physics: 4 bytes an element as for an fp32 master, but no bf16 copy beside it, and nothing to cast before a GEMM.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor


def merge_reference(weight: Tensor, remainder: Tensor) -> Tensor:
    """bf16 weights and int16 remainders -> fp32 masters."""
    return ((weight.view(torch.int16).int() << 16) + remainder.int()).view(torch.float32)


def split_reference(master: Tensor) -> tuple[Tensor, Tensor]:
    """fp32 masters -> bf16 weights and int16 remainders."""
    bits = master.view(torch.int32)
    high = torch.where(master.isnan(), 0x7FC0, (bits + 0x8000) >> 16)
    low = torch.where(master.isnan(), 0, bits - (high << 16))
    return high.to(torch.int16).view(torch.bfloat16), low.to(torch.int16)


def store_split(weight: Tensor, remainder: Tensor | None, values: Tensor) -> None:
    """Copy values into a weight, and what it drops into its remainder, if it has one."""
    if remainder is None:
        weight.copy_(values)
        return
    parts = split_reference(values.to(weight.device, torch.float32))
    for part, new in zip((weight, remainder), parts, strict=True):
        part.copy_(new)


@triton.jit
def load_master(weight_ptr, remainder_ptr, index, keep, IS_SPLIT: tl.constexpr):
    """`merge_reference`; without `IS_SPLIT` the weight in fp32."""
    weight = tl.load(weight_ptr + index, mask=keep, other=0.0)
    if IS_SPLIT:
        high = weight.to(tl.int16, bitcast=True).to(tl.int32)
        low = tl.load(remainder_ptr + index, mask=keep, other=0).to(tl.int32)
        return ((high << 16) + low).to(tl.float32, bitcast=True)
    else:
        return weight.to(tl.float32)


@triton.jit
def store_master(weight_ptr, remainder_ptr, master, index, keep):
    """`split_reference`."""
    bits = master.to(tl.int32, bitcast=True)
    high = tl.where(master == master, (bits + 0x8000) >> 16, 0x7FC0)
    low = tl.where(master == master, bits - (high << 16), 0)
    tl.store(weight_ptr + index, high.to(tl.int16).to(tl.bfloat16, bitcast=True), mask=keep)
    tl.store(remainder_ptr + index, low.to(tl.int16), mask=keep)
