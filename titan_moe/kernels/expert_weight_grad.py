"""Weight gradients of the experts, with one of the factors gathered by row.

S rows · R expert slots, sorted by expert · e local experts · A, B widths of the two factors

Physics: 2·R·A·B FLOPs, bound by the matrix units; the sum runs over an expert's slots, in order, so the result is
deterministic. One factor lies slot by slot, the other is gathered from rows while its tiles are loaded, so no permuted
copy of it exists.
"""

from typing import NamedTuple

import triton
import triton.language as tl
from torch import Tensor


class WeightGradTiles(NamedTuple):
    """How the kernel cuts its work; `tools/sweep_expert_gemms.py` times others."""

    width_a: int = 128
    width_b: int = 256
    slots: int = 32
    """Slots of an iteration."""
    carries_rows: bool = False
    """Whether rows are looked up an iteration ahead, in a register: stages of the pipeline then hold data alone."""
    num_warps: int = 8
    num_stages: int = 5


MEASURED = WeightGradTiles()
"""545 TFLOP/s on an H200; 450 with 64 slots and 3 stages."""


@triton.jit
def _expert_weight_grad_kernel(
    a_ptr, b_ptr, rows_ptr, offsets_ptr, out_ptr,
    A: tl.constexpr, B: tl.constexpr, GATHERS_A: tl.constexpr, CARRIES: tl.constexpr,
    BLOCK_A: tl.constexpr, BLOCK_B: tl.constexpr, BLOCK_R: tl.constexpr,
):  # fmt: skip
    tiles_b: tl.constexpr = (B + BLOCK_B - 1) // BLOCK_B
    tiles_ab: tl.constexpr = (A + BLOCK_A - 1) // BLOCK_A * tiles_b
    expert, tile = tl.program_id(0) // tiles_ab, tl.program_id(0) % tiles_ab
    begin = tl.load(offsets_ptr + expert - 1, mask=expert > 0, other=0)
    end = tl.load(offsets_ptr + expert)
    columns_a = tile // tiles_b * BLOCK_A + tl.arange(0, BLOCK_A)
    columns_b = tile % tiles_b * BLOCK_B + tl.arange(0, BLOCK_B)
    total = tl.zeros((BLOCK_A, BLOCK_B), dtype=tl.float32)
    lane = tl.arange(0, BLOCK_R)
    if CARRIES:
        rows = tl.load(rows_ptr + begin + lane, mask=begin + lane < end, other=0)
    for first in range(begin, end, BLOCK_R):
        slots = first + lane
        is_slot = slots < end
        if not CARRIES:
            rows = tl.load(rows_ptr + slots, mask=is_slot, other=0)
        at_a = (rows if GATHERS_A else slots).to(tl.int64)
        at_b = (slots if GATHERS_A else rows).to(tl.int64)
        a = tl.load(
            a_ptr + at_a[:, None] * A + columns_a[None, :], mask=is_slot[:, None] & (columns_a < A)[None, :], other=0.0
        )
        b = tl.load(
            b_ptr + at_b[:, None] * B + columns_b[None, :], mask=is_slot[:, None] & (columns_b < B)[None, :], other=0.0
        )
        total = tl.dot(tl.trans(a), b, total, input_precision="ieee")
        if CARRIES:
            rows = tl.load(rows_ptr + slots + BLOCK_R, mask=slots + BLOCK_R < end, other=0)
    keep = (columns_a < A)[:, None] & (columns_b < B)[None, :]
    out_ptrs = out_ptr + (expert.to(tl.int64) * A + columns_a)[:, None] * B + columns_b[None, :]
    tl.store(out_ptrs, total.to(out_ptr.dtype.element_ty), mask=keep)


def expert_weight_grad(
    a: Tensor, b: Tensor, rows_R: Tensor, offsets_e: Tensor, *, gathers: str, tiles: WeightGradTiles = MEASURED
) -> Tensor:
    """Sum a's times b's over each expert's slots: -> [e, A, B].

    `gathers` names the factor that is [S, width] and read through `rows_R`, "a" or "b"; the other is [R, width].
    """
    width_a, width_b, num_experts = a.shape[1], b.shape[1], offsets_e.numel()
    out_eAB = a.new_empty(num_experts, width_a, width_b)
    grid = (num_experts * triton.cdiv(width_a, tiles.width_a) * triton.cdiv(width_b, tiles.width_b),)
    _expert_weight_grad_kernel[grid](
        a, b, rows_R, offsets_e, out_eAB,
        A=width_a, B=width_b, GATHERS_A=gathers == "a", CARRIES=tiles.carries_rows,
        BLOCK_A=tiles.width_a, BLOCK_B=tiles.width_b, BLOCK_R=tiles.slots,
        num_warps=tiles.num_warps, num_stages=tiles.num_stages,
    )  # fmt: skip
    return out_eAB
