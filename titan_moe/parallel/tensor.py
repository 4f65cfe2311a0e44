"""Tensor parallelism with sequence parallelism (arXiv:1909.08053, arXiv:2205.05198).

Heads, hidden widths of dense layers and shared experts, and the vocabulary are split over the ranks of `tp`. Between
layers each rank has a part of every sequence, so norms, routers and latent projections run on distinct tokens, and
tokens reach the dispatcher without another collective.

Parameters are DTensors on the axis, `Shard` or `Replicate`. Layers compute on their local tensors, which kernels take.
The gradient of a replicated parameter is a sum over the ranks of the axis, because each rank has other tokens, or other
heads. Autograd and FSDP2 accumulate and reduce the part of each rank, and `grads.ReplicatedGrads` sums the parts over
the axis once a step. If gradients were declared `Partial`, every reduction of FSDP would first all-reduce them one by
one, without overlap.

A fused weight (query, key and value; gate and up) is several matrices, of which each rank keeps its rows
(`parameters.local_chunks`).
"""

from collections.abc import Callable
from functools import cache, partial
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard

from titan_moe.adapters.low_rank import LowRank
from titan_moe.config.parallel import ParallelConfig
from titan_moe.dispatch.collectives import all_gather, reduce_scatter
from titan_moe.layers.attention import GroupedQueryAttention
from titan_moe.layers.experts import GroupedExperts
from titan_moe.layers.head import LanguageModelHead
from titan_moe.layers.mla import MultiHeadLatentAttention
from titan_moe.layers.mlp import MLP
from titan_moe.parallel.mesh import Meshes
from titan_moe.parallel.sequence import gather_output, gather_sequence, scatter_sequence
from titan_moe.parallel.tensor_overlap import gather_then_multiply, multiply_then_scatter
from titan_moe.parallel.vocabulary import VocabParallelEmbedding, VocabParallelHead
from titan_moe.parameters import TENSOR_AXIS

ROWS, COLUMNS = Shard(0), Shard(1)
Collective = Callable[[Tensor, dist.ProcessGroup], Tensor]


def apply(model: nn.Module, config: ParallelConfig, meshes: Meshes) -> None:
    """Split every layer but the routed experts, in place. Names and full shapes of parameters do not change."""
    if config.tp == 1:
        return
    mesh = meshes.dense[TENSOR_AXIS]
    group, readers = mesh.get_group(), dict[nn.Module, "_OwnRows | _Share"]()
    exchange = partial(_exchange_tokens, group, overlaps=config.tp_comm_overlap)
    for module in list(model.modules()):
        match module:
            case GroupedQueryAttention():
                readers[module.qkv] = of_rank = _split_heads(module, mesh)
                if (norm := module.qk_norm_rope.all_heads) is not None:
                    readers[norm] = of_rank._replace(rows=norm.widths, num_parts=of_rank.num_parts[:2])
                    norm.average = _MeanOfRanks(group)
                readers[module] = _own_heads(module, mesh)
                if module.gate is not None:
                    _split(module.gate, "weight", ROWS, mesh)
                _split(module.out, "weight", COLUMNS, mesh)
                if not config.tp_comm_overlap:  # which adds the bias to sums
                    readers[module.out] = _Share(mesh.size())
                exchange(module, module.qkv, module.out)
            case MultiHeadLatentAttention():
                for projection in (module.q_up, module.kv_up):
                    _split(projection, "weight", ROWS, mesh)
                _split(module.out, "weight", COLUMNS, mesh)
                # latents are narrower than the input: they are gathered behind their projections
                module.kv_down.register_forward_hook(partial(gather_output, group))
                exchange(module, module.q_up, module.out, gathers_in_first=True)
            case MLP():
                _split(module.gate_up, "weight", ROWS, mesh, module.fused_rows["gate_up.weight"])
                _split(module.down, "weight", COLUMNS, mesh)
                exchange(module, module.gate_up, module.down, is_sequence=False)
            case nn.Embedding():
                _split_vocabulary(model, module, mesh)
                num_words = module.num_embeddings // mesh.size()
                module.forward = VocabParallelEmbedding(module.forward, num_words, group)
            case LanguageModelHead():
                if not isinstance(module.weight, DTensor):  # the embedding's
                    _split_vocabulary(model, module, mesh)
                readers[module] = _OwnRows((module.out_features,), (mesh.size(),), mesh.get_local_rank(), mesh.size())
                module.forward = VocabParallelHead(module, group)  # type: ignore[assignment]
    for module in model.modules():
        if isinstance(adapter := getattr(module, "adapter", None), LowRank):
            _split_factors(module, adapter, mesh)
    for module in model.modules():
        if not isinstance(module, GroupedExperts):
            for name, parameter in module.named_parameters(recurse=False):
                if not isinstance(parameter, DTensor):
                    _register(module, name, parameter.data, parameter.requires_grad, mesh, Replicate())
            _read_local_tensors(module, readers.get(module))


def _split_vocabulary(model: nn.Module, module: nn.Module, mesh: DeviceMesh) -> None:
    """Split the rows of a weight over words, for all modules that share it."""
    tied = [other for other in model.modules() if other._parameters.get("weight") is module.weight]
    _split(module, "weight", ROWS, mesh)
    for other in tied:
        other.register_parameter("weight", module._parameters["weight"])


def _split_factors(linear: nn.Module, adapter: LowRank, mesh: DeviceMesh) -> None:
    """Split the adapter of a layer as its weight is: the rows of one factor, or the columns of the other. Every rank
    has the rest, and a part of its gradient."""
    weight = linear._parameters["weight"]
    if isinstance(weight, DTensor) and weight.placements == (ROWS,):
        _split(adapter, "B", ROWS, mesh, adapter.rows if len(adapter.rows) > 1 else ())
    elif isinstance(weight, DTensor) and weight.placements == (COLUMNS,):
        _split(adapter, "A", COLUMNS, mesh)


def _split_heads(attention: GroupedQueryAttention, mesh: DeviceMesh) -> "_OwnRows":
    """Split the projection by heads. With fewer key/value heads than ranks, some ranks share one, with other query
    heads: the weight is then on all ranks, each of which reads its rows."""
    rows, rope = attention.fused_rows["qkv.weight"], attention.qk_norm_rope
    num_parts = tuple(min(mesh.size(), size // attention.head_dim) for size in rows)
    if num_parts[1] == mesh.size():
        _split(attention.qkv, "weight", ROWS, mesh, rows)
    else:
        rope.heads_per_group = rows[0] // num_parts[0] // attention.head_dim + 2
    return _OwnRows(rows, num_parts, mesh.get_local_rank(), mesh.size())


def _own_heads(attention: GroupedQueryAttention, mesh: DeviceMesh) -> "_OwnRows":
    """This rank's of a number for each query head. The parameter is on all ranks, like the bias of a projection."""
    num_heads = attention.fused_rows["qkv.weight"][0] // attention.head_dim
    return _OwnRows((num_heads,), (mesh.size(),), mesh.get_local_rank(), mesh.size())


def _split(module: nn.Module, name: str, placement: Shard, mesh: DeviceMesh, rows: tuple[int, ...] = ()) -> None:
    """Keep this rank's part of a parameter: of every matrix of a fused weight, whose rows are given."""
    full, rank = module.get_parameter(name), mesh.get_local_rank()
    matrices = full.data.split(rows) if rows else [full.data]
    own = torch.cat([matrix.chunk(mesh.size(), placement.dim)[rank] for matrix in matrices])
    _register(module, name, own, full.requires_grad, mesh, placement)


def _register(
    module: nn.Module, name: str, own: Tensor, requires_grad: bool, mesh: DeviceMesh, placement: Placement
) -> None:
    sharded = DTensor.from_local(own, mesh, [placement], run_check=False)
    module.register_parameter(name, nn.Parameter(sharded, requires_grad=requires_grad))


class _OwnRows(NamedTuple):
    """This rank's rows of every matrix of a fused weight or bias that all ranks have."""

    rows: tuple[int, ...]
    num_parts: tuple[int, ...]  # of each matrix: a part is of one rank, or shared by several
    rank: int
    num_ranks: int

    def __call__(self, full: Tensor) -> Tensor:
        matrices = zip(full.split(self.rows), self.num_parts, strict=True)
        return torch.cat([matrix.chunk(parts)[self.rank * parts // self.num_ranks] for matrix, parts in matrices])


class _MeanOfRanks:
    """From the mean squares of own heads to those of all heads. Ranks have equally many heads, and where ranks share a
    head, equally many share each."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        self.group = group

    def __call__(self, own_BN2: Tensor) -> Tensor:
        return all_gather(own_BN2, self.group).unflatten(0, (self.group.size(), -1)).mean(0)


class _Share(NamedTuple):
    """This rank's share of a bias on summands: every rank adds one, to the tokens of all ranks."""

    num_ranks: int

    def __call__(self, whole: Tensor) -> Tensor:
        return whole / self.num_ranks


class _LocalTensor(NamedTuple):
    """How a module reads a parameter."""

    name: str
    own_part: _OwnRows | _Share | None

    def __call__(self, module: nn.Module) -> Any:
        """The local tensor of a parameter that FSDP has gathered; a sharded one, which FSDP alone reads, as it is.

        The bias of a fused layer is replicated too: FSDP would shard its only dimension again.
        """
        parameter: Any = module._parameters[self.name]
        if parameter.device_mesh.ndim > 1:
            return parameter
        tensor = parameter.to_local()
        is_whole = parameter.placements[0].is_replicate()
        return self.own_part(tensor) if self.own_part is not None and is_whole else tensor


def _read_local_tensors(module: nn.Module, own_part: _OwnRows | _Share | None) -> None:
    """Let `module.weight` be the local tensor. The parameter stays a DTensor for FSDP, optimizer and checkpoints."""
    readers = tuple(_LocalTensor(name, own_part) for name, _ in module.named_parameters(recurse=False))
    if readers:
        module_class: Any = type(module)
        module.__class__ = _reading_local_tensors(module_class, readers)


@cache
def _reading_local_tensors(module_class: type[nn.Module], readers: tuple[_LocalTensor, ...]) -> type[nn.Module]:
    """The class with a property for each parameter; one for all layers, or each would be compiled apart."""
    properties: dict[str, Any] = {}
    for reader in readers:
        read: Any = reader
        properties[reader.name] = property(read)
    return type(module_class.__name__, (module_class,), properties)


def _exchange_tokens(
    group: dist.ProcessGroup,
    layer: nn.Module,
    first: nn.Linear,
    last: nn.Linear,
    *,
    overlaps: bool,
    gathers_in_first: bool = False,
    is_sequence: bool = True,
) -> None:
    """Let the projections of a layer see the tokens of all ranks, and the layer return the sums of own tokens.

    With `overlaps` its first and last projection exchange them while they multiply; else hooks do, before the layer,
    or before its first projection alone (`gathers_in_first`), and behind the layer. Without `is_sequence` the order of
    tokens does not matter to it.
    """
    if overlaps:
        gather_then_multiply(first, group, is_sequence=is_sequence)
        multiply_then_scatter(last, group, is_sequence=is_sequence)
        return
    gather, scatter = (gather_sequence, scatter_sequence) if is_sequence else (all_gather, reduce_scatter)
    reader = first if gathers_in_first else layer
    reader.register_forward_pre_hook(partial(_gather_input, gather, group))
    layer.register_forward_hook(partial(_scatter_output, scatter, group))


def _gather_input(gather: Collective, group: dist.ProcessGroup, _: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...]:
    return gather(args[0], group), *args[1:]


def _scatter_output(scatter: Collective, group: dist.ProcessGroup, _: nn.Module, __: Any, out: Tensor) -> Tensor:
    return scatter(out, group)
