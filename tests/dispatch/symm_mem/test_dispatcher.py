"""Symmetric-memory dispatcher: equal to a dense computation, with clones, and compiled.

On CPU, ranks are processes that map each other's files, and the kernels, barrier included, run in Triton's interpreter:
the same code on the same memory, concurrently. On GPUs of one node the memory is CUDA's.
"""

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from functorch.compile import make_boxed_func
from support import load
from support.gpus import NUM_GPUS, needs_gpus, take_gpu
from torch import Tensor
from torch._dynamo.backends.common import aot_autograd

from titan_moe.dispatch.base import TokenDispatcher
from titan_moe.dispatch.clones.dispatcher import CloningDispatcher
from titan_moe.dispatch.clones.weights import SymmMemCloneWeights
from titan_moe.dispatch.symm_mem.dispatcher import SymmMemDispatcher
from titan_moe.dispatch.symm_mem.memory import SymmMemory, open_symm_memory
from titan_moe.kernels.symm_mem.arrays import signal_bytes, symm_bytes
from titan_moe.kernels.symm_mem.clones import clone_bytes
from titan_moe.layers.experts import GroupedExperts

equal_local, mapped_files = load("dispatch/test_equal_local"), load("support/mapped_files")
MOST_SPARE = 2
SIZES = (equal_local.NUM_TOKENS, equal_local.WIDTH, equal_local.TOP_K, torch.float64, torch.float64)


def share(folder: str | None) -> tuple[SymmMemory, torch.device]:
    """This rank's symmetric memory: files in a folder, or on GPUs."""
    num_ranks, elements = dist.get_world_size(), (3 * equal_local.HIDDEN + 3) * equal_local.WIDTH  # biases too
    clone_sizes = (num_ranks, equal_local.NUM_EXPERTS // num_ranks, MOST_SPARE, elements, torch.float64)
    num_bytes = max(symm_bytes(num_ranks, *SIZES), clone_bytes(*clone_sizes))
    if folder is not None:
        return mapped_files.map_files(folder, num_bytes, dist.group.WORLD), torch.device("cpu")
    device = take_gpu()
    return open_symm_memory(num_bytes, dist.group.WORLD, device), device


def my_experts(device: torch.device, *, has_bias: bool = False) -> GroupedExperts:
    per_rank = equal_local.NUM_EXPERTS // dist.get_world_size()
    first = dist.get_rank() * per_rank
    return equal_local.experts(first, first + per_rank, has_bias=has_bias).to(device)


def my_inputs(routing: str, device: torch.device) -> list[Tensor]:
    num_ranks = dist.get_world_size()
    drawn = equal_local.inputs(routing, num_ranks, [equal_local.NUM_TOKENS] * num_ranks)
    return [tensor.to(device) for tensor in drawn[dist.get_rank()]]


def poison(memory: SymmMemory) -> None:
    """Fill all but the signals with NaN and -1, after all ranks have read and before any writes."""
    for step in (lambda: None, lambda: memory.local[signal_bytes(memory.peer_ptrs_P.numel()) :].fill_(255)):
        step()
        if memory.local.is_cuda:
            torch.cuda.synchronize()
        dist.barrier()


def build_dispatcher(memory: SymmMemory, module: GroupedExperts, num_replicas: int) -> TokenDispatcher:
    """The dispatcher, with clones of the experts of `module` if there are replica slots."""
    num_experts = equal_local.NUM_EXPERTS + dist.get_world_size() * num_replicas
    inner = SymmMemDispatcher(num_experts, memory)
    if not num_replicas:
        return inner
    group = dist.new_group(backend="nccl") if memory.local.is_cuda else dist.group.WORLD
    module.transforms["clones"] = SymmMemCloneWeights(memory)
    return CloningDispatcher(inner, equal_local.NUM_EXPERTS, num_replicas, group, memory)


def run_routings(folder: str | None, routings: tuple[str, ...], num_replicas: int = 0) -> list[list[Tensor]]:
    """Results of each routing, all in the same memory."""
    memory, device = share(folder)
    module, results = my_experts(device), []
    dispatcher = build_dispatcher(memory, module, num_replicas)
    for routing in routings:
        module.zero_grad()
        poison(memory)
        results.append([tensor.cpu() for tensor in equal_local.serve(dispatcher, module, my_inputs(routing, device))])
    return results


def check_routings(answers: list[list[list[Tensor]]], routings: tuple[str, ...]) -> None:
    num_ranks = len(answers)
    for index, routing in enumerate(routings):
        drawn = equal_local.inputs(routing, num_ranks, [equal_local.NUM_TOKENS] * num_ranks)
        expected = equal_local.join([equal_local.dense_oracle(inputs) for inputs in drawn], experts_add_up=True)
        actual = equal_local.join([answer[index] for answer in answers], experts_add_up=False)
        equal_local.assert_close(actual, expected)


def stepped(dispatcher: TokenDispatcher, module: GroupedExperts) -> Callable[..., Tensor]:
    """Two layers, so that the memory is used again before the backward of either."""

    def step(x_TD: Tensor, ids_TK: Tensor, scores_TK: Tensor) -> Tensor:
        for _ in range(2):
            routed = dispatcher.dispatch(x_TD, ids_TK, scores_TK)
            x_TD = x_TD + dispatcher.combine(module(routed), routed)
        return x_TD

    return step


def compile_two_layers(folder: str | None, num_replicas: int = 0) -> tuple[list[Tensor], list[Tensor]]:
    """Output and gradients of two layers, eager and as one graph."""
    memory, device = share(folder)
    module = my_experts(device)
    step = stepped(build_dispatcher(memory, module, num_replicas), module)
    return run_and_compile(step, module, lambda: my_inputs("skewed", device), device)


def run_and_compile(
    step: Callable[..., Tensor], module: GroupedExperts, draw: Callable[[], list[Tensor]], device: torch.device
) -> tuple[list[Tensor], list[Tensor]]:
    """Output and gradients of a step, eager and as one graph."""
    compiled = torch.compile(step, fullgraph=True, backend="aot_eager" if device.type == "cpu" else "inductor")
    results = []
    for run in (step, compiled):
        x_TD, ids_TK, scores_TK, grad_TD = draw()
        x_TD, scores_TK = x_TD.requires_grad_(), scores_TK.requires_grad_()
        module.zero_grad()
        y_TD = run(x_TD, ids_TK, scores_TK)
        y_TD.backward(grad_TD)
        grads = (x_TD.grad, scores_TK.grad, module.gate_up.grad, module.down.grad)
        results.append([tensor.detach().cpu() for tensor in (y_TD, *grads)])
    return results[0], results[1]


def find_dependencies(folder: str) -> tuple[bool, bool]:
    """In the graph of a layer with clones: whether the clones' weights depend on the received rows, and the put of the
    rows' gradients on the clones' gradients."""
    memory, device = share(folder)
    module = my_experts(device)
    forward, backward = graphs_of_layer(build_dispatcher(memory, module, 1), module, my_inputs("skewed", device))
    return (
        depends_on(forward, "symm_get_clones", "symm_get"),
        depends_on(backward, "symm_put_gradients", "symm_add_clones"),
    )


def graphs_of_layer(
    dispatcher: TokenDispatcher, module: GroupedExperts, inputs: list[Tensor]
) -> tuple[torch.fx.Graph, ...]:
    """The graphs of a layer's forward and backward."""
    graphs: list[torch.fx.Graph] = []

    def keep(graph: torch.fx.GraphModule, inputs: list[Any]) -> Any:
        graphs.append(graph.graph)
        return make_boxed_func(graph.forward)

    x_TD, ids_TK, scores_TK, _ = inputs

    def layer(x_TD: Tensor) -> Tensor:
        routed = dispatcher.dispatch(x_TD, ids_TK, scores_TK)
        return dispatcher.combine(module(routed), routed)

    compiled = torch.compile(layer, fullgraph=True, backend=aot_autograd(fw_compiler=keep, bw_compiler=keep))
    compiled(x_TD.requires_grad_()).sum().backward()
    return tuple(graphs)


def depends_on(graph: torch.fx.Graph, later: str, earlier: str) -> bool:
    """Whether an op depends on the result of another one."""
    (start,), (goal,) = ([node for node in graph.nodes if name in operations(node)] for name in (later, earlier))
    pending, found = [start], set()
    while pending:
        node = pending.pop()
        found.add(node)
        pending += [other for other in node.all_input_nodes if other not in found]
    return goal in found


def operations(node: torch.fx.Node) -> list[str]:
    """Names of the op that a node calls, directly or as an argument of auto-functionalization."""
    called = [node.target, *node.args]
    return [op._opname for op in called if isinstance(op, torch._ops.OpOverload)]


def test_copies_share_symmetric_memory() -> None:
    memory = SymmMemory(torch.zeros(8, dtype=torch.uint8), torch.zeros(2, dtype=torch.int64), 0)
    dispatcher, weights = SymmMemDispatcher(8, memory), SymmMemCloneWeights(memory)
    assert copy.deepcopy(dispatcher) is dispatcher
    assert copy.deepcopy(weights).memory is memory


def open_on_two_hosts() -> str:
    """The error where each rank is on a host of its own."""
    with (
        mock.patch("socket.gethostname", return_value=f"host{dist.get_rank()}"),
        pytest.raises(ValueError) as refused,
    ):
        open_symm_memory(1024, dist.group.WORLD, torch.device("cuda"))
    return str(refused.value)


def test_open_symm_memory_refuses_ranks_of_several_nodes(ranks) -> None:
    rule = 'are on 2 nodes: host0, host1; take a smaller parallel.ep, or parallel.dispatcher = "allgather", "alltoall"'
    for message in ranks(2, open_on_two_hosts):
        assert rule in message


@pytest.mark.interpreted
@pytest.mark.parametrize(("num_ranks", "routings"), [(2, equal_local.ROUTINGS), (4, ("skewed", "one_rank_empty"))])
def test_symm_mem_over_files_equals_dense_oracle(
    ranks, tmp_path: Path, num_ranks: int, routings: tuple[str, ...]
) -> None:
    check_routings(ranks(num_ranks, run_routings, str(tmp_path), routings), routings)


@pytest.mark.interpreted
def test_symm_mem_over_files_with_clones_equals_dense_oracle(ranks, tmp_path: Path) -> None:
    routings = ("skewed", "all_to_one_rank", "dropped_choices")
    check_routings(ranks(2, run_routings, str(tmp_path), routings, MOST_SPARE), routings)


@pytest.mark.few("1")
@pytest.mark.interpreted
@pytest.mark.parametrize("num_replicas", [0, 1])
def test_symm_mem_over_files_compiles_as_one_graph(ranks, tmp_path: Path, num_replicas: int) -> None:
    for eager, compiled in ranks(2, compile_two_layers, str(tmp_path), num_replicas):
        torch.testing.assert_close(compiled, eager, rtol=1e-12, atol=1e-12)


@pytest.mark.interpreted
def test_symm_mem_exchanges_of_a_graph_depend_on_each_other(ranks, tmp_path: Path) -> None:
    assert ranks(2, find_dependencies, str(tmp_path)) == [(True, True)] * 2


RANKS = [n for n in (2, 4, 8) if n <= NUM_GPUS] or [2]


@pytest.mark.gpu
@needs_gpus
@pytest.mark.parametrize("num_ranks", RANKS)
def test_symm_mem_over_gpus_equals_dense_oracle(ranks_of_a_size, num_ranks: int) -> None:
    answers = ranks_of_a_size(num_ranks, run_routings, None, equal_local.ROUTINGS)
    check_routings(answers, equal_local.ROUTINGS)


@pytest.mark.gpu
@needs_gpus
@pytest.mark.parametrize("num_ranks", RANKS)
def test_symm_mem_over_gpus_with_clones_equals_dense_oracle(ranks_of_a_size, num_ranks: int) -> None:
    check_routings(ranks_of_a_size(num_ranks, run_routings, None, equal_local.ROUTINGS, 1), equal_local.ROUTINGS)


@pytest.mark.gpu
@needs_gpus
@pytest.mark.parametrize("num_ranks", RANKS)
@pytest.mark.parametrize("num_replicas", [0, 1])
def test_symm_mem_over_gpus_compiles_as_one_graph(ranks_of_a_size, num_ranks: int, num_replicas: int) -> None:
    for eager, compiled in ranks_of_a_size(num_ranks, compile_two_layers, None, num_replicas):
        torch.testing.assert_close(compiled, eager, rtol=1e-12, atol=1e-12)
