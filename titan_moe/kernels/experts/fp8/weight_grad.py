"""Gradients of weights from transposed factors in fp8.

M tiles of 128 slots · e experts · A, B widths of the two factors

Physics: 2·R·A·B FLOPs, bound by the matrix units; both factors lie along the summed slots and come by TMA. An expert's
last tile ends with zeros, so nothing is masked: at most 127 slots an expert more.

Factors with a scale for 128 slots of a column (requantized.py) leave the matrix units after each tile: products are
added in fp32, times both scales.
"""

from typing import NamedTuple

import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from titan_moe.kernels.experts.fp8.rows import RESULTS
from titan_moe.kernels.experts.tiles import place_in_groups


class WeightGradTiles(NamedTuple):
    """How the kernel cuts its work."""

    width_a: int = 256
    width_b: int = 128
    group: int = 8
    num_warps: int = 8
    num_stages: int = 4


MEASURED = WeightGradTiles()
BLOCK_CUT = WeightGradTiles(width_a=128)
"""With scales of blocks: both sums, in the matrix units and outside, need registers."""


@triton.jit
def _weight_grad_kernel(
    a_desc, b_desc, offsets_ptr, scales_ptr, b_scales_ptr, out_ptr, stride_scale,
    A: tl.constexpr, B: tl.constexpr, BLOCK_E: tl.constexpr,
    BLOCK_A: tl.constexpr, BLOCK_B: tl.constexpr, BLOCK_R: tl.constexpr, GROUP: tl.constexpr,
):  # fmt: skip
    tiles_a: tl.constexpr = (A + BLOCK_A - 1) // BLOCK_A
    tiles_b: tl.constexpr = (B + BLOCK_B - 1) // BLOCK_B
    expert, program = tl.program_id(0) // (tiles_a * tiles_b), tl.program_id(0) % (tiles_a * tiles_b)
    tile_a, tile_b = place_in_groups(program, tiles_a, tiles_b, GROUP)
    lane = tl.arange(0, BLOCK_E)
    ends = tl.load(offsets_ptr + lane, mask=lane <= expert, other=0)
    begins = tl.load(offsets_ptr + lane - 1, mask=(lane <= expert) & (lane > 0), other=0)
    num_tiles = (ends - begins + BLOCK_R - 1) // BLOCK_R
    last = tl.sum(num_tiles, axis=0)
    begin = last - tl.sum(tl.where(lane == expert, num_tiles, 0), axis=0)
    columns_a = tile_a * BLOCK_A + tl.arange(0, BLOCK_A)
    columns_b = tile_b * BLOCK_B + tl.arange(0, BLOCK_B)
    total = tl.zeros((BLOCK_A, BLOCK_B), dtype=tl.float32)
    for tile in range(begin, last):
        a = a_desc.load([tile_a * BLOCK_A, tile * BLOCK_R])
        b = b_desc.load([tile_b * BLOCK_B, tile * BLOCK_R])
        if b_scales_ptr is None:
            total = tl.dot(a, b.T, total)
        else:
            row = tl.cast(tile, tl.int64)
            scale_a = tl.load(scales_ptr + row * A + columns_a, mask=columns_a < A, other=0.0)
            scale_b = tl.load(b_scales_ptr + row * B + columns_b, mask=columns_b < B, other=0.0)
            total += tl.dot(a, b.T) * scale_a[:, None] * scale_b[None, :]
    if b_scales_ptr is None:
        total *= tl.load(scales_ptr + expert * stride_scale)
    out_ptrs = out_ptr + expert.to(tl.int64) * A * B + columns_a[:, None] * B + columns_b[None, :]
    keep = (columns_a < A)[:, None] & (columns_b < B)[None, :]
    tl.store(out_ptrs, total.to(out_ptr.dtype.element_ty), mask=keep)


def weight_grad(
    a: Tensor,
    b: Tensor,
    offsets_e: Tensor,
    scales: Tensor,
    rows: int,
    *,
    b_scales: Tensor | None = None,
    cut: WeightGradTiles | None = None,
) -> Tensor:
    """Sum a's times b's over each expert's slots, times their scales: [A, 128·M], [B, 128·M] -> [e, A, B].

    Factors are those of transposed.py, with one scale an expert [e], or of requantized.py, with their scales [M, A] and
    `b_scales` [M, B]. Tiles have `rows` slots.
    """
    cut = cut or (MEASURED if b_scales is None else BLOCK_CUT)
    num_experts, width_a, width_b = offsets_e.numel(), len(a), len(b)
    out = a.new_empty(num_experts, width_a, width_b, dtype=RESULTS)
    descriptors = (
        TensorDescriptor.from_tensor(factor, [width, rows]) for factor, width in ((a, cut.width_a), (b, cut.width_b))
    )
    grid = (num_experts * triton.cdiv(width_a, cut.width_a) * triton.cdiv(width_b, cut.width_b),)
    _weight_grad_kernel[grid](
        *descriptors, offsets_e, scales, b_scales, out, scales.stride(0),
        A=width_a, B=width_b, BLOCK_E=triton.next_power_of_2(num_experts),
        BLOCK_A=cut.width_a, BLOCK_B=cut.width_b, BLOCK_R=rows, GROUP=cut.group,
        num_warps=cut.num_warps, num_stages=cut.num_stages,
    )  # fmt: skip
    return out
