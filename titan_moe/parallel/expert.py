"""Expert parallelism: the experts of every layer are sharded over ranks; a dispatcher sends rows to them.

With expert tensor parallelism (etp) a rank has a part of the hidden width F of each of its experts.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.placement_types import Placement

from titan_moe.config.dispatchers import LOCAL, dispatchers_that, facts_of
from titan_moe.config.parallel import ParallelConfig, ep_ranks_of_a_node
from titan_moe.dispatch.capacity import ExpertCapacity
from titan_moe.dispatch.clones.dispatcher import CloningDispatcher
from titan_moe.dispatch.clones.optional import OptionalClonesDispatcher, ReplicaSlots
from titan_moe.dispatch.clones.weights import CollectiveCloneWeights, SymmMemCloneWeights
from titan_moe.dispatch.expert_tensor import ExpertTensorDispatcher
from titan_moe.dispatch.hierarchical import NodeGroups, open_node_groups
from titan_moe.dispatch.local import LocalDispatcher
from titan_moe.dispatch.symm_mem.memory import SymmMemory
from titan_moe.kernels.experts.fused_mlp import format_of
from titan_moe.kernels.experts.weights import EachWeight, ExpertUse
from titan_moe.layers.experts import GroupedExperts
from titan_moe.layers.moe import MoE
from titan_moe.parallel.dispatchers import DispatcherInputs, build_dispatcher
from titan_moe.parallel.mesh import Meshes
from titan_moe.parameters import local


def apply(
    model: nn.Module,
    config: ParallelConfig,
    meshes: Meshes,
    capacity: ExpertCapacity,
    memory: SymmMemory | None = None,
    nodes: NodeGroups | None = None,
    replicas: ReplicaSlots | None = None,
) -> None:
    """Shard the experts of every MoE layer over the ranks of ep, and F over those of etp, as DTensors, and set its
    dispatcher.

    The new dispatcher keeps the permute of the one that it replaces; with "local" each layer keeps its own. With etp it
    is wrapped in an `ExpertTensorDispatcher`. All layers share one `capacity`, with one flag for overflow in any of
    them, the `replicas` if they have replica slots, and the `memory` of the ep group if the dispatcher shares memory,
    or of the node if it has two levels, as `nodes` from `open_nodes` says.
    """
    replicas = replicas or ReplicaSlots()
    for module in model.modules():
        if isinstance(module, MoE):
            if config.dispatcher != LOCAL.name:
                _set_dispatcher(module, config, meshes.ep.get_group(), capacity, memory, nodes, replicas)
            if config.etp > 1:
                module.dispatcher = ExpertTensorDispatcher(module.dispatcher, meshes.etp.get_group())
                module.experts.transforms["share"] = ShareOfBias(config.etp)
            if config.ep * config.etp > 1:
                _shard(module.experts, meshes.expert_shares)


def apply_expert_parallel(
    model: nn.Module,
    ranks: DeviceMesh | dist.ProcessGroup,
    dispatcher: str = "alltoall",
    *,
    capacity: ExpertCapacity | None = None,
    memory: SymmMemory | None = None,
    ranks_per_node: int = 0,
    gradients: Literal["mean", "sum"] = "mean",
) -> None:
    """Shard the experts of every MoE layer in a model of your own over ranks, as `Shard(0)` DTensors.

    Expert gradients need no reduction: they come from the tokens of all ranks. Reduce the gradients of all other
    parameters as before, and leave experts out of it: with `ignored_params` of FSDP2, over the same mesh, or gradients
    cannot be clipped together; with `_set_params_and_buffers_to_ignore_for_model` of DDP.

    Args:
        model: a `MoE` layer, or a module that contains some. All ranks have the same weights; each keeps its part.
        ranks: a mesh of one axis, or a process group. Each rank holds an equal share of the experts, in rank order.
        dispatcher: a value of `parallel.dispatcher`, registered ones too. "alltoall" and "hierarchical" take any number
            of tokens on a rank; the others need the same number on all ranks, in every forward.
        capacity: a bound on slots, for a dispatcher that can be bounded; the worst case without it.
        memory: from `open_symm_memory`, for a dispatcher that shares memory; with two levels of links it is that of
            this node's ranks, for the tokens of all nodes.
        ranks_per_node: consecutive ranks on one node, for a dispatcher that sends rows once a node; as many as torchrun
            starts there without it.
        gradients: how those of other parameters are reduced over ranks, so that experts have the same scale: their mean
            (DDP, FSDP2; each rank's loss is a mean over its tokens), or their sum.

    Raises: ValueError with all problems and their ways out.
    """
    layers = [module for module in model.modules() if isinstance(module, MoE)]
    mesh = _mesh_of(ranks, layers)
    config = ParallelConfig(ep=mesh.size(), dispatcher=dispatcher, ep_ranks_per_node=ranks_per_node)
    problems = dict.fromkeys(_problems(layers, mesh, config, capacity, memory))
    if gradients not in ("mean", "sum"):
        problems[f'gradients = "{gradients}" is neither "mean" nor "sum"; name how the others are reduced'] = None
    if problems:
        raise ValueError("\n".join(problems))
    nodes, capacity = open_nodes(config, mesh.get_group()), capacity or ExpertCapacity()
    for moe in layers:
        _set_dispatcher(moe, config, mesh.get_group(), capacity, memory, nodes, ReplicaSlots())
        _shard(moe.experts, mesh)
        if gradients == "mean":
            moe.experts.transforms["local"] = EachWeight(partial(_local_with_mean_gradient, num_ranks=mesh.size()))


def has_own_dispatcher(moe: MoE) -> bool:
    """Whether a layer's dispatcher was replaced since the layer was built."""
    return type(moe.dispatcher) is not LocalDispatcher


def _local_with_mean_gradient(weight: Tensor, num_ranks: int) -> Tensor:
    """The local experts, with the mean over ranks of their gradients."""
    return _DivideGradient.apply(local(weight), num_ranks)


class _DivideGradient(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, weight: Tensor, divisor: int) -> Tensor:
        ctx.divisor = divisor
        return weight.view_as(weight)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return grad / ctx.divisor, None


@dataclass(frozen=True)
class ShareOfBias:
    """The transform of experts of which ranks have parts of F: their results are added up, so each adds its share of
    the down bias."""

    num_ranks: int

    def __call__(self, use: ExpertUse) -> ExpertUse:
        bias = use.weights.down_bias
        if bias is None:
            return use
        share = bias.map(lambda whole: _ShareOfSum.apply(whole, self.num_ranks))
        return use._replace(weights=use.weights._replace(down_bias=share))


class _ShareOfSum(torch.autograd.Function):
    """A summand, for as many ranks to add up to the whole. Every rank has the gradient of the sum, and so that of the
    whole: it is not divided, and not reduced over ranks."""

    @staticmethod
    def forward(ctx: Any, whole: Tensor, num_ranks: int) -> Tensor:
        return whole / num_ranks

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return grad, None


def _mesh_of(ranks: DeviceMesh | dist.ProcessGroup, layers: list[MoE]) -> DeviceMesh:
    """The mesh of a group, on the device of the experts.

    Raises: ValueError if they are on the meta device, or on several, or if there is no group yet.
    """
    if isinstance(ranks, DeviceMesh):
        return ranks
    if not isinstance(ranks, dist.ProcessGroup):  # dist.group.WORLD is None before
        raise ValueError(
            f"ranks = {ranks!r} is neither a DeviceMesh nor a process group; call "
            "torch.distributed.init_process_group first, and give torch.distributed.group.WORLD"
        )
    devices = {weight.device.type for moe in layers for weight in moe.experts.parameters()} or {"cpu"}
    if len(devices) > 1 or "meta" in devices:
        found = ", ".join(sorted(devices))
        raise ValueError(f"a process group has no device, and the experts are on {found}; give a DeviceMesh")
    return DeviceMesh.from_group(ranks, devices.pop(), mesh_dim_names=("ep",))


def _problems(
    layers: list[MoE],
    mesh: DeviceMesh,
    config: ParallelConfig,
    capacity: ExpertCapacity | None,
    memory: SymmMemory | None,
) -> Iterator[str]:
    """Why these experts cannot be sharded over this mesh, with ways out."""
    if not layers:
        yield "the model has no titan_moe.MoE layer, so it has no experts to shard; use MoE as its feed-forward layer"
    if mesh.ndim != 1:
        yield f'the mesh has {mesh.ndim} axes, and experts are sharded over one; take a slice of it, such as mesh["ep"]'
    name, facts, num_ranks = config.dispatcher, facts_of(config.dispatcher), mesh.size()
    if num_ranks > 1 and not facts.moves_rows:
        movers = dispatchers_that(lambda facts: facts.moves_rows)
        yield f'dispatcher = "{name}" sends no rows, and there are {num_ranks} ranks; take {movers}'
    of_node = ep_ranks_of_a_node(config, num_ranks)
    has_nodes = 1 < of_node < num_ranks and num_ranks % of_node == 0
    if facts.needs_cuda and mesh.device_type != "cuda":
        others = dispatchers_that(
            lambda facts: facts.moves_rows and not facts.needs_cuda and (has_nodes or not facts.has_two_levels)
        )
        yield f'dispatcher = "{name}" needs CUDA, and the experts are on {mesh.device_type}; take {others}'
    if facts.shares_memory and memory is None:
        yield f'dispatcher = "{name}" shares memory; give it memory = open_symm_memory(symm_bytes(...), group, device)'
    if facts.has_two_levels and not has_nodes:
        sizes = ", ".join(str(size) for size in range(2, num_ranks) if num_ranks % size == 0)
        yield (
            f'dispatcher = "{name}" needs several nodes of as many ranks, and ranks_per_node = {of_node} of '
            f'{num_ranks} ranks; take {f"{sizes}, or " if sizes else ""}dispatcher = "alltoall"'
        )
    if capacity is not None and not facts.can_be_bounded:
        bounded = dispatchers_that(lambda facts: facts.can_be_bounded)
        yield f'dispatcher = "{name}" has exact sizes, which no capacity bounds; leave it out, or take {bounded}'
    for moe in layers:
        if has_own_dispatcher(moe) and not isinstance(moe.experts.down, DTensor):
            own = type(moe.dispatcher).__name__
            yield f'dispatcher = "{name}" would replace {own} in moe.dispatcher; set your own after this call'
        for weight in moe.experts.parameters(recurse=False):
            if isinstance(weight, DTensor):
                yield "the experts are sharded already; call apply_expert_parallel once, and before FSDP"
            elif len(weight) % num_ranks:
                yield f"{len(weight)} experts do not divide by {num_ranks} ranks; take a divisor of {len(weight)} ranks"


def open_nodes(config: ParallelConfig, group: dist.ProcessGroup) -> NodeGroups | None:
    """The groups of the two levels of links, if the dispatcher has them: once for all layers."""
    if not config.facts.has_two_levels:
        return None
    return open_node_groups(group, ep_ranks_of_a_node(config, dist.get_world_size()))


def _set_dispatcher(
    moe: MoE,
    config: ParallelConfig,
    group: dist.ProcessGroup,
    capacity: ExpertCapacity,
    memory: SymmMemory | None,
    nodes: NodeGroups | None,
    replicas: ReplicaSlots,
) -> None:
    """Set the dispatcher of a layer: with replica slots one that clones experts while they are used."""
    num_experts = len(moe.experts.down)
    of_layer = (num_experts, num_experts, group, moe.dispatcher.permute)
    inputs = DispatcherInputs(*of_layer, capacity, config.overlap, memory, nodes, format_of(moe.experts.mlp).name)
    padding = moe.dispatcher.padding
    moe.dispatcher = plain = build_dispatcher(config.dispatcher, inputs)
    plain.padding = padding
    if replicas.number:
        num_slots = num_experts + config.ep * replicas.number
        inner = build_dispatcher(config.dispatcher, inputs._replace(num_experts=num_slots))
        memory = memory if config.facts.shares_memory_of_ep else None  # or clones would be of this node alone
        cloning = CloningDispatcher(inner, num_experts, replicas.number, group, memory, replicas.cost)
        weights = CollectiveCloneWeights(group) if memory is None else SymmMemCloneWeights(memory)
        moe.dispatcher = OptionalClonesDispatcher(plain, cloning, replicas)
        moe.experts.transforms["clones"] = weights


def _shard(experts: GroupedExperts, mesh: DeviceMesh) -> None:
    """Keep this rank's part of the parameters: the first axis of the mesh shares the experts out, a second one F."""
    for name, full in list(experts.named_parameters(recurse=False)):
        placements = [Shard(0)] if mesh.ndim == 1 else [Shard(0), _placement_on_etp(experts, name)]
        own = full.data
        for axis, placement in enumerate(placements):
            if isinstance(placement, Shard):
                own = own.chunk(mesh.size(axis), placement.dim)[mesh.get_local_rank(axis)]
        sharded = DTensor.from_local(
            own.clone(memory_format=torch.contiguous_format), mesh, placements, run_check=False
        )
        experts.register_parameter(name, nn.Parameter(sharded, requires_grad=full.requires_grad))
    experts.transforms["local"] = EachWeight(local)


def _placement_on_etp(experts: GroupedExperts, name: str) -> Placement:
    """Split F. The down bias has none: every rank has it, and its whole gradient (layers/experts.py). Some factors of
    adapters have none either, and every rank has a part of their gradients: `grads.ReplicatedGrads` sums them.

    Raises: ValueError for another parameter without F.
    """
    dims = experts.parameter_dims.get(name, "")
    if "F" not in dims and name != "down_bias" and name not in experts.factor_dims:
        raise ValueError(
            f"{type(experts).__name__}.{name} has no hidden width to split over parallel.etp; declare it in "
            "parameter_dims, with F for the hidden width, or take parallel.etp = 1"
        )
    return Shard(dims.index("F")) if "F" in dims else Replicate()
