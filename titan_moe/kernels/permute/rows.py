"""The maps between rows and expert slots, and the moves along them: permute rows, unpermute with a sum.

S rows · K experts a row · R expert slots, sorted by expert · e local experts · D width

Physics: memory-bound. `gather_rows` reads and writes R·D elements, `sum_slots` reads R·D and writes S·D. With the
inverse map `slots_SK` both backward passes are gathers too: no atomics, so results are deterministic, and each op is
the transpose of the other. Slots past the last expert's end and rows without a slot are never read: memory there may
hold anything, and 0 · NaN is NaN. So missing slots are masked by a select, not multiplied by zero.

The maps come from a stable sort of S·K small integers. The host reads nothing from the device.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from titan_moe.kernels.registry import Kernel, register


def plan_slots(ids_SK: Tensor, num_experts: int, num_slots: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Sort assignments into slots: the maps of a `Permutation`.

    Args:
        ids_SK: local expert of each assignment, -1 for none.
        num_experts: local experts (e).
        num_slots: number of slots (R): the exact number of assignments that are not -1, or any static bound. With too
            few slots the last assignments in slot order, of the last experts, get none.

    Returns: rows_R, slots_SK, offsets_e, overflowed.
    """
    num_rows, top_k = ids_SK.shape
    keys = torch.where(ids_SK < 0, num_experts, ids_SK).flatten().long()
    order = torch.sort(keys, stable=True).indices
    counts = torch.zeros(num_experts + 1, dtype=torch.int64, device=keys.device)
    counts.scatter_add_(0, keys, torch.ones_like(keys))
    ends_e = counts[:num_experts].cumsum(0)
    offsets_e = ends_e.clamp(max=num_slots)
    slots = torch.empty_like(order).scatter_(0, order, torch.arange(order.numel(), device=order.device))
    # assignments of -1 are sorted behind all others
    slots_SK = torch.where(slots < offsets_e[-1], slots, -1).view(num_rows, top_k)
    rows_R = order[:num_slots] // top_k
    if num_slots > order.numel():
        rows_R = F.pad(rows_R, (0, num_slots - order.numel()))
    return rows_R.int(), slots_SK.int(), offsets_e.int(), (ends_e[-1] > num_slots).int()


def gather_sum(y_RD: Tensor, slots_SK: Tensor) -> Tensor:
    """Sum each row's slots in at least fp32, in y's dtype; 0 for a row without a slot. Not differentiable."""
    if y_RD.shape[0] == 0:  # an index needs an entry, even where it is not used
        return y_RD.new_zeros(slots_SK.shape[0], y_RD.shape[1])
    wide = torch.promote_types(y_RD.dtype, torch.float32)
    total_SD = y_RD.new_zeros(slots_SK.shape[0], y_RD.shape[1], dtype=wide)
    for slots_S in slots_SK.unbind(1):
        total_SD = total_SD + torch.where((slots_S >= 0)[:, None], y_RD[slots_S.clamp(min=0)], 0)
    # a copy: compiled torch 2.11 loses the gradient of a Function that returns an alias of what it computed
    return total_SD.to(y_RD.dtype, copy=True)


class _GatherRows(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x_SD: Tensor, rows_R: Tensor, slots_SK: Tensor) -> Tensor:
        ctx.save_for_backward(slots_SK)
        return x_SD[rows_R]

    @staticmethod
    def backward(ctx: Any, grad_RD: Tensor) -> tuple[Tensor, None, None]:
        (slots_SK,) = ctx.saved_tensors
        return gather_sum(grad_RD, slots_SK), None, None


class _SumSlots(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, y_RD: Tensor, rows_R: Tensor, slots_SK: Tensor) -> Tensor:
        ctx.save_for_backward(rows_R)
        return gather_sum(y_RD, slots_SK)

    @staticmethod
    def backward(ctx: Any, grad_SD: Tensor) -> tuple[Tensor, None, None]:
        (rows_R,) = ctx.saved_tensors
        return grad_SD[rows_R], None, None


class _PlaceScores(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, scores_SK: Tensor, slots_SK: Tensor, num_slots: int) -> Tensor:
        ctx.save_for_backward(slots_SK)
        # one extra element receives the assignments without a slot
        scores_R = scores_SK.new_zeros(num_slots + 1)
        targets = torch.where(slots_SK < 0, num_slots, slots_SK).long().flatten()
        return scores_R.scatter_(0, targets, scores_SK.flatten())[:num_slots].clone()

    @staticmethod
    def backward(ctx: Any, grad_R: Tensor) -> tuple[Tensor, None, None]:
        (slots_SK,) = ctx.saved_tensors
        grad_R = grad_R if grad_R.shape[0] else grad_R.new_zeros(1)
        return torch.where(slots_SK >= 0, grad_R[slots_SK.clamp(min=0)], 0), None, None


def gather_rows(x_SD: Tensor, rows_R: Tensor, slots_SK: Tensor) -> Tensor:
    """Permute: copy each slot's row, [S, D] -> [R, D]. Backward sums a row's slots."""
    return _GatherRows.apply(x_SD, rows_R, slots_SK)


def sum_slots(y_RD: Tensor, rows_R: Tensor, slots_SK: Tensor) -> Tensor:
    """Unpermute: sum the slots of each row, [R, D] -> [S, D]. Backward copies a row's gradient to its slots."""
    return _SumSlots.apply(y_RD, rows_R, slots_SK)


def place_scores(scores_SK: Tensor, slots_SK: Tensor, num_slots: int) -> Tensor:
    """Permute the scores: [S, K] -> [R]; 0 for a slot without an assignment."""
    return _PlaceScores.apply(scores_SK, slots_SK, num_slots)


def _gather_rows_reference(x_SD: Tensor, rows_R: Tensor, slots_SK: Tensor) -> Tensor:
    # a product with a matrix of zeros and ones
    return _assignment_matrix(rows_R.numel(), slots_SK, x_SD.dtype) @ x_SD


def _sum_slots_reference(y_RD: Tensor, rows_R: Tensor, slots_SK: Tensor) -> Tensor:
    return _assignment_matrix(rows_R.numel(), slots_SK, y_RD.dtype).T @ y_RD


def _place_scores_reference(scores_SK: Tensor, slots_SK: Tensor, num_slots: int) -> Tensor:
    out_R = scores_SK.new_zeros(num_slots) + 0 * scores_SK.sum()
    for row, k in (slots_SK >= 0).nonzero().tolist():
        out_R = out_R.index_add(0, slots_SK[row, k].long().view(1), scores_SK[row, k].view(1))
    return out_R


def _assignment_matrix(num_slots: int, slots_SK: Tensor, dtype: torch.dtype) -> Tensor:
    matrix_RS = torch.zeros(num_slots, slots_SK.shape[0], dtype=dtype, device=slots_SK.device)
    for row, k in (slots_SK >= 0).nonzero().tolist():
        matrix_RS[slots_SK[row, k], row] = 1
    return matrix_RS


register(Kernel("gather_rows", gather_rows, _gather_rows_reference))
register(Kernel("sum_slots", sum_slots, _sum_slots_reference))
register(Kernel("place_scores", place_scores, _place_scores_reference))
