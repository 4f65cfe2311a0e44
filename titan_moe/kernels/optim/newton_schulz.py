"""Newton-Schulz, which orthogonalises stacks of matrices: the products of Muon (kellerjordan.github.io/posts/muon).

Five steps of a quintic polynomial bring the singular values of a matrix near 1, into [0.7, 1.2]. Its coefficients make
small ones grow fastest.

Physics: bound by products. With s <= l the two dimensions of a matrix, a step costs 4 s^2 l + 2 s^3 FLOPs: X X^T, the
square of that, and its product with X. The first two are symmetric, and on a GPU half of them is computed
(symmetric.py), 3 s^2 l + s^3 FLOPs in all. For an eighth of Qwen3-30B's experts five whole steps are 66 TFLOP. Stacks
of matrices go through batched products: a launch for each of thousands of matrices would cost more.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from titan_moe.kernels.optim.symmetric import launch_symmetric_product, symmetric_product_reference

COEFFICIENTS = 3.4445, -4.7750, 2.0315
"""Of X, X X^T X and (X X^T)^2 X in a step, as in `torch.optim.Muon`."""
EPS = 1e-7
"""The least norm that a matrix is divided by."""


def orthogonalise_reference(x_nRC: Tensor, num_steps: int) -> Tensor:
    """The definition, in PyTorch's order: x / |x|, then `num_steps` times a X + (b A + c A^2) X with A = X X^T, in the
    dtype of x."""
    a, b, c = COEFFICIENTS
    is_tall = x_nRC.shape[-2] > x_nRC.shape[-1]
    x = x_nRC.mT if is_tall else x_nRC
    x = x / torch.linalg.vector_norm(x, dim=(-2, -1), keepdim=True).clamp(min=EPS)
    for _ in range(num_steps):
        gram = x @ x.mT
        x = torch.baddbmm(x, torch.baddbmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return x.mT if is_tall else x


def orthogonalise_by_halves(x_nRC: Tensor, num_steps: int, out_nRC: Tensor | None = None) -> Tensor:
    """The same with symmetric products, and with a I + b A + c A^2 as the one factor of X, whose first one divides by
    the norm. Nothing is transposed or copied. `out_nRC` may be a part of larger matrices."""
    (a, b, c), is_tall = COEFFICIENTS, x_nRC.shape[-2] > x_nRC.shape[-1]
    product = launch_symmetric_product if x_nRC.is_cuda else symmetric_product_reference
    norm_n = torch.linalg.vector_norm(x_nRC, dim=(-2, -1), dtype=torch.promote_types(x_nRC.dtype, torch.float32))
    inverse_n, x = norm_n.clamp(min=EPS).reciprocal(), x_nRC
    of_norm, ones_n = (inverse_n.square(), inverse_n), torch.ones_like(inverse_n)
    for step in range(num_steps):
        of_gram, of_factor = (ones_n, ones_n) if step else of_norm
        gram = product(x.mT if is_tall else x, of_gram)
        factor = product(gram, of_factor, gram, (c, b, a))
        out = out_nRC if step == num_steps - 1 else None
        pair = (x, factor) if is_tall else (factor, x)
        x = torch.bmm(*pair, out=out)
    return x


def orthogonalise(x_nRC: Tensor, num_steps: int) -> Tensor:
    """Newton-Schulz for a stack of matrices, in their dtype. Zero matrices stay zero."""
    return orthogonalise_by_halves(x_nRC, num_steps) if _takes(x_nRC) else orthogonalise_reference(x_nRC, num_steps)


def orthogonalise_parts(x_nRC: Tensor, rows: Sequence[int], num_ranks: int, num_steps: int) -> Tensor:
    """The same for a stack of fused weights, each of several matrices one below the other, with `rows` rows.

    `num_ranks` is the number of tensor-parallel ranks that have split the rows: the first has its rows of every matrix,
    then comes the second. Without `rows`, there is one matrix.
    """
    if len(rows) < 2:
        return orthogonalise(x_nRC, num_steps)
    if num_ranks == 1 and _takes(x_nRC):
        out_nRC = torch.empty_like(x_nRC)
        for own, done in zip(x_nRC.split([*rows], 1), out_nRC.split([*rows], 1), strict=True):
            orthogonalise_by_halves(own, num_steps, done)
        return out_nRC
    by_rank = x_nRC.unflatten(1, (num_ranks, -1)).split([size // num_ranks for size in rows], 2)
    parts = [orthogonalise(part.flatten(1, 2), num_steps).unflatten(1, (num_ranks, -1)) for part in by_rank]
    return torch.cat(parts, 2).flatten(1, 2)


def _takes(x_nRC: Tensor) -> bool:
    """Whether Triton takes a stack; in fp64 layouts are compared."""
    return x_nRC.is_cuda and x_nRC.dtype == torch.bfloat16
