"""Weights of a checkpoint for a model that stores them as codes, and codes of a checkpoint as numbers.

The weights of one layer are read at a time, in fp32, and rounded into their codes: the model in a wider dtype is never
in memory.
"""

from collections.abc import Callable, Iterable, Mapping
from itertools import groupby

import torch
from torch import Tensor, nn

from titan_moe.checkpoint.hf_names.names import split_name
from titan_moe.checkpoint.storage import ChunkedTensor, PlainReader, RowsOf, load_slices
from titan_moe.checkpoint.weights import Shape
from titan_moe.kernels.formats.stored import BLOCK, CODES, store
from titan_moe.kernels.optim.split_master import store_split
from titan_moe.parameters import (
    DTYPE_OF_NUMBERS,
    SCALES,
    Chunk,
    local,
    local_chunks,
    names_of_codes,
    remainder_of,
)


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
def load_numbers(own: Mapping[str, Tensor], names: Iterable[str], read: Callable[[dict[str, Tensor]], None]) -> None:
    """Let `read` fill the weights of a layer in fp32, and round them into their codes, where `own` has scales of them,
    or into their dtype. Ranks have other layers, or other numbers of them, so `read` may not be collective."""
    for _, of_layer in groupby(sorted(names, key=_layer), _layer):
        wide = {name: torch.empty_like(own[name], dtype=torch.float32) for name in of_layer}
        read(wide)
        for name, values in wide.items():
            weight, scales = local(own[name].detach()), own.get(f"{name}{SCALES}")
            if scales is not None:
                store(local(values), weight, local(scales.detach()))
            else:
                rest = remainder_of(own[name])
                store_split(weight, None if rest is None else local(rest), local(values))


def in_another_form(own: Mapping[str, Shape], saved: Mapping[str, Shape]) -> set[str]:
    """The names of weights that are codes in a model or in a checkpoint alone, or other codes in both."""
    scales = {name for name in own.keys() | saved.keys() if name.endswith(SCALES)}
    names = {name.removesuffix(SCALES) for name in scales if own.get(name) != saved.get(name)}
    return names & own.keys() & saved.keys()


def read_numbers(
    reader: PlainReader, saved: Mapping[str, Shape], rows_of: RowsOf
) -> Callable[[dict[str, Tensor]], None]:
    """What fills this rank's slices of weights, in fp32, from a checkpoint, on this rank alone. Codes become numbers.

    Raises, when called: ValueError with one sentence for what cannot be read.
    """

    def read(wide: dict[str, Tensor]) -> None:
        slices: dict[str, ChunkedTensor | Tensor] = {}
        chunks = {
            name: [chunk for chunk in local_chunks(values, rows_of(name)) if chunk.values.numel()]
            for name, values in wide.items()
        }
        coded = {name: saved[f"{name}{SCALES}"] for name in wide if f"{name}{SCALES}" in saved}
        for name, of_name in chunks.items():
            if name in coded:
                of_name = [each._replace(values=torch.empty_like(each.values, dtype=CODES)) for each in of_name]
                slices[f"{name}{SCALES}"] = torch.empty(coded[name] or ())
            slices[name] = ChunkedTensor(wide[name].size(), of_name)
        load_slices(slices, reader)
        for name in coded:
            box, scales = slices[name], slices[f"{name}{SCALES}"]
            assert isinstance(box, ChunkedTensor) and isinstance(scales, Tensor)
            for chunk in chunks[name]:
                codes = chunk._replace(values=box.chunks[torch.Size(chunk.offsets)])
                chunk.values.copy_(numbers_of_chunk(codes, scales.to(codes.values.device)).values)

    return read


def _layer(name: str) -> int:
    layer, _ = split_name(name)
    return -1 if layer is None else layer


def numbers_of_chunk(chunk: Chunk, scales: Tensor) -> Chunk:
    """A slice of codes as numbers in fp32; the scales are whole."""
    values, is_blockwise = chunk.values, scales.ndim == chunk.values.ndim
    for dim, (size, offset) in enumerate(zip(values.shape[: scales.ndim], chunk.offsets, strict=False)):
        places = torch.arange(offset, offset + size, device=scales.device)
        in_block = is_blockwise and dim >= values.ndim - 2
        scales = scales.index_select(dim, places // BLOCK if in_block else places)
    return chunk._replace(values=values.float() * (scales if is_blockwise else scales[..., None]))


def dtype_of_numbers(part: nn.Module) -> torch.dtype:
    """The dtype of compute, whose numbers codes stand for in a product; bf16 where there are none."""
    found = (vars(module).get(DTYPE_OF_NUMBERS) for module in part.modules())
    return next((dtype for dtype in found if dtype is not None), torch.bfloat16)
