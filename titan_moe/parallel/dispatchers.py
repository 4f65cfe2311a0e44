"""Builders of dispatchers: from a name in the recipe to the object in `moe.dispatcher`."""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch.distributed as dist

from titan_moe.config.dispatchers import (
    ALLGATHER,
    ALLTOALL,
    DISPATCHERS,
    HIERARCHICAL,
    HIERARCHICAL_SYMM_MEM,
    LOCAL,
    SYMM_MEM,
    DispatcherFacts,
    facts_of,
)
from titan_moe.dispatch import AllGatherDispatcher, AllToAllDispatcher, LocalDispatcher, TokenDispatcher
from titan_moe.dispatch.async_collectives import ASYNC
from titan_moe.dispatch.capacity import ExpertCapacity
from titan_moe.dispatch.collectives import SYNC
from titan_moe.dispatch.hierarchical import HierarchicalDispatcher, NodeGroups
from titan_moe.dispatch.symm_mem.dispatcher import SymmMemDispatcher
from titan_moe.dispatch.symm_mem.fused import SymmMemFusedDispatcher
from titan_moe.dispatch.symm_mem.memory import SymmMemory
from titan_moe.kernels.experts.formats import COMPUTE
from titan_moe.kernels.permute.permutation import Permute

COLLECTIVES = {"none": SYNC, "microbatch": ASYNC}
"""`parallel.overlap` -> the collectives of a dispatcher."""


class DispatcherInputs(NamedTuple):
    """What a layer's dispatcher is built from."""

    num_experts: int  # on all ranks, replica slots included; a rank holds an equal share, in rank order
    num_routed_experts: int  # without replica slots: what the router chooses from
    group: dist.ProcessGroup  # the ep group
    permute: Permute  # sorts received assignments by expert
    capacity: ExpertCapacity  # of all layers together, for a dispatcher that can be bounded
    overlap: str = "none"  # `parallel.overlap`; "tile" needs fused experts, as an arena does
    memory: SymmMemory | None = None  # for a dispatcher that shares memory
    node_groups: NodeGroups | None = None  # of the ep group, for a dispatcher that sends rows once a node
    row_format: str = COMPUTE  # how rows are sent (`ExpertFormat.pack`), for a dispatcher that can pack them


Builder = Callable[[DispatcherInputs], TokenDispatcher]


def _local(inputs: DispatcherInputs) -> TokenDispatcher:
    return LocalDispatcher(inputs.num_experts, inputs.permute)


def _allgather(inputs: DispatcherInputs) -> TokenDispatcher:
    collectives = COLLECTIVES[inputs.overlap]
    return AllGatherDispatcher(inputs.num_experts, inputs.group, inputs.permute, inputs.capacity, collectives)


def _alltoall(inputs: DispatcherInputs) -> TokenDispatcher:
    collectives = COLLECTIVES[inputs.overlap]
    return AllToAllDispatcher(inputs.num_experts, inputs.group, inputs.permute, collectives, inputs.row_format)


def _hierarchical(inputs: DispatcherInputs, **shared: Any) -> TokenDispatcher:
    assert inputs.node_groups is not None, "parallel.expert opens them"
    of = inputs.num_experts, inputs.node_groups, inputs.permute, COLLECTIVES[inputs.overlap], inputs.row_format
    return HierarchicalDispatcher(*of, **shared)


def _hierarchical_symm_mem(inputs: DispatcherInputs) -> TokenDispatcher:
    assert inputs.memory is not None, "parallel.symm_memory opens it"
    memory, capacity, num_routed_experts = inputs.memory, inputs.capacity, inputs.num_routed_experts
    return _hierarchical(inputs, memory=memory, capacity=capacity, num_routed_experts=num_routed_experts)


def _symm_mem(inputs: DispatcherInputs) -> TokenDispatcher:
    assert inputs.memory is not None, "parallel.symm_memory opens it"
    of = inputs.num_experts, inputs.memory, inputs.permute, inputs.capacity, inputs.num_routed_experts
    if inputs.capacity.arena is None and inputs.overlap != "tile":
        return SymmMemDispatcher(*of, row_format=inputs.row_format)
    return SymmMemFusedDispatcher(*of, row_format=inputs.row_format, overlaps=inputs.overlap == "tile")


BUILDERS: dict[str, Builder] = {
    LOCAL.name: _local,
    ALLGATHER.name: _allgather,
    ALLTOALL.name: _alltoall,
    HIERARCHICAL.name: _hierarchical,
    HIERARCHICAL_SYMM_MEM.name: _hierarchical_symm_mem,
    SYMM_MEM.name: _symm_mem,
}
"""A builder for each row of config/dispatchers.py."""


def build_dispatcher(name: str, inputs: DispatcherInputs) -> TokenDispatcher:
    """Build the dispatcher of a layer.

    Raises: ValueError for a name that is not in the table.
    """
    return BUILDERS[facts_of(name).name](inputs)


def register_dispatcher(facts: DispatcherFacts, build: Builder) -> None:
    """Add a dispatcher that recipes may name, and its facts, which rules, plan and compile read.

    Call it when the dispatcher's module is imported, in every process, before the recipe is read. The class should
    have its row as `facts`, too.

    Raises: ValueError if the name is taken.
    """
    if facts.name in DISPATCHERS:
        raise ValueError(f'a dispatcher "{facts.name}" is registered already; take another name')
    DISPATCHERS[facts.name], BUILDERS[facts.name] = facts, build
