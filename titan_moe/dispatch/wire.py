"""How rows travel: as they are, or as the fp8 codes to which the experts round them anyway.

S rows · D width · W elements of a packed row, in the dtype of compute

A packed row has half the bytes of bf16 (kernels/experts/fp8/rows.py). Experts whose kernels are in fp8 round what
arrives to the same numbers again, so results and gradients of rows have the same bits either way: packing is no option.
Rows travel packed in dispatch, and gradients of results in the backward of combine; sums travel as they are
(arXiv:2412.19437, section 3.3.3). The experts that get their rows themselves (symm_mem_mlp.py) read packed rows as they
arrive.

Physics: packing and unpacking are passes of 3·S·D bytes at memory's rate, a tenth of what the links take for the half
that is not sent.
"""

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from titan_moe.kernels.experts.fp8.rows import (
    CODES,
    TAIL_BYTES,
    dequantize_rows,
    quantize_rows,
    quantize_rows_reference,
    unpack_rows,
)


class _Wire(NamedTuple):
    pack: Callable[[Tensor], Tensor]
    """[S, D] -> packed rows."""
    unpack: Callable[[Tensor, torch.dtype, Tensor | None], Tensor]
    """Packed rows, dtype, number of rows on the device or None for all -> [S, D]."""


PLAIN, FP8, FP8_REFERENCE = "plain", "fp8", "fp8_reference"
_WIRES = {
    FP8: _Wire(quantize_rows, unpack_rows),
    FP8_REFERENCE: _Wire(quantize_rows_reference, lambda packed, dtype, _: dequantize_rows(packed).to(dtype)),
}
"""By the name that operations take; the reference is plain PyTorch, for any device."""


def packed_width(width: int, dtype: torch.dtype, wire: str) -> int:
    """The elements of a row as it travels (W)."""
    return width if wire == PLAIN else (width + TAIL_BYTES) // dtype.itemsize


def pack(x_SD: Tensor, wire: str) -> Tensor:
    """Rows as they travel, in their dtype: [S, D] -> [S, W]."""
    return x_SD if wire == PLAIN else _WIRES[wire].pack(x_SD.contiguous()).view(x_SD.dtype)


def unpack(x_SW: Tensor, wire: str, count: Tensor | None = None) -> Tensor:
    """The inverse: [S, W] -> [S, D]. `count`, one int32 on the device, is the number of rows if it is less than S; rows
    past it are not written."""
    return x_SW if wire == PLAIN else _WIRES[wire].unpack(x_SW.view(CODES), x_SW.dtype, count)
