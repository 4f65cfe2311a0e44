"""One GEMM for each expert over its own slots, of frozen weights that are stored as codes.

R slots, sorted by expert · e local experts · M matrices of a fused weight, if there are several · I input width ·
O output width of all of them

Physics: 2·R·I·O FLOPs in compute's dtype, and 3·e·I·O bytes for the weights' numbers, which are made for the product
and freed after it: one weight of one layer at a time. Backward makes them again and computes the gradient of slots
alone. Kept for it are the codes, which are there anyway. The reference is grouped_mm.py's with `numbers_reference`.
"""

from math import prod
from typing import Any

import torch
from torch import Tensor
from torch.utils.flop_counter import register_flop_formula

from titan_moe.kernels.experts.grouped_mm import grouped_mm
from titan_moe.kernels.formats.stored import numbers_of


@torch.library.custom_op("titan_moe::stored_mm", mutates_args=())
def stored_mm(x_RI: Tensor, codes: Tensor, scales: Tensor, offsets_e: Tensor, kind: str) -> Tensor:
    """Multiply each expert's slots by its weight, [e, O, I] or [e, M, O / M, I]: -> [R, O]. `kind` and slots past the
    last border are as in `grouped_mm`."""
    weight_eOI = numbers_of(codes, scales, x_RI.dtype).flatten(1, -2)
    return grouped_mm(x_RI, weight_eOI, None, offsets_e, kind)


@stored_mm.register_fake
def _(x_RI: Tensor, codes: Tensor, scales: Tensor, offsets_e: Tensor, kind: str) -> Tensor:
    return x_RI.new_empty(x_RI.shape[0], codes.shape[1:-1].numel())


@torch.library.custom_op("titan_moe::stored_mm_dx", mutates_args=())
def _dx(grad_RO: Tensor, codes: Tensor, scales: Tensor, offsets_e: Tensor, kind: str) -> Tensor:
    weight_eOI = numbers_of(codes, scales, grad_RO.dtype).flatten(1, -2)
    return grouped_mm(grad_RO, weight_eOI.transpose(-2, -1), None, offsets_e, kind)


@_dx.register_fake
def _(grad_RO: Tensor, codes: Tensor, scales: Tensor, offsets_e: Tensor, kind: str) -> Tensor:
    return grad_RO.new_empty(grad_RO.shape[0], codes.shape[-1])


def _save(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    *tensors, ctx.kind = inputs[1:]
    ctx.save_for_backward(*tensors)


def _backward(ctx: Any, grad_RO: Tensor) -> tuple[Tensor | None, ...]:
    return _dx(grad_RO.contiguous(), *ctx.saved_tensors, ctx.kind), None, None, None, None


stored_mm.register_autograd(_backward, setup_context=_save)


def _count(rows_shape: tuple[int, int], codes_shape: tuple[int, ...], *_: Any, **__: Any) -> int:
    return 2 * rows_shape[0] * prod(codes_shape[1:])  # every slot, as if all were taken


register_flop_formula([torch.ops.titan_moe.stored_mm, torch.ops.titan_moe.stored_mm_dx])(_count)
