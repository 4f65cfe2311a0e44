"""Moments in 8 bits as tensors of torchao, and as plain fp32 tensors in checkpoints."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from titan_moe.kernels.optim.moments_8bit import BLOCK, NEAREST, Moment, dequantize_reference, quantize_reference
from titan_moe.parameters import local
from titan_moe.titan.torchao import require_torchao

MIN_ELEMENTS = 4096
"""Smaller shards keep fp32 moments, as in torchao and bitsandbytes."""


def fits_8bit(shard: Tensor) -> bool:
    """Whether the moments of a local shard can have 8 bits. Shards of a parameter on other ranks may differ in it."""
    return shard.numel() >= MIN_ELEMENTS and shard.numel() % BLOCK == 0


def new_moment(parameter: Tensor) -> Tensor:
    """Allocate a moment that is zero, on the mesh of the parameter. A shard that does not fit gets one in fp32.

    Raises: RecipeError without torchao, with the command that installs it.
    """
    require_torchao('precision.moments = "fp8"', way_out="bf16", module="torchao.optim")
    from torchao.optim.subclass_fp8 import OptimStateFp8  # only where it is used: it takes seconds

    shard = local(parameter)
    if fits_8bit(shard):
        return _like(parameter, OptimStateFp8.zeros(shard.shape, BLOCK, shard.device, dtype=torch.float32))
    return _like(parameter, torch.zeros_like(shard, dtype=torch.float32, requires_grad=False))


def map_parts(shard: Tensor, function: Callable[[Tensor], Tensor]) -> Tensor:
    """Apply a function to a state's local shard, or to its codes and scales."""
    if not is_8bit(shard):
        return function(shard)
    changed = type(shard)(function(shard.codes), function(shard.scale))
    return changed


def is_8bit(value: Any) -> bool:
    """Whether the local shard of a value has 8 bits."""
    return isinstance(value, Tensor) and hasattr(local(value), "codes")


def parts_of(value: Tensor) -> Moment:
    """The tensors of a local shard for the kernel."""
    shard = local(value)
    return Moment(shard.codes.view(torch.uint8), shard.scale)


def to_plain(value: Tensor) -> Tensor:
    """An fp32 copy in host memory, sharded as the moment is.

    On a GPU, fp32 copies of all moments may not fit beside the run.
    """
    plain = dequantize_reference(parts_of(value)).cpu()
    if not isinstance(value, DTensor):
        return plain
    # not from_local: it moves the shard to the device of the mesh
    return DTensor(plain, value._spec, requires_grad=False)


def copy_from_plain(value: Tensor, plain: Tensor, *, is_signed: bool) -> None:
    """Quantise into an existing moment, to nearest. What `to_plain` gave is found again exactly."""
    moment = parts_of(value)
    x = local(plain).to(moment.codes.device, torch.float32)
    for stored, new in zip(moment, quantize_reference(x, NEAREST, is_signed=is_signed), strict=True):
        stored.copy_(new)


def _like(parameter: Tensor, moment: Tensor) -> Tensor:
    """Put the moment of a local shard on the mesh of its parameter."""
    if not isinstance(parameter, DTensor):
        return moment
    # the shape is needed: shards may differ in size
    return DTensor.from_local(
        moment,
        parameter.device_mesh,
        parameter.placements,
        run_check=False,
        shape=parameter.shape,
        stride=parameter.stride(),
    )
