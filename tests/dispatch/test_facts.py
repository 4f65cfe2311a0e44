"""The facts of config/dispatchers.py hold for the dispatchers."""

import pytest
import torch
import torch.distributed as dist
from torch._subclasses.fake_tensor import DataDependentOutputException, FakeTensorMode

from titan_moe.config.dispatchers import DISPATCHERS
from titan_moe.dispatch import (
    AllGatherDispatcher,
    AllToAllDispatcher,
    HierarchicalDispatcher,
    LocalDispatcher,
    TokenDispatcher,
)
from titan_moe.dispatch.hierarchical import NodeGroups
from titan_moe.dispatch.symm_mem.dispatcher import SymmMemDispatcher
from titan_moe.dispatch.symm_mem.memory import SymmMemory

NUM_EXPERTS, NUM_TOKENS, TOP_K, WIDTH = 8, 12, 3, 16


def fake_memory(num_ranks: int) -> SymmMemory:
    return SymmMemory(torch.empty(1, dtype=torch.uint8), torch.empty(num_ranks, dtype=torch.int64), 0)


def build(name: str) -> TokenDispatcher:
    num_ranks = dist.get_world_size()
    match name:
        case "local":
            return LocalDispatcher(NUM_EXPERTS)
        case "allgather":
            return AllGatherDispatcher(NUM_EXPERTS, dist.group.WORLD)
        case "alltoall":
            return AllToAllDispatcher(NUM_EXPERTS, dist.group.WORLD)
        case "hierarchical" | "hierarchical_symm_mem":
            nodes = NodeGroups(dist.group.WORLD, dist.new_group([dist.get_rank()]))
            memory = fake_memory(1) if name == "hierarchical_symm_mem" else None
            return HierarchicalDispatcher(NUM_EXPERTS, nodes, memory=memory)
        case "symm_mem":
            return SymmMemDispatcher(NUM_EXPERTS, fake_memory(num_ranks))
    raise AssertionError(f"build {name} here")


def describe(name: str) -> tuple[str, bool, int]:
    """Name of its row; whether it reads a size on the host, which fake tensors refuse; number of received rows."""
    with FakeTensorMode():
        dispatcher = build(name)
        x_TD, scores_TK = torch.empty(NUM_TOKENS, WIDTH), torch.empty(NUM_TOKENS, TOP_K)
        ids_TK = torch.zeros(NUM_TOKENS, TOP_K, dtype=torch.int64)
        try:
            routed = dispatcher.dispatch(x_TD, ids_TK, scores_TK)
        except DataDependentOutputException:
            return dispatcher.facts.name, True, 0
        assert dispatcher.combine(routed.x_SD, routed).shape == x_TD.shape
        return dispatcher.facts.name, False, len(routed.x_SD)


@pytest.mark.parametrize("name", DISPATCHERS)
def test_dispatcher_reads_the_host_and_receives_rows_as_its_facts_say(ranks, name: str) -> None:
    # the last two allocate alike, for the worst case: this does not tell them apart
    num_rows = {
        "nothing": NUM_TOKENS,
        "every_row": 2 * NUM_TOKENS,
        "once_a_rank": 2 * NUM_TOKENS,
        "once_a_node": 2 * NUM_TOKENS,
    }
    facts = DISPATCHERS[name]
    expected = (name, facts.reads_host, 0 if facts.reads_host else num_rows[facts.sends])
    assert ranks(2, describe, name) == [expected] * 2
