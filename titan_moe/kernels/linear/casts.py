"""Matrices in e4m3 for the GEMMs of a linear layer: by columns, and transposed. By rows is `quantize_apart` of experts.

M rows · N columns

Scales are powers of two, as those of rows (kernels/experts/fp8/rows.py). The matrix units read fp8 along the summed
dimension alone, so an operand of two GEMMs exists as stored and transposed.

Physics: memory-bound. Codes transposed, reads and writes M·N bytes; by columns, reads 4·M·N and writes M·N, of weights
only, which are smaller than activations.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from titan_moe.kernels.experts.fp8.packed import CODES
from titan_moe.kernels.experts.fp8.rows import SMALLEST, power_of_two, quantize_rows_reference, unpack


def quantize_columns_reference(x_MN: Tensor) -> tuple[Tensor, Tensor]:
    """The definition: codes [N, M] of the transposed matrix, and scales [N]."""
    return unpack(quantize_rows_reference(x_MN.T.contiguous()))


def transpose_reference(codes_MN: Tensor, factors_M: Tensor | None = None) -> Tensor:
    """The definition: codes [N, M], each times its row's factor, a power of two of at most 1."""
    if factors_M is None:
        return codes_MN.T.contiguous()
    return (codes_MN.float() * factors_M[:, None]).to(codes_MN.dtype).T.contiguous()


@triton.jit
def _column_amax_kernel(x_ptr, amax_ptr, M, N: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr):
    rows = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    columns = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    keep = (rows < M)[:, None] & (columns < N)[None, :]
    x = tl.load(x_ptr + rows.to(tl.int64)[:, None] * N + columns[None, :], mask=keep, other=0.0).to(tl.float32)
    # sizes are positive, and sort as their bits do
    most = tl.max(tl.abs(x), axis=0).to(tl.int32, bitcast=True)
    tl.atomic_max(amax_ptr + columns, most, mask=columns < N, sem="relaxed")


@triton.jit
def _column_codes_kernel(
    x_ptr, amax_ptr, codes_ptr, scales_ptr, M, N: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr
):
    rows = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    columns = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    keep = (rows < M)[:, None] & (columns < N)[None, :]
    x = tl.load(x_ptr + rows.to(tl.int64)[:, None] * N + columns[None, :], mask=keep, other=0.0).to(tl.float32)
    amax = tl.load(amax_ptr + columns, mask=columns < N, other=0).to(tl.float32, bitcast=True)
    scale = tl.where(amax == 0, SMALLEST, power_of_two(amax))
    codes = tl.trans((x * (1 / scale)[None, :]).to(codes_ptr.dtype.element_ty))
    keep_out = (columns < N)[:, None] & (rows < M)[None, :]
    tl.store(codes_ptr + columns.to(tl.int64)[:, None] * M + rows[None, :], codes, mask=keep_out)
    tl.store(scales_ptr + columns, scale, mask=(columns < N) & (tl.program_id(0) == 0))


def quantize_columns(x_MN: Tensor) -> tuple[Tensor, Tensor]:
    """Codes [N, M] of the transposed matrix and scales [N], fp32."""
    num_rows, width = x_MN.shape
    codes_NM, scales_N = x_MN.new_empty(width, num_rows, dtype=CODES), x_MN.new_empty(width, dtype=torch.float32)
    amax_N, block = x_MN.new_zeros(width, dtype=torch.int32), 64
    grid = (triton.cdiv(num_rows, block), triton.cdiv(width, block))
    _column_amax_kernel[grid](x_MN, amax_N, num_rows, N=width, BLOCK_M=block, BLOCK_N=block, num_warps=4)
    _column_codes_kernel[grid](
        x_MN, amax_N, codes_NM, scales_N, num_rows, N=width, BLOCK_M=block, BLOCK_N=block, num_warps=4
    )
    return codes_NM, scales_N


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
