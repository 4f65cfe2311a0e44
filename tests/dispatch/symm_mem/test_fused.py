"""Experts that fetch rows and deliver results themselves give what one process gives, and what arrived rows give.

On CPU ranks are processes that map each other's files, in Triton's interpreter and fp32, as in test_dispatcher.py; on
GPUs it is bf16.
"""

from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from support import load
from support.gpus import take_gpu
from torch import Tensor

from titan_moe.dispatch import capacity as capacity_module
from titan_moe.dispatch.base import TokenDispatcher
from titan_moe.dispatch.capacity import ExpertCapacity
from titan_moe.dispatch.clones.dispatcher import CloningDispatcher
from titan_moe.dispatch.clones.weights import SymmMemCloneWeights
from titan_moe.dispatch.symm_mem import mlp as symm_mem_mlp
from titan_moe.dispatch.symm_mem.dispatcher import SymmMemDispatcher
from titan_moe.dispatch.symm_mem.fused import PeerTokens, SymmMemFusedDispatcher
from titan_moe.dispatch.symm_mem.memory import SymmMemory, close_symm_memory, open_symm_memory
from titan_moe.kernels.choose import PERMUTE, choose_expert_mlp
from titan_moe.kernels.experts.composite_mlp import ExpertMLP
from titan_moe.kernels.experts.fused_mlp import FusedMLP, biased_expert_mlp, fused_expert_mlp
from titan_moe.kernels.symm_mem.arrays import symm_bytes
from titan_moe.layers.experts import GroupedExperts

equal_local, symm_mem = load("dispatch/test_equal_local"), load("dispatch/symm_mem/test_dispatcher")
NAMES = ("y", "dx", "dscores", "dgate_up", "ddown", "dgate_up_bias", "ddown_bias")


def dtype_of(device: torch.device) -> torch.dtype:
    return torch.bfloat16 if device.type == "cuda" else torch.float32


def my_experts(device: torch.device, mlp: ExpertMLP = fused_expert_mlp) -> GroupedExperts:
    has_bias = isinstance(mlp, FusedMLP) and mlp.format.has_bias
    module = symm_mem.my_experts(device, has_bias=has_bias).to(dtype_of(device))
    module.mlp = mlp
    return module


def my_inputs(routing: str, device: torch.device) -> list[Tensor]:
    x_TD, ids_TK, scores_TK, grad_TD = symm_mem.my_inputs(routing, device)
    return [x_TD.to(dtype_of(device)), ids_TK, scores_TK.float(), grad_TD.to(dtype_of(device))]


def dispatcher_of(
    kind: type[SymmMemDispatcher],
    memory: SymmMemory,
    module: GroupedExperts,
    num_replicas: int = 0,
    capacity: Any = None,
) -> TokenDispatcher:
    num_experts = equal_local.NUM_EXPERTS + dist.get_world_size() * num_replicas
    inner = kind(num_experts, memory, PERMUTE["triton"], capacity)
    if not num_replicas:
        return inner
    group = dist.new_group(backend="nccl") if memory.local.is_cuda else dist.group.WORLD
    module.transforms["clones"] = SymmMemCloneWeights(memory)
    return CloningDispatcher(inner, equal_local.NUM_EXPERTS, num_replicas, group, memory)


def run_both(
    folder: str | None,
    routings: tuple[str, ...],
    num_replicas: int = 0,
    most_slots: float = symm_mem_mlp.MAX_SLOTS_PER_ROW_OVERLAPPED,
    mlp: ExpertMLP = fused_expert_mlp,
) -> list[tuple[list[Tensor], ...]]:
    """Of each routing, results where rows have arrived and where they travel (on GPUs twice), one after the other in
    the same memory; sums leave early up to so many slots a row."""
    with mock.patch.object(symm_mem_mlp, "MAX_SLOTS_PER_ROW_OVERLAPPED", most_slots):
        return _run_both(folder, routings, num_replicas, mlp)


def _run_both(
    folder: str | None, routings: tuple[str, ...], num_replicas: int, mlp: ExpertMLP
) -> list[tuple[list[Tensor], ...]]:
    memory, device = symm_mem.share(folder)
    module, results = my_experts(device, mlp), []
    arrived, travelling = (
        dispatcher_of(kind, memory, module, num_replicas) for kind in (SymmMemDispatcher, SymmMemFusedDispatcher)
    )
    for routing in routings:
        ways = []
        for dispatcher in (arrived, travelling, travelling)[: 3 if memory.local.is_cuda else 2]:
            module.zero_grad()
            symm_mem.poison(memory)
            home = equal_local.serve(dispatcher, module, my_inputs(routing, device))
            ways.append([tensor.cpu() for tensor in home])
        results.append(tuple(ways))
    return results


def assert_near(
    actual: list[Tensor], expected: list[Tensor], tolerance: float, names: Sequence[object] = NAMES
) -> None:
    for name, a, b in zip(names[: len(expected)], actual, expected, strict=True):
        error = (a.double() - b.double()).norm() / b.double().norm().clamp(min=1e-6)
        assert error < tolerance, f"{name}: {error}"


def check_both(answers: list[Any], routings: tuple[str, ...], tolerance: float, *, has_bias: bool = False) -> None:
    num_ranks = len(answers)
    for index, routing in enumerate(routings):
        drawn = equal_local.inputs(routing, num_ranks, [equal_local.NUM_TOKENS] * num_ranks)
        oracles = [equal_local.dense_oracle(inputs, has_bias=has_bias) for inputs in drawn]
        oracle = equal_local.join(oracles, experts_add_up=True)
        arrived, *travelled = (
            equal_local.join(list(parts), experts_add_up=False)
            for parts in zip(*(answer[index] for answer in answers), strict=True)
        )
        assert_near(travelled[0], oracle, tolerance)
        assert_near(travelled[0], arrived, tolerance / 10)
        for again in travelled[1:]:
            assert all(map(torch.equal, travelled[0], again)), routing


def compile_two_layers(folder: str | None) -> tuple[list[Tensor], list[Tensor]]:
    """Output and gradients of two layers, eager and as one graph."""
    memory, device = symm_mem.share(folder)
    module = my_experts(device)
    step = symm_mem.stepped(dispatcher_of(SymmMemFusedDispatcher, memory, module), module)
    return symm_mem.run_and_compile(step, module, lambda: my_inputs("skewed", device), device)


def train_frozen(folder: str | None) -> tuple[list[Tensor], list[Tensor]]:
    """Gradients of rows and scores where the weights have none, and where they have."""
    memory, device = symm_mem.share(folder)
    module = my_experts(device)
    dispatcher = dispatcher_of(SymmMemFusedDispatcher, memory, module)
    answers = []
    for is_trained in (False, True):
        module.requires_grad_(is_trained)
        module.zero_grad()
        home = equal_local.serve(dispatcher, module, my_inputs("skewed", device))
        assert (home[3] is None) == (home[4] is None) == (not is_trained)
        answers.append([tensor.cpu() for tensor in home[:3]])
    return answers[0], answers[1]


def overflow(folder: str | None) -> list[tuple[bool, bool, list[Tensor]]]:
    """Of a routing that fits and of one that does not, bounded and then not: whether it was told, whether rows
    travelled, and the results."""
    memory, device = symm_mem.share(folder)
    capacity, module, results = ExpertCapacity(1.5, device), my_experts(device), []
    dispatcher = dispatcher_of(SymmMemFusedDispatcher, memory, module, capacity=capacity)
    for routing in ("random", "all_to_one_rank"):
        drawn = my_inputs(routing, device)
        for is_unbounded in (False, True):
            module.zero_grad()
            symm_mem.poison(memory)
            with capacity.unbounded() if is_unbounded else mock.patch.object(capacity_module, "SLOTS_ALIGNMENT", 1):
                home = equal_local.serve(dispatcher, module, drawn)
                is_told = bool(capacity.overflowed)
                travelled = isinstance(dispatcher.dispatch(*drawn[:3]), PeerTokens)
                capacity.reset()
            results.append((is_told, travelled, [tensor.cpu() for tensor in home]))
    return results


def check_overflow(answers: list[Any], tolerance: float) -> None:
    num_ranks = len(answers)
    for index, (routing, is_unbounded) in enumerate(
        (routing, is_unbounded) for routing in ("random", "all_to_one_rank") for is_unbounded in (False, True)
    ):
        told, travelled = ([answer[index][place] for answer in answers] for place in (0, 1))
        assert any(told) == (routing == "all_to_one_rank" and not is_unbounded)
        assert all(way != is_unbounded for way in travelled)
        assert all(bool(tensor.isfinite().all()) for answer in answers for tensor in answer[index][2][:3])
        if not any(told):
            drawn = equal_local.inputs(routing, num_ranks, [equal_local.NUM_TOKENS] * num_ranks)
            oracle = equal_local.join([equal_local.dense_oracle(inputs) for inputs in drawn], experts_add_up=True)
            home = equal_local.join([answer[index][2] for answer in answers], experts_add_up=False)
            assert_near(home, oracle, tolerance)


def stress(num_layers: int) -> tuple[int, float]:
    """Of layers with many copy blocks and tiles, each of a routing of its own: how many gave other bits when they were
    run again, and the largest distance from layers whose rows are moved before and after."""
    tokens, width, hidden, choices, per_rank = 2048, 1024, 512, 6, 4
    device, num_ranks = take_gpu(), dist.get_world_size()
    size = symm_bytes(num_ranks, tokens, width, choices, torch.bfloat16)
    memory = open_symm_memory(size, dist.group.WORLD, device)
    arrived, travelling = (
        kind(num_ranks * per_rank, memory, PERMUTE["triton"], ExpertCapacity(1.5, device))
        for kind in (SymmMemDispatcher, SymmMemFusedDispatcher)
    )
    generator = torch.Generator(device).manual_seed(dist.get_rank())
    draw = partial(torch.randn, device=device, generator=generator)
    module = GroupedExperts(per_rank, width, hidden, choose_expert_mlp("fused", "activation")).to(device).bfloat16()
    for parameter in module.parameters():
        parameter.data = draw(parameter.shape).bfloat16() / parameter.shape[-1] ** 0.5
    wrong, far = torch.zeros((), device=device), torch.zeros((), dtype=torch.float64, device=device)
    for layer in range(num_layers):
        scores_TE = torch.rand(tokens, num_ranks * per_rank, device=device, generator=generator)
        scores_TE[:, : per_rank // 2] += 0.1 * (layer % 4)  # from even to uneven
        scores_TK, ids_TK = scores_TE.topk(choices)
        inputs = draw((tokens, width)).bfloat16(), ids_TK, scores_TK, draw((tokens, width)).bfloat16()
        ways = []
        for dispatcher in (travelling, travelling, arrived) if layer % 10 == 0 else (travelling, travelling):
            module.zero_grad()
            ways.append(equal_local.serve(dispatcher, module, inputs))
        wrong += torch.stack([(a != b).any() for a, b in zip(*ways[:2], strict=True)]).any()
        for other in ways[2:]:
            errors = [(a.double() - b.double()).norm() / b.double().norm() for a, b in zip(ways[0], other, strict=True)]
            far = torch.stack([far, *errors]).max()
    close_symm_memory(dist.group.WORLD)
    return int(wrong), float(far)


@pytest.mark.interpreted
@pytest.mark.parametrize("most_slots", [0.0, symm_mem_mlp.MAX_SLOTS_PER_ROW_OVERLAPPED])
def test_files_equal_dense_oracle(ranks, tmp_path: Path, most_slots: float) -> None:
    routings = ("skewed", "dropped_choices") if most_slots else ("one_rank_empty",)
    check_both(ranks(2, run_both, str(tmp_path), routings, 0, most_slots), routings, 1e-5)


@pytest.mark.interpreted
def test_files_with_clones_equal_dense_oracle(ranks, tmp_path: Path) -> None:
    routings = ("skewed",)
    check_both(ranks(2, run_both, str(tmp_path), routings, symm_mem.MOST_SPARE), routings, 1e-5)


@pytest.mark.few("0")
@pytest.mark.interpreted
@pytest.mark.parametrize("num_replicas", [0, symm_mem.MOST_SPARE])
def test_files_with_biases_equal_dense_oracle(ranks, tmp_path: Path, num_replicas: int) -> None:
    most = symm_mem_mlp.MAX_SLOTS_PER_ROW_OVERLAPPED
    answers = ranks(2, run_both, str(tmp_path), ("skewed",), num_replicas, most, biased_expert_mlp)
    check_both(answers, ("skewed",), 1e-5, has_bias=True)


@pytest.mark.interpreted
@pytest.mark.parametrize("work", [compile_two_layers, train_frozen], ids=lambda work: work.__name__)
def test_files_give_the_same_bits(ranks, tmp_path: Path, work: Callable[..., Any]) -> None:
    for one, other in ranks(2, work, str(tmp_path)):
        assert all(map(torch.equal, one, other))


def refuse(folder: str) -> str:
    """What is said to experts that are not fused."""
    memory, device = symm_mem.share(folder)
    module = symm_mem.my_experts(device).float()
    dispatcher = dispatcher_of(SymmMemFusedDispatcher, memory, module)
    with pytest.raises(ValueError) as not_fused:
        module(dispatcher.dispatch(*my_inputs("random", device)[:3]))
    return str(not_fused.value)


def find_dependencies(folder: str) -> tuple[bool, bool, bool]:
    """In the graph of a layer with clones: whether their weights depend on the plan of the rows, the rows on them, and
    the clones' gradients on the rows' gradients."""
    memory, device = symm_mem.share(folder)
    module = my_experts(device)
    dispatcher = dispatcher_of(SymmMemFusedDispatcher, memory, module, 1)
    forward, backward = symm_mem.graphs_of_layer(dispatcher, module, my_inputs("skewed", device))
    return (
        symm_mem.depends_on(forward, "symm_get_clones", "symm_plan"),
        symm_mem.depends_on(forward, "expert_mlp_over_symm_mem", "symm_get_clones"),
        symm_mem.depends_on(backward, "symm_add_clones", "expert_mlp_over_symm_mem_backward"),
    )


@pytest.mark.interpreted
def test_exchanges_of_a_graph_depend_on_each_other(ranks, tmp_path: Path) -> None:
    assert ranks(2, find_dependencies, str(tmp_path)) == [(True, True, True)] * 2


@pytest.mark.interpreted
def test_what_cannot_fetch_is_refused(ranks, tmp_path: Path) -> None:
    for not_fused in ranks(2, refuse, str(tmp_path)):
        assert 'take perf.kernels = "fused"' in not_fused


@pytest.mark.interpreted
def test_files_say_what_has_no_room(ranks, tmp_path: Path) -> None:
    check_overflow(ranks(2, overflow, str(tmp_path)), 1e-5)


RANKS = symm_mem.RANKS
on_gpus = [pytest.mark.gpu, symm_mem.needs_gpus, pytest.mark.parametrize("num_ranks", RANKS)]


def with_gpus(test: Callable[..., None]) -> Callable[..., None]:
    for mark in on_gpus:
        test = mark(test)
    return test


@with_gpus
@pytest.mark.parametrize(("num_replicas", "most_slots"), [(0, 0.0), (0, 3.0), (1, 3.0)])
def test_gpus_equal_dense_oracle(ranks_of_a_size, num_ranks: int, num_replicas: int, most_slots: float) -> None:
    answers = ranks_of_a_size(num_ranks, run_both, None, equal_local.ROUTINGS, num_replicas, most_slots)
    check_both(answers, equal_local.ROUTINGS, 2e-2)


@with_gpus
@pytest.mark.parametrize(("num_replicas", "most_slots"), [(0, 0.0), (0, 3.0), (1, 3.0)])
def test_gpus_with_biases_equal_dense_oracle(
    ranks_of_a_size, num_ranks: int, num_replicas: int, most_slots: float
) -> None:
    routings = equal_local.ROUTINGS
    answers = ranks_of_a_size(num_ranks, run_both, None, routings, num_replicas, most_slots, biased_expert_mlp)
    check_both(answers, routings, 2e-2, has_bias=True)


@with_gpus
@pytest.mark.parametrize("work", [compile_two_layers, train_frozen], ids=lambda work: work.__name__)
def test_gpus_give_the_same_bits(ranks_of_a_size, num_ranks: int, work: Callable[..., Any]) -> None:
    for one, other in ranks_of_a_size(num_ranks, work, None):
        assert all(map(torch.equal, one, other))


@with_gpus
def test_gpus_say_what_has_no_room(ranks_of_a_size, num_ranks: int) -> None:
    check_overflow(ranks_of_a_size(num_ranks, overflow, None), 2e-2)


@with_gpus
def test_gpus_give_the_same_bits_in_a_loop(ranks_of_a_size, num_ranks: int) -> None:
    for wrong, far in ranks_of_a_size(num_ranks, stress, 2500):  # twice each, and back
        assert wrong == 0 and far < 5e-3
