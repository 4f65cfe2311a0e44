"""Expert parallelism: a rank keeps its share of every layer's experts, and a dispatcher moves the rows."""

from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Shard

from titan_moe.config.parallel import ParallelConfig
from titan_moe.dispatch import AllGatherDispatcher, AllToAllDispatcher, LocalDispatcher, TokenDispatcher
from titan_moe.dispatch.async_collectives import ASYNC
from titan_moe.dispatch.capacity import ExpertCapacity
from titan_moe.dispatch.clone_weights import CollectiveCloneWeights, SymmMemCloneWeights
from titan_moe.dispatch.cloning import CloningDispatcher
from titan_moe.dispatch.collectives import SYNC
from titan_moe.dispatch.symm_mem import SymmMemDispatcher, SymmMemory
from titan_moe.dispatch.symm_mem_fused import SymmMemFusedDispatcher
from titan_moe.layers.experts import GroupedExperts
from titan_moe.layers.moe import MoE
from titan_moe.parallel.mesh import Meshes

COLLECTIVES = {"none": SYNC, "microbatch": ASYNC}
"""The recipe's `parallel.overlap` -> how messages travel."""


def apply(
    model: nn.Module, config: ParallelConfig, meshes: Meshes, capacity: ExpertCapacity, memory: SymmMemory | None = None
) -> None:
    """Spread the experts of every MoE layer over the ep ranks, as `Shard(0)` DTensors, and set its dispatcher.

    The new dispatcher lays out slots as the one before it did. All layers share one `bound` of slots, and so one flag
    that says whether any of them overflowed; with `symm_mem` they share the `memory` of the ep group too.
    """
    for module in model.modules():
        if isinstance(module, MoE):
            module.dispatcher = _dispatcher(module, config, meshes, capacity, memory)
            if config.ep > 1:
                _shard(module.experts, meshes)
            if config.expert_clones:
                _add_clones(module, config.expert_clones, meshes, memory)


def _dispatcher(
    moe: MoE, config: ParallelConfig, meshes: Meshes, capacity: ExpertCapacity, memory: SymmMemory | None
) -> TokenDispatcher:
    num_chosen_from, permute = moe.router.weight.shape[0], moe.dispatcher.permute
    num_experts = num_chosen_from + config.ep * config.expert_clones
    match config.dispatcher:
        case "local":
            return LocalDispatcher(num_experts, permute)
        case "symm_mem":
            assert memory is not None, "symm_mem needs what parallel.symm_memory.share_memory opens"
            kind = SymmMemFusedDispatcher if config.overlap == "tile" else SymmMemDispatcher
            return kind(num_experts, memory, permute, capacity, num_chosen_from)
        case "allgather":
            return AllGatherDispatcher(
                num_experts, meshes.ep.get_group(), permute, capacity, COLLECTIVES[config.overlap]
            )
        case "alltoall":
            return AllToAllDispatcher(num_experts, meshes.ep.get_group(), permute, COLLECTIVES[config.overlap])


def _add_clones(moe: MoE, num_replicas: int, meshes: Meshes, memory: SymmMemory | None) -> None:
    """Fill the spare slots that the dispatcher counts with clones of hot experts, out of shared memory if any."""
    group = meshes.ep.get_group()
    moe.dispatcher = CloningDispatcher(moe.dispatcher, moe.router.weight.shape[0], num_replicas, group)
    moe.experts.gather_weights = CollectiveCloneWeights(group) if memory is None else SymmMemCloneWeights(memory)


def _shard(experts: GroupedExperts, meshes: Meshes) -> None:
    size, rank = meshes.ep.size(), meshes.ep.get_local_rank()
    for name, full in list(experts.named_parameters(recurse=False)):
        local = full.data.chunk(size)[rank].clone()
        sharded = DTensor.from_local(local, meshes.ep, [Shard(0)], run_check=False)
        experts.register_parameter(name, nn.Parameter(sharded, requires_grad=full.requires_grad))
    experts.local = _to_local


def _to_local(weight: Tensor) -> Tensor:
    assert isinstance(weight, DTensor)
    return weight.to_local()
