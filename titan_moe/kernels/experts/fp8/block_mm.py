"""Warp-specialised grouped GEMMs in blockwise fp8 on Hopper: some warps load, others multiply and add.

S rows · R expert slots, sorted by expert · M tiles of 128 slots · e experts · I input width · O output width

Products of 128 of I leave the matrix units, are scaled and added in fp32 (arXiv:2412.19437, section 3.3.2). In a kernel
whose warps all do the same (gather_mm.py, slot_mm.py: the definition, bit for bit), the matrix units stand still while
products are added. Here a thread block has three groups of four warps (Gluon, Triton's language with explicit layouts):
one keeps 4 stages of 128 slots and 2 x 128 outputs on their way into shared memory; two have 64 of the slots each, so
that one may multiply while the other adds. No barrier joins the groups but those of the stages. Thread blocks stay and
loop over tiles, so the next tile's first stages are loaded while the last one's results are stored.

Physics: 2·R·I·O FLOPs, bound by the matrix units at 8,192 a cycle and multiprocessor; R·I·O / 128 multiply-adds in fp32
at 128 a cycle take a quarter of their time, beside them.
"""

import torch
from torch import Tensor
from triton import knobs
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    async_copy,
    fence_async_shared,
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from titan_moe.kernels.device import num_multiprocessors
from titan_moe.kernels.experts.fp8.loads import load_box, load_each
from titan_moe.kernels.experts.fp8.packed import BLOCK
from titan_moe.kernels.experts.fp8.rows import scale_at
from titan_moe.kernels.experts.tiles import Tiles, place_in_groups

STAGES = 4
GROUP = 16
HALF = BLOCK // 2
CODES_LAYOUT = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=8, rank=2)
LOADING_WARPS = 4
REGISTERS = {"slots": (232, 40), "rows": (224, 56)}
"""Of a thread that multiplies, which holds 3 x 64 sums and products, and of one that loads slots or gathers rows."""


def has_roles(device: torch.device) -> bool:
    """Whether the kernels here run on a device: their instructions are Hopper's alone."""
    return device.type == "cuda" and not knobs.runtime.interpret and torch.cuda.get_device_capability(device)[0] == 9


def descriptor(codes: Tensor, rows: int) -> TensorDescriptor:
    """Of pieces of so many rows and of 128 columns."""
    return TensorDescriptor.from_tensor(codes, [rows, BLOCK], CODES_LAYOUT)


@gluon.jit
def multiply(a, b, BLOCK: gl.constexpr, layout: gl.constexpr):
    """Start a product of 64 x 128 and 128 x 128 codes, both along the summed dimension."""
    zeros = gl.zeros([BLOCK // 2, BLOCK], gl.float32, layout)
    return warpgroup_mma(a, b.permute((1, 0)), zeros, use_acc=False, is_async=True)


@gluon.jit
def _add_products(
    half: gl.constexpr, x_stages, weight_stages, loaded, free, x_ptr, rows_ptr, out_ptr, experts_ptr, begins_ptr,
    ends_ptr, count_ptr, base_ptr, out_base_ptr, row_scales_ptr, scales_ptr,
    I: gl.constexpr, O: gl.constexpr, ROW: gl.constexpr, BLOCK: gl.constexpr, STAGES: gl.constexpr,
    GROUP: gl.constexpr,
):  # fmt: skip
    """Results of one half of each tile's slots."""
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], warps_per_cta=[4, 1], instr_shape=[16, BLOCK, 32])
    stored: gl.constexpr = gl.BlockedLayout([1, 8], [2, 16], [4, 1], [1, 0])
    size: gl.constexpr = BLOCK // 2
    num_columns: gl.constexpr = (O + 2 * BLOCK - 1) // (2 * BLOCK)
    num_blocks: gl.constexpr = I // BLOCK
    if base_ptr is not None:
        x_ptr += gl.load(base_ptr) * ROW
    if out_base_ptr is not None:
        out_ptr += gl.load(out_base_ptr + 1) * O
    num_tiles = gl.load(count_ptr)
    step = 0
    for position in range(gl.program_id(0), num_tiles * num_columns, gl.num_programs(0)):
        tile, column = place_in_groups(position, num_tiles, num_columns, GROUP)
        expert, end = gl.load(experts_ptr + tile), gl.load(ends_ptr + tile)
        begin = gl.load(begins_ptr + tile) + half * size
        slots = begin + gl.arange(0, size, gl.SliceLayout(1, layout))
        is_slot = slots < end
        if rows_ptr is None:
            row_scale_ptrs = row_scales_ptr + slots.to(gl.int64) * num_blocks
        else:
            rows = gl.load(rows_ptr + slots, mask=is_slot, other=0).to(gl.int64)
            row_scale_ptrs = scale_at(x_ptr + rows * ROW, I)
        scale_ptr = scales_ptr + (expert * (O // BLOCK) + column * 2) * num_blocks
        has_other = column * 2 * BLOCK + BLOCK < O
        total = gl.zeros([size, BLOCK], gl.float32, layout)
        other_total = gl.zeros([size, BLOCK], gl.float32, layout)
        row_scale, scale = gl.load(row_scale_ptrs, mask=is_slot, other=0.0), gl.load(scale_ptr)
        other_scale = gl.load(scale_ptr + num_blocks, mask=has_other, other=0.0)
        for block in range(num_blocks):
            stage = step % STAGES
            mbarrier.wait(loaded.index(stage), (step // STAGES) & 1)
            step += 1
            if rows_ptr is not None:  # the matrix units may overtake copies of threads, unlike those of the TMA
                fence_async_shared()
            x = x_stages.index(stage * 2 + half)
            product = multiply(x, weight_stages.index(stage * 2), BLOCK, layout)
            factor, other_factor = row_scale * scale, row_scale * other_scale
            after = block + 1  # its scales are loaded while products are computed
            row_scale = gl.load(row_scale_ptrs + after, mask=is_slot & (after < num_blocks), other=0.0)
            scale = gl.load(scale_ptr + after, mask=after < num_blocks, other=0.0)
            other_scale = gl.load(scale_ptr + num_blocks + after, mask=has_other & (after < num_blocks), other=0.0)
            product = warpgroup_mma_wait(0, deps=[product])
            total += product * gl.expand_dims(factor, 1)
            product = multiply(x, weight_stages.index(stage * 2 + 1), BLOCK, layout)
            product = warpgroup_mma_wait(0, deps=[product])
            mbarrier.arrive(free.index(stage), count=1)
            other_total += product * gl.expand_dims(other_factor, 1)
        slots = begin + gl.arange(0, size, gl.SliceLayout(1, stored))
        columns = column * 2 * BLOCK + gl.arange(0, BLOCK, gl.SliceLayout(0, stored))
        keep = gl.expand_dims(slots < end, 1)
        out_ptrs = out_ptr + gl.expand_dims(slots.to(gl.int64) * O, 1) + gl.expand_dims(columns, 0)
        gl.store(out_ptrs, gl.convert_layout(total.to(out_ptr.dtype.element_ty), stored), mask=keep)
        other = gl.convert_layout(other_total.to(out_ptr.dtype.element_ty), stored)
        gl.store(out_ptrs + BLOCK, other, mask=keep & has_other)


@gluon.jit
def _load(
    x_desc, weight_desc, x_stages, weight_stages, loaded, free, x_ptr, rows_ptr, experts_ptr, begins_ptr, ends_ptr,
    count_ptr, base_ptr, I: gl.constexpr, O: gl.constexpr, ROW: gl.constexpr, BLOCK: gl.constexpr,
    STAGES: gl.constexpr, GROUP: gl.constexpr,
):  # fmt: skip
    """Both factors: slots and weights by the TMA, gathered rows by copies of 16 bytes a thread."""
    copied: gl.constexpr = gl.BlockedLayout([1, 16], [4, 8], [4, 1], [1, 0])
    size: gl.constexpr = BLOCK // 2
    num_columns: gl.constexpr = (O + 2 * BLOCK - 1) // (2 * BLOCK)
    if base_ptr is not None:
        x_ptr += gl.load(base_ptr) * ROW
    num_tiles = gl.load(count_ptr)
    step = 0
    for position in range(gl.program_id(0), num_tiles * num_columns, gl.num_programs(0)):
        tile, column = place_in_groups(position, num_tiles, num_columns, GROUP)
        begin = gl.load(begins_ptr + tile)
        first = gl.load(experts_ptr + tile) * O + column * 2 * BLOCK
        if rows_ptr is not None:  # those past the last slot are copies of row 0, whose results are not stored
            slots, end = begin + gl.arange(0, size, gl.SliceLayout(1, copied)), gl.load(ends_ptr + tile)
            rows = gl.load(rows_ptr + slots, mask=slots < end, other=0).to(gl.int64)
            other_rows = gl.load(rows_ptr + slots + size, mask=slots + size < end, other=0).to(gl.int64)
            inner = gl.expand_dims(gl.arange(0, BLOCK, gl.SliceLayout(0, copied)), 0)
            x_ptrs = x_ptr + gl.expand_dims(rows * ROW, 1) + inner
            other_ptrs = x_ptr + gl.expand_dims(other_rows * ROW, 1) + inner
        for k in range(0, I, BLOCK):
            stage = step % STAGES
            mbarrier.wait(free.index(stage), ((step // STAGES) & 1) ^ 1)
            step += 1
            arrived = loaded.index(stage)
            x, other_x = x_stages.index(stage * 2), x_stages.index(stage * 2 + 1)
            mbarrier.expect(arrived, (3 if rows_ptr is None else 2) * BLOCK * BLOCK)
            load_box(weight_desc, [first, k], arrived, weight_stages.index(stage * 2))
            load_box(weight_desc, [first + BLOCK, k], arrived, weight_stages.index(stage * 2 + 1))
            if rows_ptr is None:
                load_box(x_desc, [begin, k], arrived, x)
                load_box(x_desc, [begin + size, k], arrived, other_x)
            else:
                load_each(x, x_ptrs + k)
                load_each(other_x, other_ptrs + k)
                async_copy.mbarrier_arrive(arrived, increment_count=False)


@gluon.jit
def _block_mm_kernel(
    x_desc, weight_desc, x_ptr, rows_ptr, out_ptr, experts_ptr, begins_ptr, ends_ptr, count_ptr, base_ptr,
    out_base_ptr, row_scales_ptr, scales_ptr,
    I: gl.constexpr, O: gl.constexpr, ROW: gl.constexpr, BLOCK: gl.constexpr, STAGES: gl.constexpr,
    GROUP: gl.constexpr, LAYOUT: gl.constexpr, LOADING_WARPS: gl.constexpr, REGISTERS: gl.constexpr,
    LOADING_REGISTERS: gl.constexpr,
):  # fmt: skip
    x_stages = gl.allocate_shared_memory(gl.float8e4nv, [2 * STAGES, BLOCK // 2, BLOCK], LAYOUT)
    weight_stages = gl.allocate_shared_memory(gl.float8e4nv, [2 * STAGES, BLOCK, BLOCK], LAYOUT)
    loaded = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    free = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for stage in gl.static_range(STAGES):
        # the bytes of the TMA count as one arrival, the copies of each thread as one
        mbarrier.init(loaded.index(stage), count=1 if rows_ptr is None else 1 + 32 * LOADING_WARPS)
        mbarrier.init(free.index(stage), count=2)
    gl.warp_specialize(
        [
            (
                _add_products,
                (
                    0, x_stages, weight_stages, loaded, free, x_ptr, rows_ptr, out_ptr, experts_ptr, begins_ptr,
                    ends_ptr, count_ptr, base_ptr, out_base_ptr, row_scales_ptr, scales_ptr, I, O, ROW, BLOCK, STAGES,
                    GROUP,
                ),
            ),
            (
                _add_products,
                (
                    1, x_stages, weight_stages, loaded, free, x_ptr, rows_ptr, out_ptr, experts_ptr, begins_ptr,
                    ends_ptr, count_ptr, base_ptr, out_base_ptr, row_scales_ptr, scales_ptr, I, O, ROW, BLOCK, STAGES,
                    GROUP,
                ),
            ),
            (
                _load,
                (
                    x_desc, weight_desc, x_stages, weight_stages, loaded, free, x_ptr, rows_ptr, experts_ptr,
                    begins_ptr, ends_ptr, count_ptr, base_ptr, I, O, ROW, BLOCK, STAGES, GROUP,
                ),
            ),
        ],
        [4, LOADING_WARPS],
        [REGISTERS, LOADING_REGISTERS],
    )  # fmt: skip


def block_mm(
    x: Tensor,
    codes_eOI: Tensor,
    scales_eoi: Tensor,
    tiles: Tiles,
    dtype: torch.dtype,
    *,
    rows_R: Tensor | None = None,
    row_scales_Ri: Tensor | None = None,
    base: Tensor | None = None,
    out: Tensor | None = None,
    out_base: Tensor | None = None,
) -> Tensor:
    """Each slot times its expert's weight: -> [R, O]; slots past the last expert are not written.

    Args:
        x: packed rows (packed.py) that `rows_R` [R] chooses from, or codes of slots [R, I] with `row_scales_Ri`, which
            have one for 128 columns.
        scales_eoi: of 128 x 128 weights.
        dtype: of the result.
        base: int64 on the device. Packed rows are those of several layers; this layer's begin at row base[0].
        out, out_base: as in gather_mm.py.
    """
    num_experts, out_width, width = codes_eOI.shape
    num_slots = len(x) if rows_R is None else rows_R.numel()
    if out is None:
        out = x.new_empty(num_slots, out_width, dtype=dtype)
    if not num_slots:
        return out
    weight = codes_eOI.view(num_experts * out_width, width)
    registers, loading_registers = REGISTERS["slots" if rows_R is None else "rows"]
    _block_mm_kernel[(num_multiprocessors(x.device),)](
        descriptor(x, HALF) if rows_R is None else None, descriptor(weight, BLOCK), x, rows_R, out,
        *tiles[:3], tiles.count, base, out_base, row_scales_Ri, scales_eoi,
        I=width, O=out_width, ROW=x.shape[1], BLOCK=BLOCK, STAGES=STAGES, GROUP=GROUP, LAYOUT=CODES_LAYOUT,
        LOADING_WARPS=LOADING_WARPS, REGISTERS=registers, LOADING_REGISTERS=loading_registers, num_warps=4,
    )  # fmt: skip
    return out
