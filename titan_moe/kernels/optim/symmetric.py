"""The symmetric product of Newton-Schulz: half of its tiles are computed, and each is written twice.

n matrices · R rows · K columns, R <= K

Physics: bound by products. PyTorch's batched product of X and X^T computes both halves; in a step of Newton-Schulz two
of three products are symmetric. The polynomial of the second one is formed where its tile is written, so no addend is
copied. Aim: half the time of the whole product.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

BLOCK_R = 128
BLOCK_K = 64


def symmetric_product_reference(
    x_nRK: Tensor, scale_n: Tensor, addend_nRR: Tensor | None = None, factors: tuple[float, float, float] = (1, 0, 0)
) -> Tensor:
    """scale (a X X^T + b Y + c I) for the factors a, b and c, and a symmetric addend Y: [n, R, R], in X's dtype."""
    of_product, of_addend, of_identity = factors
    out = of_product * (x_nRK @ x_nRK.mT)
    if addend_nRR is not None:
        out = out + of_addend * addend_nRR
    if of_identity:
        out = out + of_identity * torch.eye(out.shape[-1], dtype=out.dtype, device=out.device)
    return (scale_n[:, None, None] * out).to(x_nRK.dtype)


@triton.jit
def _symmetric_product_kernel(
    x_ptr, addend_ptr, scale_ptr, out_ptr, R, K, stride_n, stride_r, stride_k, of_product, of_addend, of_identity,
    HAS_ADDEND: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    tile, matrix = tl.program_id(0), tl.program_id(1).to(tl.int64)
    # tiles on and below the diagonal, row by row
    i = ((tl.sqrt(8.0 * tile + 1.0) - 1.0) * 0.5).to(tl.int32)
    i = tl.where((i + 1) * (i + 2) // 2 <= tile, i + 1, i)
    i = tl.where(i * (i + 1) // 2 > tile, i - 1, i)
    j = tile - i * (i + 1) // 2
    rows, columns, k = i * BLOCK_R + tl.arange(0, BLOCK_R), j * BLOCK_R + tl.arange(0, BLOCK_R), tl.arange(0, BLOCK_K)
    x_ptr += matrix * stride_n
    rows_ptr = x_ptr + rows[:, None] * stride_r + k[None, :] * stride_k
    columns_ptr = x_ptr + columns[:, None] * stride_r + k[None, :] * stride_k
    sums = tl.zeros((BLOCK_R, BLOCK_R), tl.float32)
    for start in range(0, K, BLOCK_K):
        is_k = start + k[None, :] < K
        a = tl.load(rows_ptr + start * stride_k, mask=(rows[:, None] < R) & is_k, other=0.0)
        b = tl.load(columns_ptr + start * stride_k, mask=(columns[:, None] < R) & is_k, other=0.0)
        sums = tl.dot(a, tl.trans(b), sums)
    out = of_product * sums
    keep, place = (rows[:, None] < R) & (columns[None, :] < R), matrix * R * R
    here = place + rows[:, None] * R + columns[None, :]
    if HAS_ADDEND:
        out += of_addend * tl.load(addend_ptr + here, mask=keep, other=0.0).to(tl.float32)
    out += tl.where(rows[:, None] == columns[None, :], of_identity, 0.0)
    out = (out * tl.load(scale_ptr + matrix)).to(out_ptr.dtype.element_ty)
    tl.store(out_ptr + here, out, mask=keep)
    if i != j:
        there = place + columns[:, None] * R + rows[None, :]
        tl.store(out_ptr + there, tl.trans(out), mask=(columns[:, None] < R) & (rows[None, :] < R))


def launch_symmetric_product(
    x_nRK: Tensor, scale_n: Tensor, addend_nRR: Tensor | None = None, factors: tuple[float, float, float] = (1, 0, 0)
) -> Tensor:
    """The same in Triton, with sums in fp32. X may have any strides; the addend is contiguous, scales are fp32."""
    number, num_rows, num_columns = x_nRK.shape
    out = x_nRK.new_empty(number, num_rows, num_rows)
    blocks = triton.cdiv(num_rows, BLOCK_R)
    if number:
        _symmetric_product_kernel[(blocks * (blocks + 1) // 2, number)](
            x_nRK, out if addend_nRR is None else addend_nRR, scale_n, out, num_rows, num_columns, *x_nRK.stride(),
            *map(float, factors), HAS_ADDEND=addend_nRR is not None, BLOCK_R=BLOCK_R, BLOCK_K=BLOCK_K, num_warps=4,
            num_stages=3,
        )  # fmt: skip
    return out
