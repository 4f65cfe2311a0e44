"""Moments in 8 bits as tensors of torchao, and as plain fp32 tensors in checkpoints."""

from functools import cache
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


def new_moment(parameter: Tensor, dtype: torch.dtype, *, is_signed: bool) -> Tensor:
    """Allocate a moment that is zero, in torch.int8 or torch.float8_e4m3fn, on the mesh of the parameter.

    A shard that does not fit gets a moment in fp32.
    """
    torchao, shard = _import_torchao(), local(parameter)
    moment: Tensor
    if not fits_8bit(shard):
        moment = torch.zeros_like(shard, dtype=torch.float32, requires_grad=False)
    elif dtype == torch.float8_e4m3fn:
        moment = torchao["fp8"].zeros(shard.shape, BLOCK, shard.device, dtype=torch.float32)
    else:
        codes = torch.zeros(shard.shape, dtype=torch.uint8, device=shard.device)
        scales_B = torch.zeros(codes.numel() // BLOCK, device=shard.device)
        map_ = dynamic_map(is_signed, shard.device)
        moment = torchao["int8"](codes, scales_B, map_, is_signed, dtype=torch.float32)
    return _like(parameter, moment)


def is_8bit(value: Any) -> bool:
    """Whether the local shard of a value has 8 bits."""
    return isinstance(value, Tensor) and hasattr(local(value), "codes")


def parts_of(value: Tensor, *, is_signed: bool) -> Moment:
    """The tensors of a local shard for the kernel."""
    shard = local(value)
    return Moment(shard.codes.view(torch.uint8), shard.scale, getattr(shard, "qmap", None), is_signed)


def to_plain(value: Tensor, *, is_signed: bool) -> Tensor:
    """An fp32 copy in host memory, sharded as the moment is.

    On a GPU, fp32 copies of all moments may not fit beside the run.
    """
    plain = dequantize_reference(parts_of(value, is_signed=is_signed)).cpu()
    if not isinstance(value, DTensor):
        return plain
    # not from_local: it moves the shard to the device of the mesh
    return DTensor(plain, value._spec, requires_grad=False)


def copy_from_plain(value: Tensor, plain: Tensor, *, is_signed: bool) -> None:
    """Quantise into an existing moment, to nearest. What `to_plain` gave is found again exactly."""
    moment = parts_of(value, is_signed=is_signed)
    x = local(plain).to(moment.codes.device, torch.float32)
    codes, scales_B = quantize_reference(x, moment.map, is_signed, NEAREST)
    moment.codes.copy_(codes)
    moment.scales_B.copy_(scales_B)


@cache
def dynamic_map(is_signed: bool, device: torch.device) -> Tensor:
    """torchao's map of int8 codes [256], fp32."""
    return torch.tensor(_import_torchao()["map"](signed=is_signed), dtype=torch.float32, device=device)


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


def _import_torchao() -> dict[str, Any]:
    """The classes of moments and the map of int8, imported only where they are used: it takes seconds.

    Raises: RecipeError that names the package and the command that installs it.
    """
    require_torchao("precision.moments in 8 bits", way_out="bf16", module="torchao.optim")
    from torchao.optim.quant_utils import create_dynamic_map
    from torchao.optim.subclass_8bit import OptimState8bit
    from torchao.optim.subclass_fp8 import OptimStateFp8

    return {"int8": OptimState8bit, "fp8": OptimStateFp8, "map": create_dynamic_map}
