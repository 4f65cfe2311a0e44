"""Expert parallelism keeps the layer's permute backend."""

import pytest
import torch
from torch import nn

from titan_moe.config.dispatchers import DISPATCHERS
from titan_moe.config.kernels import Kernels
from titan_moe.config.model import ModelConfig, MoEConfig
from titan_moe.config.parallel import ParallelConfig, resolve
from titan_moe.dispatch.capacity import ExpertCapacity
from titan_moe.dispatch.symm_mem.memory import SymmMemory
from titan_moe.layers.moe import MoE
from titan_moe.parallel import expert
from titan_moe.parallel.dispatchers import BUILDERS
from titan_moe.parallel.mesh import build_meshes

CONFIG = ModelConfig(hidden_size=8, moe=MoEConfig(num_experts=4, top_k=2, ffn_hidden_size=8))


def spread(kind: str, num_ranks: int, backend: str) -> tuple[str, str]:
    """Names of the dispatcher of a layer and of its permute."""
    kind, _, overlap = kind.partition(" ")
    per_node = 2 if DISPATCHERS[kind].has_two_levels else 0
    parallel = ParallelConfig(ep=num_ranks, dispatcher=kind, overlap=overlap or "none", ep_ranks_per_node=per_node)
    with torch.device("meta"):
        moe = MoE(CONFIG, kernels=Kernels(permute=backend))
    meshes = build_meshes(resolve(parallel, num_ranks), torch.device("cpu"))
    shares = DISPATCHERS[kind].shares_memory
    memory = SymmMemory(torch.empty(0), torch.empty(per_node or num_ranks), 0) if shares else None
    nodes = expert.open_nodes(parallel, meshes.ep.get_group())
    expert.apply(nn.ModuleList([moe]), parallel, meshes, ExpertCapacity(), memory, nodes)
    assert moe.dispatcher.facts is DISPATCHERS[kind], "what the recipe was planned with is what runs"
    return type(moe.dispatcher).__name__, moe.dispatcher.permute.__name__


def test_dispatcher_table_has_a_builder_for_every_row() -> None:
    assert BUILDERS.keys() == DISPATCHERS.keys()


@pytest.mark.parametrize(("backend", "permute"), [("torch", "sort_by_expert"), ("triton", "counting_sort")])
def test_expert_apply_keeps_the_permute_backend(ranks, backend: str, permute: str) -> None:
    for kind, num_ranks, dispatcher in (
        ("local", 1, "LocalDispatcher"),
        ("allgather", 2, "AllGatherDispatcher"),
        ("alltoall", 2, "AllToAllDispatcher"),
        ("hierarchical", 4, "HierarchicalDispatcher"),
        ("hierarchical_symm_mem", 4, "HierarchicalDispatcher"),
        ("symm_mem", 2, "SymmMemDispatcher"),
        ("symm_mem tile", 2, "SymmMemFusedDispatcher"),
    ):
        assert ranks(num_ranks, spread, kind, num_ranks, backend) == [(dispatcher, permute)] * num_ranks


def split(adds_parameter: bool) -> tuple[str, str, str, str]:
    """Names of a layer's dispatcher and of the one inside, with their facts; and the problem with a parameter."""
    parallel = ParallelConfig(etp=2)
    moe = MoE(CONFIG)
    if adds_parameter:
        moe.experts.scale = nn.Parameter(torch.ones(4, 8))
    said = ""
    try:
        meshes = build_meshes(resolve(parallel, 2), torch.device("cpu"))
        expert.apply(nn.ModuleList([moe]), parallel, meshes, ExpertCapacity())
    except ValueError as error:
        said = str(error)
    return type(moe.dispatcher).__name__, type(moe.dispatcher.inner).__name__, moe.dispatcher.facts.name, said


def test_expert_apply_with_etp_wraps_the_dispatcher_of_the_layer(ranks) -> None:
    assert ranks(2, split, False) == [("ExpertTensorDispatcher", "LocalDispatcher", "local", "")] * 2


def test_expert_apply_with_etp_refuses_a_parameter_without_hidden_width(ranks) -> None:
    for *_, said in ranks(2, split, True):
        assert said.startswith("GroupedExperts.scale has no hidden width to split over parallel.etp; declare it in")
