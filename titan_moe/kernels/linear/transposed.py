"""Codes of a matrix, transposed.

M rows · N columns

The matrix units read fp8 along the summed dimension alone, so activations that two GEMMs of a linear layer read exist
as stored and transposed. Factors, like scales, are powers of two.

Physics: memory-bound, reads and writes M·N bytes.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from titan_moe.kernels.experts.fp8.packed import CODES


def transpose_reference(codes_MN: Tensor, factors_M: Tensor | None = None) -> Tensor:
    """The definition: codes [N, M], each times its row's factor, a power of two of at most 1."""
    if factors_M is None:
        return codes_MN.T.contiguous()
    return (codes_MN.float() * factors_M[:, None]).to(codes_MN.dtype).T.contiguous()


@triton.jit
def _transpose_codes_kernel(
    codes_ptr, factors_ptr, out_ptr, M, N: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr
):
    rows = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    columns = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    keep = (rows < M)[:, None] & (columns < N)[None, :]
    codes_ptrs = codes_ptr + rows.to(tl.int64)[:, None] * N + columns[None, :]
    if factors_ptr is None:
        codes = tl.load(codes_ptrs, mask=keep, other=0)
    else:
        factors = tl.load(factors_ptr + rows, mask=rows < M, other=0.0)
        codes = tl.load(codes_ptrs, mask=keep, other=0.0).to(tl.float32) * factors[:, None]
    keep_out = (columns < N)[:, None] & (rows < M)[None, :]
    out_ptrs = out_ptr + columns.to(tl.int64)[:, None] * M + rows[None, :]
    tl.store(out_ptrs, tl.trans(codes.to(out_ptr.dtype.element_ty)), mask=keep_out)


def transpose(codes_MN: Tensor, factors_M: Tensor | None = None) -> Tensor:
    """Codes [N, M], each times its row's factor, a power of two of at most 1."""
    codes = codes_MN.view(torch.uint8) if factors_M is None else codes_MN
    num_rows, width = codes.shape
    out, block = codes.new_empty(width, num_rows), 128
    _transpose_codes_kernel[triton.cdiv(num_rows, block), triton.cdiv(width, block)](
        codes, factors_M, out, num_rows, N=width, BLOCK_M=block, BLOCK_N=block, num_warps=4
    )
    return out.view(CODES)
