"""The router's logits in fp32 from bf16 rows, on the tensor cores.

T rows · D width · E experts

Physics: 2·T·D·E FLOPs forward and twice that backward. fp32 GEMMs do not use tensor cores (67 TFLOP/s on an H200) and
need an fp32 copy of the rows: for 32,768 x 2048 x 128 each of the three GEMMs takes 0.26 ms and moves 0.4 GB. But the
product of two bf16 numbers is exact in fp32, and a bf16 GEMM accumulates in fp32. With fp32 output it gives the same
logits, up to the order of the sums. Backward splits the fp32 gradient into two bf16 numbers, high and low, that carry
16 of its bits, and concatenates them, so each of its two GEMMs stays one GEMM.
"""

from collections.abc import Callable
from math import prod
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.flop_counter import register_flop_formula

from titan_moe.kernels.autocast import autocast_dtype
from titan_moe.kernels.registry import Kernel, register

RouterLogits = Callable[..., Tensor]
"""x [..., D], weight [E, D], and bias [E] if there is one -> logits [..., E] in at least fp32."""


def router_logits_reference(x: Tensor, weight_ED: Tensor, bias_E: Tensor | None = None) -> Tensor:
    """Cast all to at least fp32 and multiply, also under autocast."""
    wide = torch.promote_types(x.dtype, torch.float32)
    operands = x.to(wide), weight_ED.to(wide), None if bias_E is None else bias_E.to(wide)
    if autocast_dtype(x) is None:
        return F.linear(*operands)
    with torch.autocast(x.device.type, enabled=False):
        return F.linear(*operands)


def router_logits_fp64(x: Tensor, weight_ED: Tensor, bias_E: Tensor | None = None) -> Tensor:
    """The reference in fp64."""
    return router_logits_reference(x.double(), weight_ED, bias_E)


def _mm_fp32_out(a: Tensor, b: Tensor) -> Tensor:
    """Compute a @ b in fp32; on a GPU by a half-precision GEMM with fp32 output."""
    is_gemm = a.is_cuda and a.numel() > 0
    return torch.mm(a, b, out_dtype=torch.float32) if is_gemm else a.float() @ b.float()


@torch.library.custom_op("titan_moe::router_logits", mutates_args=())
def _router_logits(x_TD: Tensor, weight_ED: Tensor, bias_E: Tensor | None) -> Tensor:
    logits_TE = _mm_fp32_out(x_TD, weight_ED.T)
    return logits_TE if bias_E is None else logits_TE.add_(bias_E)


@torch.library.custom_op("titan_moe::router_logits_backward", mutates_args=())
def _router_logits_backward(
    grad_TE: Tensor, x_TD: Tensor, weight_ED: Tensor, trains_weight: bool
) -> tuple[Tensor, Tensor]:
    """The gradient of a weight that does not train is empty."""
    high_TE = grad_TE.to(x_TD.dtype)
    low_TE = (grad_TE - high_TE.float()).to(x_TD.dtype)
    both = torch.cat([high_TE, low_TE], dim=1)
    grad_x_TD = both @ torch.cat([weight_ED, weight_ED])
    if not trains_weight:
        return grad_x_TD, weight_ED.new_empty(0)
    grad_weight_2ED = _mm_fp32_out(both.T, x_TD).unflatten(0, (2, -1))
    return grad_x_TD, grad_weight_2ED.sum(0).to(weight_ED.dtype)


_router_logits.register_fake(lambda x, weight, bias: x.new_empty(x.shape[0], weight.shape[0], dtype=torch.float32))
_router_logits_backward.register_fake(
    lambda grad_TE, x, weight, trains_weight: (
        torch.empty_like(x),
        torch.empty_like(weight) if trains_weight else weight.new_empty(0),
    )
)


def _save(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    *operands, bias_E = inputs
    ctx.save_for_backward(*operands)
    ctx.bias_dtype = None if bias_E is None else bias_E.dtype


def _backward(ctx: Any, grad_TE: Tensor) -> tuple[Tensor | None, ...]:
    trains_weight = ctx.needs_input_grad[1]
    grad_x_TD, grad_weight_ED = _router_logits_backward(grad_TE.contiguous(), *ctx.saved_tensors, trains_weight)
    return (
        grad_x_TD,
        grad_weight_ED if trains_weight else None,
        None if ctx.bias_dtype is None else grad_TE.sum(0).to(ctx.bias_dtype),
    )


_router_logits.register_autograd(_backward, setup_context=_save)
register_flop_formula(torch.ops.titan_moe.router_logits)(
    lambda x_TD, weight_ED, *_, **__: 2 * prod(x_TD) * weight_ED[0]
)
register_flop_formula(torch.ops.titan_moe.router_logits_backward)(  # model FLOPs: the split does not double them
    lambda grad_TE, x_TD, weight_ED, trains_weight, **_: (2 + 2 * trains_weight) * prod(grad_TE) * x_TD[1]
)


def router_logits(x: Tensor, weight_ED: Tensor, bias_E: Tensor | None = None) -> Tensor:
    """fp32 logits [..., E] of rows [..., D]. Unless rows and weight are both bf16, the reference computes them."""
    if x.dtype != torch.bfloat16 or weight_ED.dtype != torch.bfloat16:
        return router_logits_reference(x, weight_ED, bias_E)
    return _router_logits(x.flatten(0, -2).contiguous(), weight_ED.contiguous(), bias_E).unflatten(0, x.shape[:-1])


register(Kernel("router_logits", router_logits, router_logits_reference))
