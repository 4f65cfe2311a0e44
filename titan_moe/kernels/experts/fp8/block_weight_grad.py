"""Warp-specialised weight gradients in blockwise fp8 on Hopper: some warps load, others multiply and add.

M tiles of 128 slots · e experts · A, B widths of the two factors

The definition, bit for bit, is weight_grad.py; the roles of warps are those of block_mm.py. A thread block has 256 x
128 outputs: 2 x 64 of A, one after the other, in each of the two groups that multiply. So the scales of B are loaded
once for both.

Physics: 2·R·A·B FLOPs, bound by the matrix units; each product of 128 is multiplied by two scales and added, twice the
instructions in fp32 of block_mm.py.
"""

import triton
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, warpgroup_mma_wait

from titan_moe.kernels.device import num_multiprocessors
from titan_moe.kernels.experts.fp8.block_mm import (
    CODES_LAYOUT,
    HALF,
    LOADING_WARPS,
    STAGES,
    descriptor,
    multiply,
)
from titan_moe.kernels.experts.fp8.loads import load_box
from titan_moe.kernels.experts.fp8.packed import BLOCK
from titan_moe.kernels.experts.fp8.rows import RESULTS
from titan_moe.kernels.experts.tiles import place_in_groups

GROUP = 8
REGISTERS, LOADING_REGISTERS = 240, 24
"""Of a thread that multiplies, which holds 3 x 64 sums and products and 32 scales, and of one that loads."""


@gluon.jit
def _place(
    position, offsets_ptr, num_tiles_a: gl.constexpr, num_tiles_b: gl.constexpr, BLOCK: gl.constexpr,
    BLOCK_E: gl.constexpr, GROUP: gl.constexpr,
):  # fmt: skip
    """A tile of outputs: its expert, its place, and the first and the last of the expert's tiles of slots."""
    lanes: gl.constexpr = gl.BlockedLayout([1], [32], [4], [0])
    expert, program = position // (num_tiles_a * num_tiles_b), position % (num_tiles_a * num_tiles_b)
    tile_a, tile_b = place_in_groups(program, num_tiles_a, num_tiles_b, GROUP)
    lane = gl.arange(0, BLOCK_E, lanes)
    ends = gl.load(offsets_ptr + lane, mask=lane <= expert, other=0)
    begins = gl.load(offsets_ptr + lane - 1, mask=(lane <= expert) & (lane > 0), other=0)
    num_tiles = (ends - begins + BLOCK - 1) // BLOCK
    last = gl.sum(num_tiles, axis=0)
    return expert, tile_a, tile_b, last - gl.sum(gl.where(lane == expert, num_tiles, 0), axis=0), last


@gluon.jit
def _add_products(
    half: gl.constexpr, a_stages, b_stages, loaded, free, offsets_ptr, a_scales_ptr, b_scales_ptr, out_ptr, num_outputs,
    A: gl.constexpr, B: gl.constexpr, BLOCK: gl.constexpr, BLOCK_E: gl.constexpr, STAGES: gl.constexpr,
    GROUP: gl.constexpr,
):  # fmt: skip
    """Gradients of one half of each tile's rows."""
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], warps_per_cta=[4, 1], instr_shape=[16, BLOCK, 32])
    stored: gl.constexpr = gl.BlockedLayout([1, 8], [2, 16], [4, 1], [1, 0])
    size: gl.constexpr = BLOCK // 2
    num_tiles_a: gl.constexpr = (A + 2 * BLOCK - 1) // (2 * BLOCK)
    num_tiles_b: gl.constexpr = B // BLOCK
    step = 0
    for position in range(gl.program_id(0), num_outputs, gl.num_programs(0)):
        expert, tile_a, tile_b, begin, last = _place(
            position, offsets_ptr, num_tiles_a, num_tiles_b, BLOCK, BLOCK_E, GROUP
        )
        first = tile_a * 2 * BLOCK + half * BLOCK
        rows = first + gl.arange(0, size, gl.SliceLayout(1, layout))
        columns = tile_b * BLOCK + gl.arange(0, BLOCK, gl.SliceLayout(0, layout))
        total = gl.zeros([size, BLOCK], gl.float32, layout)
        other_total = gl.zeros([size, BLOCK], gl.float32, layout)
        for tile in range(begin, last):
            stage = step % STAGES
            row_scale_ptrs = a_scales_ptr + gl.cast(tile, gl.int64) * A + rows
            row_scale = gl.load(row_scale_ptrs, mask=rows < A, other=0.0)
            other_row_scale = gl.load(row_scale_ptrs + size, mask=rows + size < A, other=0.0)
            column_scale = gl.load(b_scales_ptr + gl.cast(tile, gl.int64) * B + columns)
            mbarrier.wait(loaded.index(stage), (step // STAGES) & 1)
            step += 1
            b = b_stages.index(stage)
            product = multiply(a_stages.index(stage * 4 + half * 2), b, BLOCK, layout)
            product = warpgroup_mma_wait(0, deps=[product])
            total += product * gl.expand_dims(row_scale, 1) * gl.expand_dims(column_scale, 0)
            product = multiply(a_stages.index(stage * 4 + half * 2 + 1), b, BLOCK, layout)
            product = warpgroup_mma_wait(0, deps=[product])
            mbarrier.arrive(free.index(stage), count=1)
            other_total += product * gl.expand_dims(other_row_scale, 1) * gl.expand_dims(column_scale, 0)
        rows = first + gl.arange(0, size, gl.SliceLayout(1, stored))
        columns = tile_b * BLOCK + gl.arange(0, BLOCK, gl.SliceLayout(0, stored))
        out_ptrs = out_ptr + expert.to(gl.int64) * A * B + gl.expand_dims(rows * B, 1) + gl.expand_dims(columns, 0)
        gradients = gl.convert_layout(total.to(out_ptr.dtype.element_ty), stored)
        gl.store(out_ptrs, gradients, mask=gl.expand_dims(rows < A, 1))
        gradients = gl.convert_layout(other_total.to(out_ptr.dtype.element_ty), stored)
        gl.store(out_ptrs + size * B, gradients, mask=gl.expand_dims(rows + size < A, 1))


@gluon.jit
def _load(
    a_desc, b_desc, a_stages, b_stages, loaded, free, offsets_ptr, num_outputs,
    A: gl.constexpr, B: gl.constexpr, BLOCK: gl.constexpr, BLOCK_E: gl.constexpr, STAGES: gl.constexpr,
    GROUP: gl.constexpr,
):  # fmt: skip
    """Both factors, by the TMA."""
    size: gl.constexpr = BLOCK // 2
    num_tiles_a: gl.constexpr = (A + 2 * BLOCK - 1) // (2 * BLOCK)
    num_tiles_b: gl.constexpr = B // BLOCK
    step = 0
    for position in range(gl.program_id(0), num_outputs, gl.num_programs(0)):
        _, tile_a, tile_b, begin, last = _place(position, offsets_ptr, num_tiles_a, num_tiles_b, BLOCK, BLOCK_E, GROUP)
        for tile in range(begin, last):
            stage = step % STAGES
            mbarrier.wait(free.index(stage), ((step // STAGES) & 1) ^ 1)
            step += 1
            arrived = loaded.index(stage)
            mbarrier.expect(arrived, 3 * BLOCK * BLOCK)
            for piece in gl.static_range(4):
                row = tile_a * 2 * BLOCK + piece * size
                load_box(a_desc, [row, tile * BLOCK], arrived, a_stages.index(stage * 4 + piece))
            load_box(b_desc, [tile_b * BLOCK, tile * BLOCK], arrived, b_stages.index(stage))


@gluon.jit(do_not_specialize=["num_outputs"])
def _block_weight_grad_kernel(
    a_desc, b_desc, offsets_ptr, a_scales_ptr, b_scales_ptr, out_ptr, num_outputs,
    A: gl.constexpr, B: gl.constexpr, BLOCK: gl.constexpr, BLOCK_E: gl.constexpr, STAGES: gl.constexpr,
    GROUP: gl.constexpr, LAYOUT: gl.constexpr, LOADING_WARPS: gl.constexpr, REGISTERS: gl.constexpr,
    LOADING_REGISTERS: gl.constexpr,
):  # fmt: skip
    a_stages = gl.allocate_shared_memory(gl.float8e4nv, [4 * STAGES, BLOCK // 2, BLOCK], LAYOUT)
    b_stages = gl.allocate_shared_memory(gl.float8e4nv, [STAGES, BLOCK, BLOCK], LAYOUT)
    loaded = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    free = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for stage in gl.static_range(STAGES):
        mbarrier.init(loaded.index(stage), count=1)
        mbarrier.init(free.index(stage), count=2)
    gl.warp_specialize(
        [
            (
                _add_products,
                (
                    0, a_stages, b_stages, loaded, free, offsets_ptr, a_scales_ptr, b_scales_ptr, out_ptr,
                    num_outputs, A, B, BLOCK, BLOCK_E, STAGES, GROUP,
                ),
            ),
            (
                _add_products,
                (
                    1, a_stages, b_stages, loaded, free, offsets_ptr, a_scales_ptr, b_scales_ptr, out_ptr,
                    num_outputs, A, B, BLOCK, BLOCK_E, STAGES, GROUP,
                ),
            ),
            (
                _load,
                (
                    a_desc, b_desc, a_stages, b_stages, loaded, free, offsets_ptr,
                    num_outputs, A, B, BLOCK, BLOCK_E, STAGES, GROUP,
                ),
            ),
        ],
        [4, LOADING_WARPS],
        [REGISTERS, LOADING_REGISTERS],
    )  # fmt: skip


def block_weight_grad(a: Tensor, b: Tensor, offsets_e: Tensor, scales_MA: Tensor, scales_MB: Tensor) -> Tensor:
    """`weight_grad` of the factors of requantized.py: codes [A, 128·M] and [B, 128·M] -> [e, A, B]."""
    num_experts, width_a, width_b = offsets_e.numel(), len(a), len(b)
    out_eAB = a.new_empty(num_experts, width_a, width_b, dtype=RESULTS)
    num_outputs = num_experts * triton.cdiv(width_a, 2 * BLOCK) * (width_b // BLOCK)
    _block_weight_grad_kernel[(num_multiprocessors(a.device),)](
        descriptor(a, HALF), descriptor(b, BLOCK), offsets_e, scales_MA, scales_MB, out_eAB, num_outputs,
        A=width_a, B=width_b, BLOCK=BLOCK, BLOCK_E=triton.next_power_of_2(num_experts), STAGES=STAGES, GROUP=GROUP,
        LAYOUT=CODES_LAYOUT, LOADING_WARPS=LOADING_WARPS, REGISTERS=REGISTERS, LOADING_REGISTERS=LOADING_REGISTERS,
        num_warps=4,
    )  # fmt: skip
    return out_eAB
