"""Newton-Schulz, which orthogonalises stacks of matrices: the products of Muon (kellerjordan.github.io/posts/muon).

Five steps of a quintic polynomial bring the singular values of a matrix near 1, into [0.7, 1.2]. Its coefficients make
small ones grow fastest.

Physics: bound by products. With s <= l the two dimensions of a matrix, a step costs 4 s^2 l + 2 s^3 FLOPs: X X^T, the
square of that, and its product with X. For an eighth of Qwen3-30B's experts five steps are 66 TFLOP, a tenth of a
second of a GPU. Stacks of matrices go through batched products: a launch for each of thousands of matrices would cost
more. Products are PyTorch's, in PyTorch's order, so there is no kernel and no reference beside it.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

COEFFICIENTS = 3.4445, -4.7750, 2.0315
"""Of X, X X^T X and (X X^T)^2 X in a step, as in `torch.optim.Muon`."""
EPS = 1e-7
"""The least norm that a matrix is divided by."""


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
