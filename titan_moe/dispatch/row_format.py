"""How rows are sent: as they are, or as the fp8 codes to which the experts round them anyway.

S rows · D width · W elements of a packed row, in the dtype of compute

A packed row has half the bytes of bf16, and one scale or one a block (kernels/experts/fp8/packed.py). Experts whose
kernels are in fp8 round what they receive to the same numbers again, so results and gradients of rows have the same
bits either way, and there is no setting for it. Rows are packed in dispatch, and gradients of results in the backward
of combine; sums are sent as they are (arXiv:2412.19437, section 3.3.3). The experts that get their rows themselves
(symm_mem_mlp.py) read packed rows.

Physics: packing and unpacking are passes of 3·S·D bytes at memory's rate, a tenth of what the links take for the half
that is not sent.
"""

from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from titan_moe.kernels.experts.fp8.packed import BLOCK, CODES, WHOLE_ROW
from titan_moe.kernels.experts.fp8.packed import packed_width as packed_bytes
from titan_moe.kernels.experts.fp8.rows import dequantize_rows, quantize_rows, quantize_rows_reference, unpack_rows


class _RowFormat(NamedTuple):
    pack: Callable[[Tensor], Tensor]
    """[S, D] -> packed rows."""
    unpack: Callable[[Tensor, torch.dtype, Tensor | None], Tensor]
    """Packed rows, dtype, number of rows on the device or None for all -> [S, D]."""
    columns: int
    """Those of a scale."""

    @staticmethod
    def of(columns: int) -> "_RowFormat":
        return _RowFormat(partial(quantize_rows, columns=columns), partial(unpack_rows, columns=columns), columns)

    @staticmethod
    def reference(columns: int) -> "_RowFormat":
        return _RowFormat(
            partial(quantize_rows_reference, columns=columns),
            lambda packed, dtype, _: dequantize_rows(packed, columns).to(dtype),
            columns,
        )


PLAIN, FP8, FP8_REFERENCE = "plain", "fp8", "fp8_reference"
BLOCKWISE, BLOCKWISE_REFERENCE = "fp8_blockwise", "fp8_blockwise_reference"
_FORMATS = {
    FP8: _RowFormat.of(WHOLE_ROW),
    FP8_REFERENCE: _RowFormat.reference(WHOLE_ROW),
    BLOCKWISE: _RowFormat.of(BLOCK),
    BLOCKWISE_REFERENCE: _RowFormat.reference(BLOCK),
}
"""By the name that operations take; references are plain PyTorch, for any device."""


def packed_width(width: int, dtype: torch.dtype, row_format: str) -> int:
    """The elements of a row as it is sent (W)."""
    return width if row_format == PLAIN else packed_bytes(width, _FORMATS[row_format].columns) // dtype.itemsize


def pack(x_SD: Tensor, row_format: str) -> Tensor:
    """Rows as they are sent, in their dtype: [S, D] -> [S, W]."""
    return x_SD if row_format == PLAIN else _FORMATS[row_format].pack(x_SD.contiguous()).view(x_SD.dtype)


def unpack(x_SW: Tensor, row_format: str, count: Tensor | None = None) -> Tensor:
    """The inverse: [S, W] -> [S, D]. `count`, one int32 on the device, is the number of rows if it is less than S; rows
    past it are not written."""
    return x_SW if row_format == PLAIN else _FORMATS[row_format].unpack(x_SW.view(CODES), x_SW.dtype, count)
