"""The weights of a model with its adapters added: W + scale · B A, in fp32, rounded once to the dtype of W.

A rank merges the slices that it has. The factors of a layer are gathered whole, one weight after the other; they are
small. What is merged lies in host memory.
"""

from collections.abc import Iterable

import torch
from torch import Tensor, nn

from titan_moe.checkpoint.codes import dtype_of_numbers
from titan_moe.kernels.formats.stored import numbers_reference
from titan_moe.parameters import (
    SCALES,
    Chunk,
    Factors,
    factors_of,
    full_tensor,
    fused_rows,
    local,
    local_chunks,
    named_kinds,
    names_of_codes,
)


def factor_names(parts: Iterable[nn.Module]) -> set[str]:
    """The names of the factors of adapters."""
    return {name for part in parts for name, _, kind in named_kinds(part) if kind.is_factor}


def frozen_names(parts: Iterable[nn.Module]) -> frozenset[str]:
    """The names of parameters that do not train."""
    named = (each for part in parts for each in part.named_parameters(remove_duplicate=False))
    return frozenset(name for name, parameter in named if not parameter.requires_grad)


@torch.no_grad()
def merged_chunks(part: nn.Module) -> dict[str, list[Chunk]]:
    """This rank's slices of the weights that have adapters, or are stored as codes, by name. Collective."""
    parameters, rows, all_factors = dict(part.named_parameters()), fused_rows(part), factors_of(part)
    codes, result = names_of_codes(part), {}
    for name in sorted(all_factors.keys() | codes):
        chunks = [
            chunk._replace(values=chunk.values.cpu())
            for chunk in local_chunks(parameters[name].detach(), rows.get(name, ()))
        ]
        dtype = chunks[0].values.dtype
        if name in codes:  # of whole matrices
            scales, dtype = local(parameters[f"{name}{SCALES}"].detach()).cpu(), dtype_of_numbers(part)
            chunks = [chunk._replace(values=numbers_reference(chunk.values, scales, torch.float32)) for chunk in chunks]
        if factors := all_factors.get(name):
            a, b = (full_tensor(parameters[of].detach(), rows.get(of, ())).cpu() for of in (factors.a, factors.b))
            chunks = [chunk._replace(values=merged(chunk.values, factors, a, b, chunk.offsets)) for chunk in chunks]
        result[name] = [chunk._replace(values=chunk.values.to(dtype)) for chunk in chunks]
    return result


def merged(values: Tensor, factors: Factors, a: Tensor, b: Tensor, offsets: tuple[int, ...]) -> Tensor:
    """A slice of a weight with its adapter added; the factors are whole."""
    starts = offsets or (0,) * values.ndim
    if values.ndim > 2:  # of experts: only those of the slice
        own = slice(starts[0], starts[0] + values.shape[0])
        a, b, starts = a[own], b[own], (0, *starts[1:])
    delta = factors.delta(a, b)
    delta = delta[tuple(slice(start, start + size) for start, size in zip(starts, values.shape, strict=True))]
    return (values.to(delta.dtype) + delta).to(values.dtype)
