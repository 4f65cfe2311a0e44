"""One GEMM for each expert over its own slots.

R slots, sorted by expert · e local experts · I input width · O output width

Physics: 2·R·I·O FLOPs; with hundreds of slots an expert it is bound by the matrix units. The borders `offsets_e` stay
on the device, so no size is read by the host.

`torch.nn.functional.grouped_mm` does the work in bf16, and in fp32 on a CPU. It has traps that this operation closes:
its fake kernel refuses fp32, its backward refuses an expanded gradient, it has no fp64, and it leaves slots past the
last border unwritten. The last one remains true here: slots past `offsets_e[-1]` of an output, and of the gradient of
x, hold anything and must not be read. The weight gradient is an operation of its own, so that a schedule may run it
later (`QueuedGroupedMM`).

The weight may have clones behind a rank's own experts; weights.py says why they are joined no earlier than here.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.flop_counter import register_flop_formula

from titan_moe.config.kernels import GROUPED_MM_STRIDE_BYTES
from titan_moe.kernels.delayed_weight_grads import Delay, WeightGradQueue
from titan_moe.kernels.experts.fp8 import format as fp8
from titan_moe.kernels.experts.fp8.grouped_mm import grad_of_weights, multiply_slots
from titan_moe.kernels.experts.weights import ExpertParameter
from titan_moe.kernels.registry import Kernel, register

GroupedGemm = Callable[[Tensor, Tensor, Tensor | None, Tensor], Tensor]
"""x_RI, own weights [e, O, I], clones [c, O, I] or None, offsets_e (of all experts) -> [R, O]."""

FORMATS = {format.name: format for format in fp8.FORMATS}
DTYPES = (torch.bfloat16, torch.float16, torch.float32)


def _borders(offsets_e: Tensor) -> list[tuple[int, int]]:
    ends = offsets_e.tolist()
    return list(zip([0, *ends[:-1]], ends, strict=True))


def grouped_mm_reference(x_RI: Tensor, own_eOI: Tensor, clones_cOI: Tensor | None, offsets_e: Tensor) -> Tensor:
    """Multiply each expert's slots by its weight, in a loop: the definition, differentiable, in any dtype."""
    weight_eOI = ExpertParameter(own_eOI, clones_cOI).join()
    parts = [x_RI[a:b] @ weight_OI.T for weight_OI, (a, b) in zip(weight_eOI, _borders(offsets_e), strict=True)]
    tail = x_RI.new_full((x_RI.shape[0] - int(offsets_e[-1]), weight_eOI.shape[1]), float("nan"))  # never read
    return torch.cat([*parts, tail])


@torch.library.custom_op("titan_moe::grouped_mm", mutates_args=())
def grouped_mm(
    x_RI: Tensor, own_eOI: Tensor, clones_cOI: Tensor | None, offsets_e: Tensor, kind: str = "grouped_mm"
) -> Tensor:
    """Multiply each expert's slots by its weight with one grouped GEMM.

    Shapes: x [R, I], own weights [e, O, I] (as `nn.Linear` stores them), clones [c, O, I], offsets_e int32 [e + c] ->
    [R, O]. Widths must be multiples of 16 bytes. Slots past `offsets_e[-1]` are not written. Of the `kind`
    "reference" it is the reference, as an operation: slow, in any dtype, reads the borders on the host; other kinds
    are formats, in Triton.
    """
    if kind == "reference":
        return grouped_mm_reference(x_RI, own_eOI, clones_cOI, offsets_e)
    if kind in FORMATS:
        return multiply_slots(x_RI, ExpertParameter(own_eOI, clones_cOI).join(), offsets_e, FORMATS[kind].columns)
    _require_operand(own_eOI)
    return F.grouped_mm(x_RI, ExpertParameter(own_eOI, clones_cOI).join().transpose(-2, -1), offs=offsets_e)


def _require_operand(weight_eOI: Tensor) -> None:
    widths, dtype = weight_eOI.shape[1:], weight_eOI.dtype
    if dtype not in DTYPES or any(width * dtype.itemsize % GROUPED_MM_STRIDE_BYTES for width in widths):
        raise ValueError(
            'kernels.experts = "grouped_mm" takes bf16, and on a CPU fp32, in widths of a multiple of '
            f"{GROUPED_MM_STRIDE_BYTES} bytes, and got {dtype} in widths {' and '.join(map(str, widths))}; take "
            'kernels.experts = "reference"'
        )


grouped_mm.register_fake(lambda x_RI, own_eOI, *_: x_RI.new_empty(x_RI.shape[0], own_eOI.shape[1]))


@torch.library.custom_op("titan_moe::grouped_mm_dw", mutates_args=())
def _grouped_mm_dw(grad_RO: Tensor, x_RI: Tensor, offsets_e: Tensor, kind: str) -> Tensor:
    if kind == "reference":
        return torch.stack([grad_RO[a:b].T @ x_RI[a:b] for a, b in _borders(offsets_e)])
    if kind in FORMATS and FORMATS[kind].rounds_weight_grads:
        return grad_of_weights(grad_RO, x_RI, offsets_e, FORMATS[kind].columns)
    return F.grouped_mm(grad_RO.T, x_RI, offs=offsets_e)


@_grouped_mm_dw.register_fake
def _(grad_RO: Tensor, x_RI: Tensor, offsets_e: Tensor, kind: str) -> Tensor:
    return x_RI.new_empty(offsets_e.shape[0], grad_RO.shape[1], x_RI.shape[1])


def _save(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    x_RI, *tensors, ctx.kind = inputs
    # the gradient of a weight alone reads rows
    ctx.save_for_backward(x_RI if ctx.needs_input_grad[1] else x_RI.new_empty(0), *tensors)


def _backward(ctx: Any, grad_RO: Tensor) -> tuple[Tensor | None, ...]:
    x_RI, own_eOI, clones_cOI, offsets_e = ctx.saved_tensors
    grad_RO = grad_RO.contiguous()
    needs_x, needs_weight = ctx.needs_input_grad[:2]
    dx_RI, dweight, dclones = None, None, None
    if needs_x:
        weight_IO = ExpertParameter(own_eOI, clones_cOI).map(lambda weight: weight.transpose(-2, -1))
        dx_RI = grouped_mm(grad_RO, *weight_IO, offsets_e, ctx.kind)
    if needs_weight:
        dweight = _grouped_mm_dw(grad_RO, x_RI, offsets_e, ctx.kind)
        if clones_cOI is not None:
            dweight, dclones = dweight.split([own_eOI.shape[0], clones_cOI.shape[0]])
    return dx_RI, dweight, dclones, None, None


grouped_mm.register_autograd(_backward, setup_context=_save)
grouped_mm_loop = partial(grouped_mm, kind="reference")
GROUPED_GEMM: dict[str, GroupedGemm] = {
    "grouped_mm": grouped_mm,
    "reference": grouped_mm_loop,
    **{name: partial(grouped_mm, kind=name) for name in FORMATS},
}
"""The GEMMs by kind: those of a recipe's experts, and native formats."""


class _Delayed(torch.autograd.Function):
    """`grouped_mm` of own weights, whose gradient is left to `delay`."""

    @staticmethod
    def forward(ctx: Any, delay: Delay, kind: str, x_RI: Tensor, own_eOI: Tensor, offsets_e: Tensor) -> Tensor:
        ctx.delay, ctx.kind = delay, kind
        ctx.save_for_backward(x_RI, own_eOI, offsets_e)
        return grouped_mm(x_RI, own_eOI, None, offsets_e, kind)

    @staticmethod
    def backward(ctx: Any, grad_RO: Tensor) -> tuple[Tensor | None, ...]:
        x_RI, own_eOI, offsets_e = ctx.saved_tensors
        grad_RO, dx_RI = grad_RO.contiguous(), None
        if ctx.needs_input_grad[2]:
            dx_RI = grouped_mm(grad_RO, own_eOI.transpose(-2, -1), None, offsets_e, ctx.kind)
        x_RI, kind = x_RI.detach(), ctx.kind  # without its graph
        ctx.delay(lambda: [_grouped_mm_dw(grad_RO, x_RI, offsets_e, kind)])
        return None, None, dx_RI, None, None


class QueuedGroupedMM:
    """`grouped_mm` whose weight gradient is delayed while a queue records. With clones it is not: their gradients and
    those of rows have one way back."""

    def __init__(self, queue: WeightGradQueue, *, kind: str = "grouped_mm") -> None:
        """`kind` as in `grouped_mm`."""
        self.queue, self.kind = queue, kind

    def __call__(self, x_RI: Tensor, own_eOI: Tensor, clones_cOI: Tensor | None, offsets_e: Tensor) -> Tensor:
        pending = self.queue.pending
        if pending is not None and clones_cOI is None:
            (stand_in,), delay = pending.delay(own_eOI)
            if delay is not None:
                return _Delayed.apply(delay, self.kind, x_RI, stand_in, offsets_e)
        return grouped_mm(x_RI, own_eOI, clones_cOI, offsets_e, self.kind)


@register_flop_formula(torch.ops.titan_moe.grouped_mm)
def _count(x_shape: tuple[int, int], own_shape: tuple[int, int, int], *_: Any, **__: Any) -> int:
    return 2 * x_shape[0] * own_shape[1] * own_shape[2]  # every slot, as if all were taken


@register_flop_formula(torch.ops.titan_moe.grouped_mm_dw)
def _count_dw(grad_shape: tuple[int, int], x_shape: tuple[int, int], *_: Any, **__: Any) -> int:
    return 2 * grad_shape[0] * grad_shape[1] * x_shape[1]


register(Kernel("grouped_mm", grouped_mm, grouped_mm_reference))
register(Kernel("grouped_mm_loop", grouped_mm_loop, grouped_mm_reference))
