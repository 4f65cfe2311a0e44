"""The kinds of parameters, their local shards and their seeds.

The classes of the modules that own parameters declare kinds. Initialisation, weight decay and sharding treat a bias of
experts, [e, D], differently from a matrix of that shape. A parameter cannot carry its kind, because parallelism
replaces it by a DTensor.
"""

import hashlib
from collections import Counter
from collections.abc import Iterator, Mapping
from enum import Enum, auto
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

TENSOR_AXIS = "tp"
"""The mesh axis of tensor parallelism."""
SCALES = "_scales"
"""Behind the name of a frozen weight that is stored as codes, the name of its scales."""
DTYPE_OF_NUMBERS = "dtype_of_numbers"
"""Name of the attribute of a module with codes that says the dtype of their numbers in a product."""


class ParameterKind(Enum):
    """The role of a parameter in its module."""

    MATRIX = auto()
    EXPERT_MATRIX = auto()  # a matrix for each expert, the first dimension
    ROUTER = auto()
    EMBEDDING = auto()
    HEAD = auto()
    SCALE = auto()  # of a norm
    BIAS = auto()
    FACTOR_IN = auto()  # of an adapter, the low-rank factor that reads the input
    EXPERT_FACTOR_IN = auto()  # one for each expert
    FACTOR_OUT = auto()
    SCALES_OF_CODES = auto()  # of a frozen weight

    @property
    def is_matrix(self) -> bool:
        """Whether it is a linear map or a table of vectors."""
        return self not in (ParameterKind.SCALE, ParameterKind.BIAS, ParameterKind.SCALES_OF_CODES)

    @property
    def is_factor(self) -> bool:
        """Whether it belongs to an adapter."""
        return self in (ParameterKind.FACTOR_IN, ParameterKind.EXPERT_FACTOR_IN, ParameterKind.FACTOR_OUT)


TORCH_KINDS: dict[type[nn.Module], Mapping[str, ParameterKind]] = {
    nn.Linear: {"weight": ParameterKind.MATRIX, "bias": ParameterKind.BIAS},
    nn.Embedding: {"weight": ParameterKind.EMBEDDING},
    nn.RMSNorm: {"weight": ParameterKind.SCALE},
    nn.LayerNorm: {"weight": ParameterKind.SCALE, "bias": ParameterKind.BIAS},
}
"""Declarations for modules of torch."""


def kind_of(owner: nn.Module, attribute: str) -> ParameterKind:
    """Look up a parameter in `parameter_kinds` of its owner's class, or of the nearest base class that has it.

    An undeclared parameter is a bias if its name ends in "bias", else a matrix from two dimensions on, else a scale.
    """
    for owner_class in type(owner).__mro__:
        kinds = vars(owner_class).get("parameter_kinds") or TORCH_KINDS.get(owner_class, {})
        if attribute in kinds:
            return kinds[attribute]
    if attribute.endswith("bias"):
        return ParameterKind.BIAS
    return ParameterKind.MATRIX if owner.get_parameter(attribute).ndim >= 2 else ParameterKind.SCALE


def named_kinds(model: nn.Module) -> Iterator[tuple[str, nn.Parameter, ParameterKind]]:
    """Name, parameter and kind of each parameter of a model, once, by its first owner."""
    for name, parameter in model.named_parameters():
        owner, _, attribute = name.rpartition(".")
        yield name, parameter, kind_of(model.get_submodule(owner), attribute)


def untied_embeddings(model: nn.Module) -> set[str]:
    """Names of the embeddings that are the weight of one module only."""
    num_owners = Counter(id(parameter) for _, parameter in model.named_parameters(remove_duplicate=False))
    return {
        name
        for name, parameter, kind in named_kinds(model)
        if kind is ParameterKind.EMBEDDING and num_owners[id(parameter)] == 1
    }


def residual_ends(model: nn.Module) -> set[str]:
    """Names of the parameters that end a residual branch, from the modules' `residual_ends` (relative names). Modules
    that are absent may be among them."""
    return {
        f"{name}.{end}" if name else end
        for name, module in model.named_modules()
        for end in getattr(module, "residual_ends", ())
    }


class Factors(NamedTuple):
    """The adapter of a weight: scale · B A is added to it, of each matrix of a fused weight."""

    a: str  # names
    b: str
    rows: tuple[int, ...]  # of each matrix, one below the other; empty where matrices are dimensions of a tensor
    scale: float

    def delta(self, a: Tensor, b: Tensor) -> Tensor:
        """What is added to the weight, in fp32 or wider."""
        wide = torch.promote_types(a.dtype, torch.float32)
        a, b = a.to(wide), b.to(wide)
        if len(self.rows) < 2:
            return (b @ a) * self.scale
        of_each = zip(b.split(self.rows), a.chunk(len(self.rows)), strict=True)
        return torch.cat([b_of_one @ a_of_one for b_of_one, a_of_one in of_each]) * self.scale


def names_of_codes(model: nn.Module) -> set[str]:
    """The names of the weights that are stored as codes, from the modules' `has_codes` (relative names)."""
    return {
        f"{name}.{weight}" if name else weight
        for name, module in model.named_modules()
        for weight in getattr(module, "has_codes", ())
    }


def factors_of(model: nn.Module) -> dict[str, Factors]:
    """The adapters of weights by the names of these, from the modules' `low_rank` (relative names)."""
    return {
        f"{name}.{weight}": factors._replace(a=f"{name}.{factors.a}", b=f"{name}.{factors.b}")
        for name, module in model.named_modules()
        for weight, factors in getattr(module, "low_rank", {}).items()
    }


def local(tensor: Tensor) -> Tensor:
    """The local shard of a DTensor, or the tensor itself."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def give_remainder(parameter: Tensor, remainder: Tensor) -> None:
    """Split the master of a bf16 parameter: these int16 numbers are what it lacks (kernels/optim/split_master.py). They
    are no state of the optimizer: who reads or sets the master needs both parts."""
    vars(parameter)["remainder"] = remainder


def remainder_of(parameter: Tensor) -> Tensor | None:
    """The second part of a split master; None for any other parameter."""
    remainder: Tensor | None = vars(parameter).get("remainder")
    return remainder


def shard_offsets(tensor: Tensor) -> tuple[int, ...]:
    """Offsets of the local shard of a DTensor in the full tensor; empty for any other tensor."""
    if not isinstance(tensor, DTensor):
        return ()
    return tuple(compute_local_shape_and_global_offset(tensor.shape, tensor.device_mesh, tensor.placements)[1])


def seed_of(key: str) -> int:
    """63 bits from a key, such as the run's seed and a parameter's name: the seed of a generator of its own."""
    return int.from_bytes(hashlib.sha256(key.encode()).digest()[:8], "big") >> 1


def fused_rows(model: nn.Module) -> dict[str, tuple[int, ...]]:
    """Names of the weights that are several matrices, one below the other, with the rows of each, from the modules'
    `fused_rows` (relative names)."""
    return {
        f"{name}.{weight}" if name else weight: rows
        for name, module in model.named_modules()
        for weight, rows in getattr(module, "fused_rows", {}).items()
    }


class Chunk(NamedTuple):
    """A part of a local shard that is one slice of the full tensor."""

    values: Tensor  # a view of the shard
    offsets: tuple[int, ...]  # of the slice in the full tensor


def local_chunks(tensor: Tensor, rows: tuple[int, ...]) -> list[Chunk]:
    """Cut the local shard into slices of the full tensor.

    A tensor-parallel rank keeps its rows of every matrix of a fused weight, one below the other, so that one GEMM reads
    them. `rows` are those of each matrix, from `fused_rows`. Such a DTensor has its rows in the order of the ranks:
    `full_tensor` restores that of the model.
    """
    values, offsets = local(tensor), shard_offsets(tensor) or (0,) * tensor.ndim
    num_ranks = _num_row_ranks(tensor)
    if num_ranks == 1 or not rows:
        return [Chunk(values, offsets)]
    rank, chunks, begin = offsets[0] * num_ranks // tensor.shape[0], [], 0
    for part, size in zip(values.split([size // num_ranks for size in rows]), rows, strict=True):
        chunks.append(Chunk(part, (begin + rank * len(part), *offsets[1:])))
        begin += size
    return chunks


def full_tensor(tensor: Tensor, rows: tuple[int, ...] = ()) -> Tensor:
    """The tensor of all ranks, with the rows of a fused weight in the order of the model. Collective."""
    if not isinstance(tensor, DTensor):
        return tensor
    full, num_ranks = tensor.full_tensor(), _num_row_ranks(tensor)
    if num_ranks == 1 or not rows:
        return full
    by_rank = [shard.split([size // num_ranks for size in rows]) for shard in full.chunk(num_ranks)]
    return torch.cat([part for matrix in zip(*by_rank, strict=True) for part in matrix])


def _num_row_ranks(tensor: Tensor) -> int:
    """The number of tensor-parallel ranks that the rows are split over."""
    if not isinstance(tensor, DTensor) or TENSOR_AXIS not in (tensor.device_mesh.mesh_dim_names or ()):
        return 1
    axis = (tensor.device_mesh.mesh_dim_names or ()).index(TENSOR_AXIS)
    return tensor.device_mesh.size(axis) if tensor.placements[axis] == Shard(0) else 1
