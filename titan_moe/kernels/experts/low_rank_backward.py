"""Back through SwiGLU and the score, with the gradients of the factors that read its input and its result.

R expert slots, sorted by expert · e local experts · F hidden width · r rank

Physics: memory-bound, reads 3·R·F elements and writes 2·R·F. A thread block computes some columns of all slots of an
expert, in order, so the gradients of A of down and of B of gate and up, which sum over these slots, are complete where
they are computed: neither activations nor their gradients are read again, and activations are not even written, which
saves 4·R·F elements of the passes apart (swiglu_backward.py, low_rank.py). The gradient of a score is a sum over
columns, of which each thread block has a part; one more launch adds F / 64 parts.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from titan_moe.config.swiglu import PLAIN_SWIGLU, SwiGLU
from titan_moe.kernels.experts.activation import backward, forward
from titan_moe.kernels.experts.low_rank import LowTiles, low_block

CUT = LowTiles(64, slots=16)
MAX_BLOCK = 32
"""Columns of the rank at a time: sums of three factors take registers."""


@triton.jit(do_not_specialize=["num_slots"])
def _backward_kernel(
    dactive_ptr, hidden_ptr, scores_ptr, offsets_ptr, dlow_ptr, low_ptr, dhidden_ptr, dscores_ptr, da_ptr, db_ptr,
    num_slots, F: tl.constexpr, RANK: tl.constexpr, LIMIT: tl.constexpr, ALPHA: tl.constexpr, UP_OFFSET: tl.constexpr,
    BLOCK_R: tl.constexpr, BLOCK_F: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    tiles: tl.constexpr = (F + BLOCK_F - 1) // BLOCK_F
    expert, tile = (tl.program_id(0) // tiles).to(tl.int64), tl.program_id(0) % tiles
    features = tile * BLOCK_F + tl.arange(0, BLOCK_F)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    is_first = tl.program_id(1) == 0  # the others compute the same again for more of the rank
    begin = tl.load(offsets_ptr + expert - 1, mask=expert > 0, other=0)
    end = tl.load(offsets_ptr + expert)
    dtype: tl.constexpr = dhidden_ptr.dtype.element_ty
    da = tl.zeros((BLOCK_F, BLOCK), dtype=tl.float32)
    db_gate = tl.zeros((BLOCK_F, BLOCK), dtype=tl.float32)
    db_up = tl.zeros((BLOCK_F, BLOCK), dtype=tl.float32)
    for first in range(begin, end, BLOCK_R):
        slots = first + tl.arange(0, BLOCK_R)
        is_slot = slots < end
        slot = slots.to(tl.int64)[:, None]
        keep = is_slot[:, None] & (features < F)[None, :]
        hidden_ptrs = hidden_ptr + slot * (2 * F) + features[None, :]
        gate = tl.load(hidden_ptrs, mask=keep, other=0.0).to(tl.float32)
        up = tl.load(hidden_ptrs + F, mask=keep, other=0.0).to(tl.float32)
        dactive = tl.load(dactive_ptr + slot * F + features[None, :], mask=keep, other=0.0).to(tl.float32)
        score = tl.load(scores_ptr + slots, mask=is_slot, other=0.0)
        silu, factor = forward(gate, up, LIMIT, ALPHA, UP_OFFSET)
        dscore = tl.sum(dactive * silu * factor, axis=1)
        tl.store(dscores_ptr + tile.to(tl.int64) * num_slots + slots, dscore, mask=is_slot & is_first)
        active = (silu * factor * score[:, None]).to(dtype)
        dgate, dup = backward(gate, up, dactive * score[:, None], LIMIT, ALPHA, UP_OFFSET)
        dgate, dup = dgate.to(dtype), dup.to(dtype)
        dhidden_ptrs = dhidden_ptr + slot * (2 * F) + features[None, :]
        tl.store(dhidden_ptrs, dgate, mask=keep & is_first)
        tl.store(dhidden_ptrs + F, dup, mask=keep & is_first)
        is_low = is_slot[:, None] & (columns < RANK)[None, :]
        dlow = tl.load(dlow_ptr + slot * RANK + columns[None, :], mask=is_low, other=0.0)
        low_ptrs = low_ptr + slot * (2 * RANK) + columns[None, :]
        low_gate = tl.load(low_ptrs, mask=is_low, other=0.0)
        low_up = tl.load(low_ptrs + RANK, mask=is_low, other=0.0)
        da = tl.dot(tl.trans(active), dlow, da, input_precision="ieee")
        db_gate = tl.dot(tl.trans(dgate), low_gate, db_gate, input_precision="ieee")
        db_up = tl.dot(tl.trans(dup), low_up, db_up, input_precision="ieee")
    keep = (features < F)[:, None] & (columns < RANK)[None, :]
    db_ptrs = db_ptr + expert * (2 * F * RANK) + features[:, None] * RANK + columns[None, :]
    tl.store(db_ptrs, db_gate.to(dtype), mask=keep)
    tl.store(db_ptrs + F * RANK, db_up.to(dtype), mask=keep)
    da_ptrs = da_ptr + expert * (F * RANK) + columns[:, None] * F + features[None, :]
    tl.store(da_ptrs, tl.trans(da).to(dtype), mask=(columns < RANK)[:, None] & (features < F)[None, :])


def swiglu_backward_with_factors(
    dactive_RF: Tensor,
    hidden_R2F: Tensor,
    scores_R: Tensor,
    offsets_e: Tensor,
    dlow_Rr: Tensor,
    low_R2r: Tensor,
    activation: SwiGLU = PLAIN_SWIGLU,
    cut: LowTiles = CUT,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Gradients of the pre-activation [R, 2F], of scores [R], of A of down [e, r, F] and of B of gate and up
    [e, 2, F, r].

    Slots past the last expert are not written.

    Args:
        dlow_Rr: gradients of products with A of down.
        low_R2r: products with A of gate and up.
    """
    (num_slots, num_features), rank, num_experts = dactive_RF.shape, dlow_Rr.shape[1], offsets_e.numel()
    dhidden_R2F = torch.empty_like(hidden_R2F)
    da, db = (dactive_RF.new_empty(num_experts, *size) for size in ((rank, num_features), (2, num_features, rank)))
    if not num_slots:
        return dhidden_R2F, torch.empty_like(scores_R), da.zero_(), db.zero_()
    block, num_tiles = min(low_block(rank), MAX_BLOCK), triton.cdiv(num_features, cut.width)
    parts = scores_R.new_empty(num_tiles, num_slots)
    _backward_kernel[(num_experts * num_tiles, triton.cdiv(rank, block))](
        dactive_RF, hidden_R2F, scores_R, offsets_e, dlow_Rr, low_R2r, dhidden_R2F, parts, da, db, num_slots,
        F=num_features, RANK=rank, LIMIT=activation.limit, ALPHA=activation.alpha, UP_OFFSET=activation.up_offset,
        BLOCK_R=cut.slots, BLOCK_F=cut.width, BLOCK=block, num_warps=cut.num_warps, num_stages=cut.num_stages,
    )  # fmt: skip
    return dhidden_R2F, parts.sum(0), da, db
