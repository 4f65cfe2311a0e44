"""Weights of a checkpoint for a model that stores them as codes, and codes of a checkpoint as numbers.

The weights of one layer are read at a time, in fp32, and rounded into their codes: the model in a wider dtype is never
in memory.
"""

from collections.abc import Callable, Iterable, Mapping
from itertools import groupby

import torch
from torch import Tensor, nn

from titan_moe.checkpoint.hf_names.names import split_name
from titan_moe.kernels.formats.stored import BLOCK, numbers_reference, store
from titan_moe.parameters import SCALES, Chunk, ParameterKind, local, named_kinds, names_of_codes


def codes_of(parts: Iterable[nn.Module]) -> dict[str, Tensor]:
    """The weights that are stored as codes, by name, with those of their scales."""
    found: dict[str, Tensor] = {}
    for part in parts:
        for name in names_of_codes(part):
            found |= {f"{name}{end}": part.get_parameter(f"{name}{end}") for end in ("", SCALES)}
    return found


def is_scale(name: str, codes: Mapping[str, Tensor]) -> bool:
    """Whether a name is that of scales."""
    return name.endswith(SCALES) and name.removesuffix(SCALES) in codes


@torch.no_grad()
def load_rounded(codes: Mapping[str, Tensor], names: Iterable[str], read: Callable[[dict[str, Tensor]], None]) -> None:
    """Let `read` fill the weights of a layer in fp32, and round them into their codes. Collective where `read` is."""
    for _, of_layer in groupby(sorted(names, key=_layer), _layer):
        wide = {name: torch.empty_like(codes[name], dtype=torch.float32) for name in of_layer}
        read(wide)
        for name, values in wide.items():
            store(local(values), local(codes[name].detach()), local(codes[f"{name}{SCALES}"].detach()))


def _layer(name: str) -> int:
    layer, _ = split_name(name)
    return -1 if layer is None else layer


def numbers_of_chunk(chunk: Chunk, scales: Tensor) -> Chunk:
    """A slice of codes along their first dimension as numbers in fp32; the scales are whole."""
    begin, end = chunk.offsets[0], chunk.offsets[0] + len(chunk.values)
    if chunk.values.ndim > 2 or scales.ndim == 1:  # of experts, or of outputs
        return chunk._replace(values=numbers_reference(chunk.values, scales[begin:end], torch.float32))
    of_rows = scales.repeat_interleave(BLOCK, 0)[begin:end].repeat_interleave(BLOCK, 1)[:, : chunk.values.shape[1]]
    return chunk._replace(values=chunk.values.float() * of_rows)


def dtype_of_numbers(part: nn.Module) -> torch.dtype:
    """The dtype of compute, which frozen weights have that are not codes; bf16 where there are none."""
    frozen = (
        parameter.dtype
        for _, parameter, kind in named_kinds(part)
        if not parameter.requires_grad and kind is not ParameterKind.SCALES_OF_CODES and parameter.itemsize > 1
    )
    return next(frozen, torch.bfloat16)
