"""The weights of a model with its adapters added: W + scale · B A, in fp32, rounded once to the dtype of W.

A rank merges the slices that it has. The factors of a layer are gathered whole, one weight after the other; they are
small. What is merged lies in host memory.
"""

from collections.abc import Iterable

import torch
from torch import Tensor, nn

from titan_moe.parameters import Chunk, Factors, factors_of, full_tensor, fused_rows, local_chunks, named_kinds


def factor_names(parts: Iterable[nn.Module]) -> set[str]:
    """The names of the factors of adapters."""
    return {name for part in parts for name, _, kind in named_kinds(part) if kind.is_factor}


def frozen_names(parts: Iterable[nn.Module]) -> frozenset[str]:
    """The names of parameters that do not train."""
    named = (each for part in parts for each in part.named_parameters(remove_duplicate=False))
    return frozenset(name for name, parameter in named if not parameter.requires_grad)


@torch.no_grad()
def merged_chunks(part: nn.Module) -> dict[str, list[Chunk]]:
    """This rank's slices of the weights that have adapters, by name. Collective."""
    parameters, rows = dict(part.named_parameters()), fused_rows(part)
    result = {}
    for name, factors in factors_of(part).items():
        a, b = (full_tensor(parameters[of].detach(), rows.get(of, ())).cpu() for of in (factors.a, factors.b))
        chunks = local_chunks(parameters[name].detach(), rows.get(name, ()))
        result[name] = [
            Chunk(merged(chunk.values.cpu(), factors, a, b, chunk.offsets), chunk.offsets) for chunk in chunks
        ]
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
