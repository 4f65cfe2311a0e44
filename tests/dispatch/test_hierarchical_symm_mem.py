"""Rows once a node and then over symmetric memory: the bits of `hierarchical`, without a host read, and with a bound.

As in symm_mem/test_dispatcher.py, on CPU the ranks of a node are processes that map each other's files.
"""

from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from support import load
from support.gpus import NUM_GPUS, take_gpu
from support.reference_rows import ROWWISE_ROWS
from torch import Tensor

from titan_moe.dispatch import CloningDispatcher, HierarchicalDispatcher, TokenDispatcher
from titan_moe.dispatch import capacity as capacity_module
from titan_moe.dispatch.async_collectives import ASYNC
from titan_moe.dispatch.capacity import ExpertCapacity
from titan_moe.dispatch.clones.weights import CollectiveCloneWeights
from titan_moe.dispatch.collectives import SYNC
from titan_moe.dispatch.hierarchical import NodeGroups, _number_copies, open_node_groups
from titan_moe.dispatch.symm_mem.memory import SymmMemory, open_symm_memory
from titan_moe.kernels.symm_mem.arrays import symm_bytes

equal_local, symm_mem = load("dispatch/test_equal_local"), load("dispatch/symm_mem/test_dispatcher")
NUM_EXPERTS, NUM_TOKENS, NUM_NODES = equal_local.NUM_EXPERTS, equal_local.NUM_TOKENS, 2
ROUTINGS = ("skewed", "all_to_one_rank", "dropped_choices")


def share(folder: str | None) -> tuple[NodeGroups, SymmMemory, torch.device]:
    """The groups of two nodes, and the memory of this rank's."""
    device = torch.device("cpu") if folder is not None else take_gpu()
    group = dist.group.WORLD
    if device.type == "cuda":
        group = dist.new_group(backend="nccl")
    groups = open_node_groups(group, dist.get_world_size() // NUM_NODES)
    num_tokens, *sizes = symm_mem.SIZES
    num_bytes = symm_bytes(groups.within.size(), NUM_NODES * num_tokens, *sizes)
    if folder is not None:
        return groups, symm_mem.mapped_files.map_files(folder, num_bytes, groups.within), device
    return groups, open_symm_memory(num_bytes, groups.within, device), device


def halves(dispatcher: TokenDispatcher, module: Any, drawn: list[Tensor]) -> list[Tensor]:
    """Output and gradients, by the halves of dispatch and combine."""
    x_TD, ids_TK, scores_TK, grad_TD = drawn
    x_TD, scores_TK = x_TD.clone().requires_grad_(), scores_TK.clone().requires_grad_()
    exchange = dispatcher.prepare(ids_TK, scores_TK)
    routed = dispatcher.finish_dispatch(dispatcher.start_dispatch(x_TD, exchange), exchange)
    y_TD = dispatcher.finish_combine(dispatcher.start_combine(module(routed), routed.exchange), routed.exchange)
    y_TD.backward(grad_TD)
    return [y_TD.detach(), x_TD.grad, scores_TK.grad, module.gate_up.grad, module.down.grad]


def run_routings(folder: str | None) -> list[tuple[list[Tensor], list[bool]]]:
    """Of each routing: results, and whether each has the bits of `hierarchical`; with asynchronous collectives too."""
    groups, memory, device = share(folder)
    module, answers = symm_mem.my_experts(device), []
    exact = HierarchicalDispatcher(NUM_EXPERTS, groups)
    kinds = [
        HierarchicalDispatcher(NUM_EXPERTS, groups, collectives=collectives, memory=memory)
        for collectives in (SYNC, ASYNC)
    ]
    for routing in ROUTINGS:
        drawn, results = symm_mem.my_inputs(routing, device), []
        for dispatcher in (exact, *kinds):
            module.zero_grad()
            symm_mem.poison(memory)
            results.append([tensor.cpu() for tensor in halves(dispatcher, module, drawn)])
        same = [torch.equal(a, b) for others in results[1:] for a, b in zip(results[0], others, strict=True)]
        answers.append((results[1], same))
    return answers


def check_routings(answers: list[Any]) -> None:
    symm_mem.check_routings([[results for results, _ in rank] for rank in answers], ROUTINGS)
    assert all(same == [True] * 10 for rank in answers for _, same in rank)


def run_codes_and_clones(folder: str | None) -> tuple[list[bool], list[Tensor]]:
    """Whether rows that are sent as codes give the bits of `hierarchical`; and results with clones of experts."""
    groups, memory, device = share(folder)
    module, drawn, coded = symm_mem.my_experts(device), symm_mem.my_inputs("skewed", device), []
    for dispatcher in (
        HierarchicalDispatcher(NUM_EXPERTS, groups, row_format=ROWWISE_ROWS.name),
        HierarchicalDispatcher(NUM_EXPERTS, groups, row_format=ROWWISE_ROWS.name, memory=memory),
    ):
        module.zero_grad()
        symm_mem.poison(memory)
        coded.append(halves(dispatcher, module, drawn))
    module.zero_grad()
    group = dist.group.WORLD
    inner = HierarchicalDispatcher(
        NUM_EXPERTS + dist.get_world_size(), groups, memory=memory, num_routed_experts=NUM_EXPERTS
    )
    module.transforms["clones"] = CollectiveCloneWeights(group)
    cloned = halves(CloningDispatcher(inner, NUM_EXPERTS, 1, group), module, drawn)
    return [torch.equal(a, b) for a, b in zip(*coded, strict=True)], cloned


def run_bounded(folder: str | None) -> list[tuple[int, int, bool, float, list[Tensor]]]:
    """With a bound, with the bound lifted, and with room for all: rows that this rank sends to a node and has room for,
    whether a step is void, the factor that it needs, and the results."""
    groups, memory, device = share(folder)
    module, drawn, answers = symm_mem.my_experts(device), symm_mem.my_inputs("one_rank_empty", device), []
    for factor, is_lifted in ((0.8, False), (0.8, True), (3.0, False)):
        capacity = ExpertCapacity(factor, device)
        dispatcher = HierarchicalDispatcher(NUM_EXPERTS, groups, memory=memory, capacity=capacity)
        module.zero_grad()
        symm_mem.poison(memory)
        with capacity.unbounded() if is_lifted else mock.patch.object(capacity_module, "SLOTS_ALIGNMENT", 1):
            exchange = dispatcher.prepare(*drawn[1:3])
            routed = dispatcher.finish_dispatch(dispatcher.start_dispatch(drawn[0], exchange), exchange)
            capacity.reset()
            results = halves(dispatcher, module, drawn)
        sizes = exchange.across.rows_sent[0], len(routed.x_SD)
        is_void, need = bool(capacity.invalidates_step), capacity.needed_factor().item()
        answers.append((*sizes, is_void, need, [tensor.cpu() for tensor in results]))
    return answers


def check_bounded(answers: list[Any]) -> None:
    drawn = equal_local.inputs("one_rank_empty", len(answers), [NUM_TOKENS] * len(answers))
    expected = equal_local.join([equal_local.dense_oracle(inputs) for inputs in drawn], experts_add_up=True)
    per_rank = NUM_EXPERTS // len(answers)
    received = [0] * len(answers)
    for _, ids_TK, *_ in drawn:
        for ids in ids_TK.tolist():
            for rank in {expert // per_rank for expert in ids}:
                received[rank] += 1
    for index in (1, 2):
        actual = equal_local.join([rank[index][-1] for rank in answers], experts_add_up=False)
        equal_local.assert_close(actual, expected)
    for rank, (bounded, lifted, roomy) in enumerate(answers):
        assert bounded[0] < NUM_TOKENS and lifted[0] == roomy[0] == NUM_TOKENS, "rows to each node"
        assert lifted[1] == received[rank] and bounded[1] < roomy[1]
        assert not lifted[2] and not roomy[2] and lifted[3] == pytest.approx(roomy[3])
    assert any(bounded[2] for bounded, *_ in answers), "some rank has voided the step"


def compile_two_layers(folder: str | None) -> tuple[list[Tensor], list[Tensor]]:
    """Output and gradients of two layers, eager and as one graph."""
    groups, memory, device = share(folder)
    module = symm_mem.my_experts(device)
    dispatcher = HierarchicalDispatcher(NUM_EXPERTS, groups, memory=memory)
    step = symm_mem.stepped(dispatcher, module)
    return symm_mem.run_and_compile(step, module, lambda: symm_mem.my_inputs("skewed", device), device)


def check_compiled(answers: list[Any]) -> None:
    for eager, compiled in answers:
        for expected, actual in zip(eager, compiled, strict=True):
            torch.testing.assert_close(actual, expected, rtol=1e-12, atol=1e-12)


@pytest.mark.interpreted
def test_over_files_results_are_exact_and_those_of_hierarchical(ranks, tmp_path: Path) -> None:
    check_routings(ranks(4, run_routings, str(tmp_path)))


@pytest.mark.interpreted
def test_over_files_codes_and_clones(ranks, tmp_path: Path) -> None:
    check_codes_and_clones(ranks(4, run_codes_and_clones, str(tmp_path)))


def check_codes_and_clones(answers: list[Any]) -> None:
    assert [same for same, _ in answers] == [[True] * 5] * len(answers)
    drawn = equal_local.inputs("skewed", len(answers), [NUM_TOKENS] * len(answers))
    expected = equal_local.join([equal_local.dense_oracle(inputs) for inputs in drawn], experts_add_up=True)
    equal_local.assert_close(equal_local.join([cloned for _, cloned in answers], experts_add_up=False), expected)


@pytest.mark.interpreted
def test_over_files_with_a_bound(ranks, tmp_path: Path) -> None:
    check_bounded(ranks(4, run_bounded, str(tmp_path)))


@pytest.mark.gpu
@pytest.mark.skipif(NUM_GPUS < 4, reason="needs at least four GPUs")
@pytest.mark.parametrize(
    ("run", "check"),
    [(run_routings, check_routings), (run_bounded, check_bounded), (compile_two_layers, check_compiled)],
)
def test_over_gpus(ranks_of_a_size, run: Any, check: Any) -> None:
    check(ranks_of_a_size(4, run, None))


@pytest.mark.parametrize("rows_of_node", [1, 3, 7])
def test_copies_are_numbered_by_node_with_room_for_each(rows_of_node: int) -> None:
    sent_mask_TM = torch.rand(7, 3, generator=torch.Generator().manual_seed(2)) < 0.6
    copies_TM, tokens_U = _number_copies(sent_mask_TM, rows_of_node)
    expected = []
    for node in range(3):
        tokens = [token for token in range(7) if sent_mask_TM[token, node]][:rows_of_node]
        expected += tokens + [7] * (rows_of_node - len(tokens))
        numbers = [node * rows_of_node + index for index in range(len(tokens))]
        assert copies_TM[tokens, node].tolist() == numbers
        assert int((copies_TM[:, node] >= 0).sum()) == len(tokens)
    assert tokens_U.tolist() == expected and tokens_U.dtype == copies_TM.dtype == torch.int32
