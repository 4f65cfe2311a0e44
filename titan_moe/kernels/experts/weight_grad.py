"""Weight gradients of the experts, with one of the factors gathered by row.

S rows · R expert slots, sorted by expert · e local experts · A, B widths of the two factors

Physics: 2·R·A·B FLOPs, bound by the matrix units; the sum runs over an expert's slots, in order, so the result is
deterministic. One factor is stored by slot, the other is gathered from rows while its tiles are loaded, so no permuted
copy of it exists. Row indices are loaded an iteration ahead, in registers, so that pipeline stages hold data alone; the
other factor comes by TMA; the gathered one is the right one, which the matrix units read untransposed. Only the right
one is masked past an expert's last slot: the left reads on, into the next expert's slots or `SLACK` finite ones.
"""

from typing import NamedTuple

import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from titan_moe.kernels.experts.tiles import SLACK, place_in_groups


class WeightGradTiles(NamedTuple):
    """How the kernel cuts its work; `tools/sweep_expert_gemms.py` times others."""

    width_a: int = 128
    width_b: int = 256
    slots: int = SLACK
    """Slots of an iteration, no more than that."""
    group: int = 8
    """Tiles of the left factor that share the right one's while they run."""
    num_warps: int = 8
    num_stages: int = 3


UP_CUT, DOWN_CUT = WeightGradTiles(group=2), WeightGradTiles(group=16)
"""For gate and up, and for down; measured (tools/results)."""


@triton.jit
def _expert_weight_grad_kernel(
    a_desc, b_ptr, rows_ptr, offsets_ptr, out_ptr, base_ptr,
    A: tl.constexpr, B: tl.constexpr, IS_TRANSPOSED: tl.constexpr,
    BLOCK_A: tl.constexpr, BLOCK_B: tl.constexpr, BLOCK_R: tl.constexpr, GROUP: tl.constexpr,
):  # fmt: skip
    if base_ptr is not None:  # products with a width keep their alignment
        b_ptr += tl.load(base_ptr) * B
    tiles_a: tl.constexpr = (A + BLOCK_A - 1) // BLOCK_A
    tiles_b: tl.constexpr = (B + BLOCK_B - 1) // BLOCK_B
    expert, program = tl.program_id(0) // (tiles_a * tiles_b), tl.program_id(0) % (tiles_a * tiles_b)
    tile_a, tile_b = place_in_groups(program, tiles_a, tiles_b, GROUP)
    begin = tl.load(offsets_ptr + expert - 1, mask=expert > 0, other=0)
    end = tl.load(offsets_ptr + expert)
    columns_a = tile_a * BLOCK_A + tl.arange(0, BLOCK_A)
    columns_b = tile_b * BLOCK_B + tl.arange(0, BLOCK_B)
    total = tl.zeros((BLOCK_A, BLOCK_B), dtype=tl.float32)
    lane = tl.arange(0, BLOCK_R)
    rows = tl.load(rows_ptr + begin + lane, mask=begin + lane < end, other=0)
    for first in range(begin, end, BLOCK_R):
        slots = first + lane
        is_slot = slots < end
        b_ptrs = b_ptr + rows.to(tl.int64)[:, None] * B + columns_b[None, :]
        a = a_desc.load([first, tile_a * BLOCK_A])
        b = tl.load(b_ptrs, mask=is_slot[:, None] & (columns_b < B)[None, :], other=0.0)
        total = tl.dot(tl.trans(a), b, total, input_precision="ieee")
        rows = tl.load(rows_ptr + slots + BLOCK_R, mask=slots + BLOCK_R < end, other=0)
    out = total.to(out_ptr.dtype.element_ty)
    out_ptr += expert.to(tl.int64) * A * B
    if IS_TRANSPOSED:
        keep = (columns_b < B)[:, None] & (columns_a < A)[None, :]
        tl.store(out_ptr + columns_b[:, None] * A + columns_a[None, :], tl.trans(out), mask=keep)
    else:
        keep = (columns_a < A)[:, None] & (columns_b < B)[None, :]
        tl.store(out_ptr + columns_a[:, None] * B + columns_b[None, :], out, mask=keep)


def expert_weight_grad(
    a_RA: Tensor,
    b_SB: Tensor,
    rows_R: Tensor,
    offsets_e: Tensor,
    *,
    is_transposed: bool = False,
    cut: WeightGradTiles = UP_CUT,
    base: Tensor | None = None,
) -> Tensor:
    """Sum a's times b's over each expert's slots, b read through `rows_R`: -> [e, A, B], or [e, B, A] transposed.

    `a` must be finite in the first `SLACK` slots past the last expert. With `base`, int64 [2] on the device, b_SB is
    that of several layers; this layer's begins at row base[0].
    """
    width_a, width_b, num_experts = a_RA.shape[1], b_SB.shape[1], offsets_e.numel()
    out = a_RA.new_empty(num_experts, *((width_b, width_a) if is_transposed else (width_a, width_b)))
    if cut.slots > SLACK:
        raise ValueError(f"{cut.slots} slots an iteration reach past the {SLACK} that may be read")
    if not rows_R.numel():
        return out.zero_()
    a_desc = TensorDescriptor.from_tensor(a_RA, [cut.slots, cut.width_a])
    grid = (num_experts * triton.cdiv(width_a, cut.width_a) * triton.cdiv(width_b, cut.width_b),)
    _expert_weight_grad_kernel[grid](
        a_desc, b_SB, rows_R, offsets_e, out, base,
        A=width_a, B=width_b, IS_TRANSPOSED=is_transposed,
        BLOCK_A=cut.width_a, BLOCK_B=cut.width_b, BLOCK_R=cut.slots, GROUP=cut.group,
        num_warps=cut.num_warps, num_stages=cut.num_stages,
    )  # fmt: skip
    return out
