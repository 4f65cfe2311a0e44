"""Initial weights that do not depend on the layout.

Each parameter is drawn in full from a generator of its own, seeded by (run seed, name), and each expert's part of a
parameter by (run seed, name, expert); a rank keeps its slice. So one process and a thousand start from the same model.
(Random operations on DTensors are not used: on a CPU they repeat themselves on every shard.)
"""

import hashlib
import math
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor, nn

from titan_moe.parameters import ParameterKind, named_kinds, residual_ends


class Slice(NamedTuple):
    """The part of a parameter that lies here."""

    values: Tensor
    offsets: tuple[int, ...]
    """Where it begins in the whole parameter, by dimension."""


def unsharded_slice(parameter: Tensor) -> Slice:
    """A parameter that is not spread over ranks."""
    return Slice(parameter.data, (0,) * parameter.ndim)


@torch.no_grad()
def init_weights(
    model: nn.Module, seed: int, std: float, num_layers: int, slice_of: Callable[[Tensor], Slice] = unsharded_slice
) -> None:
    """Fill every parameter and buffer of a materialised model.

    Matrices are normal with deviation `std`, clamped at three deviations; norms start at one, biases at zero. The
    deviation of matrices that end a residual branch is divided by sqrt(2 · layers) (GPT-2). `slice_of` finds what of a
    parameter lies on this rank.
    """
    ends = residual_ends(model)
    for name, parameter, kind in named_kinds(model):
        spread = std / math.sqrt(2 * num_layers) if name in ends else std
        values, offsets = slice_of(parameter)
        match kind:
            case ParameterKind.SCALE:
                values.fill_(1.0)
            case ParameterKind.BIAS:
                values.zero_()
            case ParameterKind.EXPERT_MATRIX:
                for expert, expert_values in enumerate(values, start=offsets[0]):
                    _draw(expert_values, parameter.shape[1:], offsets[1:], f"{seed}/{name}/{expert}", spread)
            case _:
                _draw(values, parameter.shape, offsets, f"{seed}/{name}", spread)
    for module in model.modules():
        reset = getattr(module, "reset_buffers", None)
        if reset is not None:
            reset()


def _draw(values: Tensor, shape: torch.Size, offsets: tuple[int, ...], key: str, spread: float) -> None:
    """Draw a tensor in full from its own generator and keep the slice that begins at the offsets."""
    generator = torch.Generator(values.device)
    generator.manual_seed(int.from_bytes(hashlib.sha256(key.encode()).digest()[:8], "big") >> 1)
    full = torch.empty(shape, dtype=torch.promote_types(values.dtype, torch.float32), device=values.device)
    # not trunc_normal_: torch 2.13 draws other numbers from the same generator than 2.11, and waits for the device
    full.normal_(0.0, spread, generator=generator).clamp_(-3 * spread, 3 * spread)
    ends = (begin + size for begin, size in zip(offsets, values.shape, strict=True))
    values.copy_(full[tuple(slice(begin, end) for begin, end in zip(offsets, ends, strict=True))])
