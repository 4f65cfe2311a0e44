"""Initial weights that do not depend on the layout.

Each parameter is drawn in full from a generator of its own, seeded by (run seed, name), and each expert's part of a
parameter by (run seed, name, expert); a rank keeps its slice. So one process and a thousand start from the same model.
(Random operations on DTensors are not used: on a CPU they repeat themselves on every shard.)
"""

import hashlib
import math

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

from titan_moe.layers.experts import GroupedExperts

RESIDUAL_ENDS = (".attention.out.weight", ".down.weight", ".experts.down", ".latent_up.weight")
"""Projections that end a residual branch: their spread is divided by sqrt(2 · layers) (GPT-2)."""


@torch.no_grad()
def init_weights(model: nn.Module, seed: int, std: float, num_layers: int) -> None:
    """Fill every parameter and buffer of a materialised model, sharded or not.

    Matrices are normal with deviation `std`, clamped at three deviations; norms start at one, biases at zero.
    """
    experts = {name for name, module in model.named_modules() if isinstance(module, GroupedExperts)}
    for name, parameter in model.named_parameters():
        spread = std / math.sqrt(2 * num_layers) if name.endswith(RESIDUAL_ENDS) else std
        if parameter.ndim == 1:
            _local(parameter).fill_(0.0 if name.endswith("bias") else 1.0)
        elif name.rpartition(".")[0] in experts:
            _init_experts(parameter, name, seed, spread)
        else:
            offsets, local = _offsets(parameter), _local(parameter)
            local.copy_(_slice(_draw(parameter.shape, f"{seed}/{name}", spread, local), offsets, local.shape))
    for module in model.modules():
        reset = getattr(module, "reset_buffers", None)
        if reset is not None:
            reset()


def _init_experts(parameter: Tensor, name: str, seed: int, spread: float) -> None:
    local, offsets = _local(parameter), _offsets(parameter)
    for index, expert in enumerate(local):
        full = _draw(parameter.shape[1:], f"{seed}/{name}/{offsets[0] + index}", spread, local)
        expert.copy_(_slice(full, offsets[1:], expert.shape))


def _draw(shape: torch.Size, key: str, spread: float, like: Tensor) -> Tensor:
    generator = torch.Generator(like.device)
    generator.manual_seed(int.from_bytes(hashlib.sha256(key.encode()).digest()[:8], "big") >> 1)
    full = torch.empty(shape, dtype=torch.promote_types(like.dtype, torch.float32), device=like.device)
    # not trunc_normal_: torch 2.13 draws other numbers from the same generator than 2.11, and waits for the device
    return full.normal_(0.0, spread, generator=generator).clamp_(-3 * spread, 3 * spread)


def _slice(full: Tensor, offsets: tuple[int, ...], shape: torch.Size) -> Tensor:
    return full[tuple(slice(begin, begin + size) for begin, size in zip(offsets, shape, strict=True))]


def _local(parameter: Tensor) -> Tensor:
    return parameter.to_local() if isinstance(parameter, DTensor) else parameter


def _offsets(parameter: Tensor) -> tuple[int, ...]:
    if not isinstance(parameter, DTensor):
        return (0,) * parameter.ndim
    return compute_local_shape_and_global_offset(parameter.shape, parameter.device_mesh, parameter.placements)[1]
