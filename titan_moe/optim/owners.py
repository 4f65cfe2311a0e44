"""Whole matrices on the ranks that own them, from shards on all ranks, and back.

The items of a stack are spread over the ranks of a mesh axis by one all-to-all: a rank gives each other rank its shards
of that one's items, and gets all shards of its own. Sizes follow from shapes alone, so a CUDA graph can capture it. A
matrix that two axes shard, such as FSDP and tensor parallelism, goes through one exchange for each.
"""

import math
from collections.abc import Callable
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor, Replicate, Shard

from titan_moe.parameters import TENSOR_AXIS, local


class Axis(NamedTuple):
    """A mesh axis whose ranks have shards of each matrix."""

    group: dist.ProcessGroup
    num_ranks: int
    dim: int  # of a matrix, that is sharded: 0 rows, 1 columns
    size: int  # of that dimension, before this axis shards it

    @property
    def chunk(self) -> int:
        """The size of the largest shard. The last ones may be smaller, or empty."""
        return -(-self.size // self.num_ranks)


class Split(NamedTuple):
    """How a parameter's matrices, its last two dimensions, lie on ranks."""

    shape: tuple[int, int]  # of a whole matrix
    own_shape: tuple[int, int]  # of a local shard
    axes: tuple[Axis, ...]
    tp_of_rows: int  # the tensor-parallel ranks that have split the rows

    @property
    def num_owners(self) -> int:
        """The number of ranks that share a stack of whole matrices."""
        return math.prod(axis.num_ranks for axis in self.axes)

    @property
    def largest_shape(self) -> tuple[int, int]:
        """The largest shard of a matrix on any rank."""
        chunks = {axis.dim: axis.chunk for axis in self.axes}
        return chunks.get(0, self.shape[0]), chunks.get(1, self.shape[1])


def split_of(parameter: Tensor) -> Split:
    """How the matrices of a parameter lie on ranks.

    Raises: ValueError if two axes shard one dimension of its matrices, or one axis keeps partial sums.
    """
    shape, own_shape = _last_two(parameter), _last_two(local(parameter))
    if not isinstance(parameter, DTensor):
        return Split(shape, own_shape, (), 1)
    axes, tp_of_rows, mesh = list[Axis](), 1, parameter.device_mesh
    for index, placement in enumerate(parameter.placements):
        if isinstance(placement, Replicate) or mesh.size(index) == 1:
            continue
        if type(placement) is not Shard:
            raise ValueError(f"Muon needs whole or sharded matrices, not {placement} of {tuple(parameter.shape)}")
        dim = placement.dim % parameter.ndim - (parameter.ndim - 2)
        if dim < 0:
            continue  # whole matrices
        if any(axis.dim == dim for axis in axes):
            raise ValueError(
                f"Muon does not gather a dimension that two mesh axes shard: {parameter.placements} of "
                f'{tuple(parameter.shape)}; take optim.kind = "fused_adamw"'
            )
        axes.append(Axis(mesh.get_group(index), mesh.size(index), dim, shape[dim]))
        if dim == 0 and (mesh.mesh_dim_names or ("",) * mesh.ndim)[index] == TENSOR_AXIS:
            tp_of_rows = mesh.size(index)
    return Split(shape, own_shape, tuple(axes), tp_of_rows)


def _last_two(tensor: Tensor) -> tuple[int, int]:
    return tensor.shape[-2], tensor.shape[-1]


def on_owners(x_nrc: Tensor, split: Split, compute: Callable[[Tensor], Tensor]) -> Tensor:
    """Compute on whole matrices, each on one rank. Collective over the ranks of all axes.

    Args:
        x_nrc: local shards of n matrices, as many and in the same order on every rank.
        compute: a stack of whole matrices [k, R, C] -> one of the same shape. Some may be padding, zero.

    Returns: the local shards of the results.
    """
    return _through(x_nrc, split.axes, compute)


def _through(x_nrc: Tensor, axes: tuple[Axis, ...], compute: Callable[[Tensor], Tensor]) -> Tensor:
    if not axes:
        return compute(x_nrc)
    axis, inner = axes[0], axes[1:]
    wide_knrc = _to_owners(x_nrc, axis)
    return _from_owners(_through(wide_knrc, inner, compute), axis, x_nrc.shape)


def _to_owners(x_nrc: Tensor, axis: Axis) -> Tensor:
    number, per_rank = len(x_nrc), -(-len(x_nrc) // axis.num_ranks)
    shape = [per_rank * axis.num_ranks, *x_nrc.shape[1:]]
    shape[1 + axis.dim] = axis.chunk
    sent = x_nrc.new_zeros(shape)
    sent[:number].narrow(1 + axis.dim, 0, x_nrc.shape[1 + axis.dim]).copy_(x_nrc)
    received = torch.empty_like(sent)
    dist.all_to_all_single(received, sent, group=axis.group)
    by_rank = received.unflatten(0, (axis.num_ranks, per_rank)).movedim(0, 1 + axis.dim)
    return by_rank.flatten(1 + axis.dim, 2 + axis.dim).narrow(1 + axis.dim, 0, axis.size)


def _from_owners(y_kRC: Tensor, axis: Axis, shape: torch.Size) -> Tensor:
    missing = axis.num_ranks * axis.chunk - axis.size
    if missing:
        y_kRC = torch.nn.functional.pad(y_kRC, (0, 0, 0, missing) if axis.dim == 0 else (0, missing))
    by_rank = y_kRC.unflatten(1 + axis.dim, (axis.num_ranks, axis.chunk)).movedim(1 + axis.dim, 0)
    sent = by_rank.flatten(0, 1).contiguous()
    received = torch.empty_like(sent)
    dist.all_to_all_single(received, sent, group=axis.group)
    return received[: shape[0]].narrow(1 + axis.dim, 0, shape[1 + axis.dim])
