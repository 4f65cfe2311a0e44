"""Gather rows, multiply by gate and up, apply SwiGLU and the score: the way into the experts, in one kernel.

S rows · R expert slots, sorted by expert · e local experts · D width of a row · F hidden width

Physics: 4·R·D·F FLOPs, bound by the matrix units from about 200 slots an expert on. The rows are gathered while the
GEMM loads its tiles, so no permuted copy of them exists; gate and up of the same columns are accumulated side by side,
so that the epilogue has both and writes the pre-activation (for backward) and the weighted activation, each once.
"""

from typing import NamedTuple

import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from titan_moe.kernels.tiles import Tiles

TILE_ROWS = 128


class UpTiles(NamedTuple):
    """How the kernel cuts its work; `tools/sweep_expert_gemms.py` times others."""

    features: int = 128
    """Columns of gate and of up that a program computes."""
    inner: int = 64
    is_one_product: bool = False
    """Whether gate and up are one product of twice the columns, split afterwards: fewer reads of the rows."""
    num_warps: int = 8
    num_stages: int = 3


MEASURED = UpTiles()
"""569 TFLOP/s on an H200; 541 with 4 stages."""


@triton.jit
def _expert_up_kernel(
    x_ptr, rows_ptr, scores_ptr, weight_desc, hidden_ptr, active_ptr, experts_ptr, begins_ptr, ends_ptr,
    F: tl.constexpr, D: tl.constexpr, ONE_PRODUCT: tl.constexpr,
    BLOCK_R: tl.constexpr, BLOCK_F: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    num_columns: tl.constexpr = (F + BLOCK_F - 1) // BLOCK_F
    tile, column = tl.program_id(0) // num_columns, tl.program_id(0) % num_columns
    expert = tl.load(experts_ptr + tile)
    if expert < 0:
        return
    begin, end = tl.load(begins_ptr + tile), tl.load(ends_ptr + tile)
    slots = begin + tl.arange(0, BLOCK_R)
    is_slot = slots < end
    rows = tl.load(rows_ptr + slots, mask=is_slot, other=0).to(tl.int64)
    features = column * BLOCK_F + tl.arange(0, BLOCK_F)
    is_feature = features < F
    inner = tl.arange(0, BLOCK_D)
    x_ptrs = x_ptr + rows[:, None] * D + inner[None, :]
    if ONE_PRODUCT:
        both = tl.zeros((BLOCK_R, 2 * BLOCK_F), dtype=tl.float32)
        for k in range(0, D, BLOCK_D):
            x = tl.load(x_ptrs + k, mask=is_slot[:, None] & (inner < D - k)[None, :], other=0.0)
            weight = weight_desc.load([expert * 2, column * BLOCK_F, k]).reshape(2 * BLOCK_F, BLOCK_D)
            both = tl.dot(x, weight.T, both, input_precision="ieee")
        gate, up = tl.split(both.reshape(BLOCK_R, 2, BLOCK_F).permute(0, 2, 1))
    else:
        first_gate = expert * 2 * F + column * BLOCK_F
        gate = tl.zeros((BLOCK_R, BLOCK_F), dtype=tl.float32)
        up = tl.zeros((BLOCK_R, BLOCK_F), dtype=tl.float32)
        for k in range(0, D, BLOCK_D):
            x = tl.load(x_ptrs + k, mask=is_slot[:, None] & (inner < D - k)[None, :], other=0.0)
            gate = tl.dot(x, weight_desc.load([first_gate, k]).T, gate, input_precision="ieee")
            up = tl.dot(x, weight_desc.load([first_gate + F, k]).T, up, input_precision="ieee")
    # the activation is made of the rounded pre-activation, as backward will see it
    gate = gate.to(hidden_ptr.dtype.element_ty)
    up = up.to(hidden_ptr.dtype.element_ty)
    keep = is_slot[:, None] & is_feature[None, :]
    hidden_ptrs = hidden_ptr + slots.to(tl.int64)[:, None] * (2 * F) + features[None, :]
    tl.store(hidden_ptrs, gate, mask=keep)
    tl.store(hidden_ptrs + F, up, mask=keep)
    score = tl.load(scores_ptr + slots, mask=is_slot, other=0.0)
    gate, up = gate.to(tl.float32), up.to(tl.float32)
    active = gate * tl.sigmoid(gate) * up * score[:, None]
    active_ptrs = active_ptr + slots.to(tl.int64)[:, None] * F + features[None, :]
    tl.store(active_ptrs, active.to(active_ptr.dtype.element_ty), mask=keep)


def expert_up(
    x_SD: Tensor, rows_R: Tensor, scores_R: Tensor, weight_e2FD: Tensor, tiles: Tiles, cut: UpTiles = MEASURED
) -> tuple[Tensor, Tensor]:
    """Pre-activation [R, 2F] and weighted activation [R, F] of every slot; past the last expert nothing is written."""
    _, _, num_features, width = weight_e2FD.shape
    hidden_R2F = x_SD.new_empty(rows_R.numel(), 2 * num_features)
    active_RF = x_SD.new_empty(rows_R.numel(), num_features)
    # a block may run over the end of its expert's gate or up half: those columns are computed and not stored
    if cut.is_one_product:
        weights = TensorDescriptor.from_tensor(weight_e2FD.flatten(0, 1), [2, cut.features, cut.inner])
    else:
        weights = TensorDescriptor.from_tensor(weight_e2FD.view(-1, width), [cut.features, cut.inner])
    grid = (tiles.experts_M.numel() * triton.cdiv(num_features, cut.features),)
    _expert_up_kernel[grid](
        x_SD, rows_R, scores_R, weights, hidden_R2F, active_RF, tiles.experts_M, tiles.begins_M, tiles.ends_M,
        F=num_features, D=width, ONE_PRODUCT=cut.is_one_product,
        BLOCK_R=tiles.rows, BLOCK_F=cut.features, BLOCK_D=cut.inner, num_warps=cut.num_warps, num_stages=cut.num_stages,
    )  # fmt: skip
    return hidden_R2F, active_RF
