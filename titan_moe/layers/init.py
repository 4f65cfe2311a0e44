"""Initial weights that do not depend on the layout.

Each parameter is drawn in full from its own generator, seeded by (run seed, name), an expert's matrix by (run seed,
name, expert), and a rank keeps its slice. Random operations on DTensors are not used: on CPUs every shard gets the same
numbers.
"""

import math
from collections.abc import Sequence
from itertools import zip_longest

import torch
from torch import Tensor, nn

from titan_moe.kernels.formats.stored import store
from titan_moe.kernels.optim.split_master import store_split
from titan_moe.parameters import (
    SCALES,
    Chunk,
    ParameterKind,
    fused_rows,
    local,
    local_chunks,
    named_kinds,
    names_of_codes,
    remainder_of,
    residual_ends,
    seed_of,
    shard_offsets,
    untied_embeddings,
)


@torch.no_grad()
def init_weights(
    model: nn.Module, seed: int, std: float, num_layers: int, *, embedding_std: float | None = None
) -> None:
    """Fill every parameter and buffer of a materialised model.

    Matrices are normal with deviation `std`, clamped at three deviations; norms are 1, biases 0. The deviation of
    matrices that end a residual branch is divided by sqrt(2 · layers) (GPT-2). Untied embeddings have the deviation
    `embedding_std` if it is given. Adapters add 0 at first. Of a DTensor parameter only this rank's shard is filled.
    """
    spreads = dict.fromkeys(residual_ends(model), std / math.sqrt(2 * num_layers))
    if embedding_std is not None:
        spreads |= dict.fromkeys(untied_embeddings(model), embedding_std)
    parameters, codes = dict(model.named_parameters()), names_of_codes(model)
    rows = fused_rows(model)  # of split masters, both parts are filled
    for name, parameter, kind in named_kinds(model):
        spread = None if kind.is_factor else spreads.get(name, std)
        values, remainder = local(parameter).data, remainder_of(parameter)
        scales = local(parameters[f"{name}{SCALES}"]).data if name in codes else None
        match kind:
            case ParameterKind.SCALES_OF_CODES:
                continue
            case ParameterKind.SCALE:
                values.fill_(1.0)
            case ParameterKind.BIAS | ParameterKind.FACTOR_OUT:
                values.zero_()
            case ParameterKind.EXPERT_MATRIX | ParameterKind.EXPERT_FACTOR_IN:
                offsets = shard_offsets(parameter) or (0,) * parameter.ndim
                rests = [None] * len(values) if remainder is None else list(local(remainder))
                for expert, (expert_values, rest) in enumerate(zip(values, rests, strict=True), start=offsets[0]):
                    own = [Chunk(expert_values, offsets[1:])]
                    of_expert = None if scales is None else scales[expert - offsets[0]]
                    _draw(own, [rest], parameter.shape[1:], f"{seed}/{name}/{expert}", spread, of_expert)
            case _:
                chunks, rests = local_chunks(parameter.data, rows.get(name, ())), [None]
                if remainder is not None:
                    rests = [chunk.values for chunk in local_chunks(remainder, rows.get(name, ()))]
                _draw(chunks, rests, parameter.shape, f"{seed}/{name}", spread, scales)
    for name, module in model.named_modules():
        if hasattr(module, "reset_buffers"):
            module.reset_buffers()
        if hasattr(module, "draw_buffers"):
            module.draw_buffers(f"{seed}/{name}")


def _draw(
    chunks: list[Chunk],
    remainders: Sequence[Tensor | None],
    shape: torch.Size,
    key: str,
    spread: float | None,
    scales: Tensor | None = None,
) -> None:
    """Draw a tensor in full from its own generator and keep the slices of the chunks. Without a spread it is a factor
    of an adapter, drawn as PEFT does: evenly between -1 / sqrt(inputs) and 1 / sqrt(inputs). With scales, the one chunk
    is whole and gets codes."""
    device, dtype = chunks[0].values.device, chunks[0].values.dtype
    generator = torch.Generator(device).manual_seed(seed_of(key))
    wide = torch.float32 if scales is not None else torch.promote_types(dtype, torch.float32)
    full = torch.empty(shape, dtype=wide, device=device)
    # not trunc_normal_: torch 2.13 draws other numbers from the same generator than 2.11, and waits for the device
    if spread is None:
        full.uniform_(-1 / math.sqrt(shape[-1]), 1 / math.sqrt(shape[-1]), generator=generator)
    else:
        full.normal_(0.0, spread, generator=generator).clamp_(-3 * spread, 3 * spread)
    if scales is not None:
        store(full, chunks[0].values, scales)
        return
    for (values, offsets), remainder in zip_longest(chunks, remainders):
        ends = zip(offsets, values.shape, strict=True)
        store_split(values, remainder, full[tuple(slice(begin, begin + size) for begin, size in ends)])
