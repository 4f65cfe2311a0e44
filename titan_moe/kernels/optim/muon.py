"""The passes over memory of Muon (kellerjordan.github.io/posts/muon, arXiv:2502.16982), before and after the products.

Momentum: a gradient is added to its momentum, and the update goes to Newton-Schulz in bf16. Step: the weight decays and
moves by its orthogonalised update.

Physics: memory-bound. With all in fp32 the first reads gradient and momentum and writes momentum and bf16 update, 14
bytes an element; the second reads update and weight and writes the weight, 10 bytes. PyTorch's operations for them move
some 58 bytes each. Aim: memory bandwidth.

Math is fp32, rounded to nearest: a momentum moves by a twentieth of what it lacks, so bf16 keeps its changes. What
changes from step to step is on the device. Where `found_inf` is not 0, updates are zero and nothing else is written.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from titan_moe.kernels.optim.split_master import load_master, merge_reference, split_reference, store_master
from titan_moe.kernels.registry import Kernel, register

BLOCK = 2048


class Momentum(NamedTuple):
    """How momenta become updates. Tensors are scalars on the device."""

    found_inf: Tensor  # fp32: 1 leaves momenta bit for bit as they are
    grad_factor: Tensor  # multiplies the gradients
    momentum: float
    nesterov: bool


class Decay(NamedTuple):
    """How updates move weights. Tensors are scalars on the device."""

    lr: Tensor
    found_inf: Tensor
    weight_decay: float


def wide_dtype(dtype: torch.dtype) -> torch.dtype:
    """The dtype of momentum and weight update: fp32 at least."""
    return torch.promote_types(dtype, torch.float32)


def product_dtype(dtype: torch.dtype) -> torch.dtype:
    """The dtype of Newton-Schulz for parameters of a dtype: bf16, but fp64 for those in fp64, which compare layouts."""
    return dtype if dtype == torch.float64 else torch.bfloat16


def momentum_reference(grad: Tensor, buffer: Tensor, rule: Momentum) -> tuple[Tensor, Tensor]:
    """Add a gradient to its momentum, in place; the update before Newton-Schulz, in the dtype of products, and the
    momentum. The update is that of the momentum before it is rounded to the buffer's dtype."""
    wide = wide_dtype(grad.dtype)
    gradient = grad.to(wide) * rule.grad_factor.to(wide)
    new = torch.lerp(buffer.to(wide), gradient, 1 - rule.momentum)
    buffer.copy_(torch.where(rule.found_inf != 0, buffer, new.to(buffer.dtype)))
    update = torch.lerp(gradient, new, rule.momentum) if rule.nesterov else new
    return torch.where(rule.found_inf != 0, 0.0, update).to(product_dtype(grad.dtype)), buffer


def step_reference(
    param: Tensor, update: Tensor, ratio: float | Tensor, rule: Decay, remainder: Tensor | None = None
) -> Tensor:
    """Decay a weight by `lr * weight_decay` and subtract `lr * ratio` times its update, in place.

    `ratio` may be a column of ratios, one a row. `remainder` is the second part of a split master (split_master.py).
    """
    wide = wide_dtype(param.dtype)
    rate = rule.lr.to(wide)
    master = param.to(wide) if remainder is None else merge_reference(param, remainder)
    new = master * (1 - rate * rule.weight_decay) - update.to(wide) * (rate * ratio)
    if remainder is None:
        return param.copy_(torch.where(rule.found_inf != 0, param, new.to(param.dtype)))
    for stored, value in zip((param, remainder), split_reference(new), strict=True):
        stored.copy_(torch.where(rule.found_inf != 0, stored, value))
    return param


@triton.jit
def _momentum_kernel(
    grad_ptr, buffer_ptr, update_ptr, found_inf_ptr, grad_factor_ptr, numel, one_minus_momentum,
    NESTEROV: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    index = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    keep = index < numel
    if tl.load(found_inf_ptr) != 0:
        tl.store(update_ptr + index, tl.zeros((BLOCK,), update_ptr.dtype.element_ty), mask=keep)
        return
    grad_factor = tl.load(grad_factor_ptr).to(tl.float32)
    grad = tl.load(grad_ptr + index, mask=keep, other=0.0).to(tl.float32) * grad_factor
    first = tl.load(buffer_ptr + index, mask=keep, other=0.0).to(tl.float32)
    first += one_minus_momentum * (grad - first)
    tl.store(buffer_ptr + index, first.to(buffer_ptr.dtype.element_ty), mask=keep)
    if NESTEROV:
        first -= one_minus_momentum * (first - grad)
    tl.store(update_ptr + index, first.to(update_ptr.dtype.element_ty), mask=keep)


@triton.jit
def _step_kernel(
    param_ptr, remainder_ptr, update_ptr, lr_ptr, found_inf_ptr, numel, ratio, weight_decay,
    IS_SPLIT: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    if tl.load(found_inf_ptr) != 0:
        return
    lr = tl.load(lr_ptr).to(tl.float32)
    index = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    keep = index < numel
    param = load_master(param_ptr, remainder_ptr, index, keep, IS_SPLIT)
    update = tl.load(update_ptr + index, mask=keep, other=0.0).to(tl.float32)
    param = param * (1 - lr * weight_decay) - update * (lr * ratio)
    if IS_SPLIT:
        store_master(param_ptr, remainder_ptr, param, index, keep)
    else:
        tl.store(param_ptr + index, param.to(param_ptr.dtype.element_ty), mask=keep)


def launch_momentum(grad: Tensor, buffer: Tensor, update: Tensor, rule: Momentum) -> None:
    """The first reference in Triton, for contiguous tensors in fp32 and bf16."""
    if grad.numel():
        _momentum_kernel[(triton.cdiv(grad.numel(), BLOCK),)](
            grad, buffer, update, rule.found_inf, rule.grad_factor, grad.numel(), 1 - rule.momentum,
            NESTEROV=rule.nesterov, BLOCK=BLOCK, num_warps=8,
        )  # fmt: skip


def launch_step(param: Tensor, update: Tensor, ratio: float, rule: Decay, remainder: Tensor | None = None) -> None:
    """The second one, likewise, for one ratio."""
    if param.numel():
        _step_kernel[(triton.cdiv(param.numel(), BLOCK),)](
            param, param if remainder is None else remainder, update, rule.lr, rule.found_inf, param.numel(), ratio,
            rule.weight_decay, IS_SPLIT=remainder is not None, BLOCK=BLOCK, num_warps=8,
        )  # fmt: skip


@torch.library.custom_op("titan_moe::muon_momentum", mutates_args=("buffer",))
def _momentum(
    grad: Tensor, buffer: Tensor, found_inf: Tensor, grad_factor: Tensor, momentum: float, nesterov: bool
) -> Tensor:
    rule = Momentum(found_inf, grad_factor, momentum, nesterov)
    if not _takes(grad, buffer):
        return momentum_reference(grad, buffer, rule)[0]
    update = torch.empty_like(grad, dtype=product_dtype(grad.dtype), memory_format=torch.contiguous_format)
    launch_momentum(grad.contiguous(), buffer, update, rule)
    return update


@_momentum.register_fake
def _(grad: Tensor, buffer: Tensor, *args: object) -> Tensor:
    return torch.empty_like(grad, dtype=product_dtype(grad.dtype), memory_format=torch.contiguous_format)


@torch.library.custom_op("titan_moe::muon_step", mutates_args=("param", "remainders"))
def _step(
    param: Tensor, remainders: list[Tensor], update: Tensor, ratio: float, lr: Tensor, found_inf: Tensor,
    weight_decay: float,
) -> None:  # fmt: skip
    rule, remainder = Decay(lr, found_inf, weight_decay), remainders[0] if remainders else None
    if _takes(param):
        launch_step(param, update.contiguous(), ratio, rule, remainder)
    else:
        step_reference(param, update, ratio, rule, remainder)


_step.register_fake(lambda *args: None)


def _takes(*changed: Tensor) -> bool:
    """Whether Triton takes the tensors that an operation changes or reads in their dtype."""
    dtypes = (torch.float32, torch.bfloat16)
    return all(x.is_cuda and x.dtype in dtypes for x in changed) and changed[-1].is_contiguous()


def accumulate_momentum(grad: Tensor, buffer: Tensor, rule: Momentum) -> tuple[Tensor, Tensor]:
    """`momentum_reference`; Triton on a GPU."""
    return _momentum(grad, buffer, *rule), buffer


def step_weight(
    param: Tensor, update: Tensor, ratio: float | Tensor, rule: Decay, remainder: Tensor | None = None
) -> Tensor:
    """`step_reference`; Triton on a GPU, but for a column of ratios."""
    if isinstance(ratio, Tensor):
        return step_reference(param, update, ratio, rule, remainder)
    _step(param, [] if remainder is None else [remainder], update, ratio, *rule)
    return param


register(Kernel("muon_momentum", accumulate_momentum, momentum_reference))
register(Kernel("muon_step", step_weight, step_reference))
