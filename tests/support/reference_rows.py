"""Rows in fp8 by their references, in plain PyTorch, for any device: formats of tests alone."""

from dataclasses import dataclass

from torch import Tensor

from titan_moe.kernels.experts.formats import FORMATS
from titan_moe.kernels.experts.fp8.format import BLOCKWISE, ROWWISE, Fp8Format
from titan_moe.kernels.experts.fp8.packed import BLOCK, CODES, WHOLE_ROW
from titan_moe.kernels.experts.fp8.rows import dequantize_rows, quantize_rows_reference


@dataclass(frozen=True)
class ReferenceRows(Fp8Format):
    @property
    def name(self) -> str:
        return f"{super().name} by its reference"

    def pack(self, x_TD: Tensor) -> Tensor:
        return quantize_rows_reference(x_TD.contiguous(), self.columns).view(x_TD.dtype)

    def unpack(self, x_SW: Tensor, count: Tensor | None = None) -> Tensor:
        return dequantize_rows(x_SW.view(CODES), self.columns).to(x_SW.dtype)


ROWWISE_ROWS, BLOCKWISE_ROWS = ReferenceRows(ROWWISE, WHOLE_ROW), ReferenceRows(BLOCKWISE, BLOCK)
FORMATS.update({rows.name: rows for rows in (ROWWISE_ROWS, BLOCKWISE_ROWS)})
