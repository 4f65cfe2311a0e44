"""Muon (Keller Jordan, kellerjordan.github.io/posts/muon; arXiv:2502.16982): momentum, orthogonalised by Newton-Schulz.

The update of a matrix M = U S V^T is nearly U V^T: all of its directions count alike. Five steps of a quintic
polynomial, whose coefficients make small singular values grow fastest, bring these into [0.7, 1.2].

Physics: bound by products. With s <= l the two dimensions of a matrix, a step costs 4 s^2 l + 2 s^3 FLOPs: X X^T, the
square of that, and its product with X. For an eighth of Qwen3-30B's experts five steps are 66 TFLOP, a tenth of a
second of a GPU. Stacks of matrices go through batched products: a launch for each of thousands of matrices would cost
more. Momentum and weight are passes over memory beside it.
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

COEFFICIENTS = 3.4445, -4.7750, 2.0315
"""Of X, X X^T X and (X X^T)^2 X in a step, as in `torch.optim.Muon`."""
EPS = 1e-7
"""The least norm that a matrix is divided by."""


class Momentum(NamedTuple):
    """How momenta become updates. Tensors are scalars on the device."""

    found_inf: Tensor  # fp32: 1 leaves momenta bit for bit as they are
    grad_factor: Tensor  # multiplies the gradients
    momentum: float
    nesterov: bool


def wide_dtype(dtype: torch.dtype) -> torch.dtype:
    """The dtype of momentum and weight update: fp32 at least."""
    return torch.promote_types(dtype, torch.float32)


def product_dtype(dtype: torch.dtype) -> torch.dtype:
    """The dtype of Newton-Schulz for parameters of a dtype: bf16, but fp64 for those in fp64, which compare layouts."""
    return dtype if dtype == torch.float64 else torch.bfloat16


def accumulate(grad: Tensor, buffer: Tensor, rule: Momentum) -> Tensor:
    """Add a gradient to its momentum, in place, and give the update before Newton-Schulz, in the dtype of the sum.

    The update is that of the momentum before it is rounded to the buffer's dtype.
    """
    wide = wide_dtype(grad.dtype)
    gradient = grad.to(wide) * rule.grad_factor.to(wide)
    new = torch.lerp(buffer.to(wide), gradient, 1 - rule.momentum)
    buffer.copy_(torch.where(rule.found_inf != 0, buffer, new.to(buffer.dtype)))
    return torch.lerp(gradient, new, rule.momentum) if rule.nesterov else new


def orthogonalise(x_nRC: Tensor, num_steps: int) -> Tensor:
    """Newton-Schulz for a stack of matrices, in their dtype: x / |x|, then `num_steps` times a X + (b A + c A^2) X with
    A = X X^T. Zero matrices stay zero."""
    a, b, c = COEFFICIENTS
    is_tall = x_nRC.shape[-2] > x_nRC.shape[-1]
    x = x_nRC.mT if is_tall else x_nRC
    x = x / torch.linalg.vector_norm(x, dim=(-2, -1), keepdim=True).clamp(min=EPS)
    for _ in range(num_steps):
        gram = x @ x.mT
        x = torch.baddbmm(x, torch.baddbmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return x.mT if is_tall else x


def orthogonalise_parts(x_nRC: Tensor, rows: Sequence[int], num_ranks: int, num_steps: int) -> Tensor:
    """The same for a stack of fused weights, each of several matrices one below the other, with `rows` rows.

    `num_ranks` is the number of tensor-parallel ranks that have split the rows: the first has its rows of every matrix,
    then comes the second. Without `rows`, there is one matrix.
    """
    if len(rows) < 2:
        return orthogonalise(x_nRC, num_steps)
    by_rank = x_nRC.unflatten(1, (num_ranks, -1)).split([size // num_ranks for size in rows], 2)
    parts = [orthogonalise(part.flatten(1, 2), num_steps).unflatten(1, (num_ranks, -1)) for part in by_rank]
    return torch.cat(parts, 2).flatten(1, 2)


def step_weight(
    param: Tensor, update: Tensor, ratio: float | Tensor, lr: Tensor, weight_decay: float, found_inf: Tensor
) -> None:
    """Decay a weight by `lr * weight_decay` and subtract `lr * ratio` times its update, in place, unless `found_inf`.

    `ratio` may be a column of ratios, one a row.
    """
    wide = wide_dtype(param.dtype)
    rate = lr.to(wide)
    new = param.to(wide) * (1 - rate * weight_decay) - update.to(wide) * (rate * ratio)
    param.copy_(torch.where(found_inf != 0, param, new.to(param.dtype)))
