"""Gather rows, multiply by gate and up, apply SwiGLU and the score: the way into the experts, in one kernel.

S rows · R expert slots, sorted by expert · e local experts · D width of a row · F hidden width

Physics: 4·R·D·F FLOPs, bound by the matrix units from about 200 slots an expert on. The rows are gathered while the
GEMM loads its tiles, so no permuted copy of them exists; gate and up of the same columns are accumulated side by side,
so that the epilogue has both and writes the pre-activation (for backward) and the weighted activation, each once.
"""

import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from titan_moe.kernels.tiles import Tiles

TILE_ROWS = 128


@triton.jit
def _expert_up_kernel(
    x_ptr, rows_ptr, scores_ptr, weight_desc, hidden_ptr, active_ptr, experts_ptr, begins_ptr, ends_ptr,
    F: tl.constexpr, D: tl.constexpr,
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
    first_gate = expert * 2 * F + column * BLOCK_F
    gate = tl.zeros((BLOCK_R, BLOCK_F), dtype=tl.float32)
    up = tl.zeros((BLOCK_R, BLOCK_F), dtype=tl.float32)
    for k in range(0, D, BLOCK_D):
        is_inner = inner < D - k
        x = tl.load(x_ptrs + k, mask=is_slot[:, None] & is_inner[None, :], other=0.0)
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
    x_SD: Tensor, rows_R: Tensor, scores_R: Tensor, weight_e2FD: Tensor, tiles: Tiles
) -> tuple[Tensor, Tensor]:
    """Pre-activation [R, 2F] and weighted activation [R, F] of every slot; past the last expert nothing is written."""
    _, _, num_features, width = weight_e2FD.shape
    hidden_R2F = x_SD.new_empty(rows_R.numel(), 2 * num_features)
    active_RF = x_SD.new_empty(rows_R.numel(), num_features)
    block_f, block_d = 128, 64  # measured on H200: 569 TFLOP/s with 3 stages, 541 with 4
    # a block may run over the end of its expert's gate or up half: those columns are computed and not stored
    weights = TensorDescriptor.from_tensor(weight_e2FD.view(-1, width), [block_f, block_d])
    grid = (tiles.experts_M.numel() * triton.cdiv(num_features, block_f),)
    _expert_up_kernel[grid](
        x_SD, rows_R, scores_R, weights, hidden_R2F, active_RF, tiles.experts_M, tiles.begins_M, tiles.ends_M,
        F=num_features, D=width, BLOCK_R=tiles.rows, BLOCK_F=block_f, BLOCK_D=block_d, num_warps=8, num_stages=3,
    )  # fmt: skip
    return hidden_R2F, active_RF
